# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line is that of the real parser: what it refuses is refused, with exit code 2."""
from __future__ import annotations

import json

import pytest
from sglang.rehearsal import flags

MODEL = ["--model-path", "/m"]


def test_every_flag_of_the_table_is_there():
    table = flags.table()
    assert len(table) > 500
    known = flags.parser(table)._option_string_actions
    assert [name for flag, entry in table.items() for name in [flag, *entry["aliases"]] if name not in known] == []


@pytest.mark.parametrize("words", [
    pytest.param(["--no-such-flag"], id="unknown"),
    pytest.param(["--cuda-graph-max-bs", "8"], id="ambiguous-prefix"),
    pytest.param(["--disaggregation-mode", "both"], id="choice"),
    pytest.param(["--tool-call-parser", "deepseek-v4"], id="parser-name"),
    pytest.param(["--tp-size", "four"], id="integer"),
    pytest.param(["--context-length", "1m"], id="suffix"),
    pytest.param(["--context-length", "1.5Mi"], id="suffix-with-decimals"),
    pytest.param(["--default-chat-template-kwargs", "{thinking"], id="json"),
    pytest.param(["--enable-flashinfer-mxfp4-moe"], id="removed"),
])
def test_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        flags.parse(MODEL + words)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_model_path_is_needed():
    with pytest.raises(SystemExit) as stop:
        flags.parse([])
    assert stop.value.code == 2


@pytest.mark.parametrize(("words", "name", "value"), [
    (["--tp", "4"], "tp_size", 4),
    (["--tensor-parallel-size", "8"], "tp_size", 8),
    (["--context-length", "1M"], "context_length", 1000000),
    (["--context-length", "512Ki"], "context_length", 524288),
    (["--numa-node", "0", "0", "1", "1"], "numa_node", [0, 0, 1, 1]),
    (["--enable-metrics"], "enable_metrics", True),
    (["--no-lora-strict-loading"], "lora_strict_loading", False),
    (["--default-chat-template-kwargs", '{"thinking": true}'], "default_chat_template_kwargs", {"thinking": True}),
    ([], "host", "127.0.0.1"),
    ([], "disaggregation_bootstrap_port", 8998),
])
def test_accepted(words, name, value):
    assert getattr(flags.parse(MODEL + words), name) == value


def test_a_retired_flag_warns_and_works(capsys):
    assert flags.parse([*MODEL, "--enable-dp-attention"]).enable_dp_attention is True
    assert "deprecated" in capsys.readouterr().err


def test_config_file_comes_before_the_command_line(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("api-key: secret\nport: 1\nenable-metrics: true\nenable-lora: false\nnuma-node: [0, 1]\n", encoding="utf-8")
    found = flags.parse(["--config", str(path), *MODEL, "--port", "2"])
    assert (found.api_key, found.port, found.enable_metrics, found.numa_node) == ("secret", 2, True, [0, 1])
    assert not found.enable_lora


@pytest.mark.parametrize(("name", "content"), [
    ("a.yaml", "no_such_key: 1\n"),
    ("a.yaml", "port: nine\n"),
])
def test_config_file_is_parsed_like_arguments(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        flags.parse(["--config", str(tmp_path / name), *MODEL])
    assert stop.value.code == 2


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.json", "{}", "YAML"),
    ("a.yaml", "- 1\n", "dictionary"),
    ("a.yaml", "disable-cuda-graph: true\n", "Unsupported"),
])
def test_config_file_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        flags.parse(["--config", str(tmp_path / name), *MODEL])


def test_config_file_twice_or_missing(tmp_path):
    with pytest.raises(ValueError, match="Multiple"):
        flags.parse(["--config", "a.yaml", "--config", "b.yaml", *MODEL])
    with pytest.raises(ValueError, match="not found"):
        flags.parse(["--config", str(tmp_path / "none.yaml"), *MODEL])


def test_the_table_in_the_package_is_the_committed_one():
    from pathlib import Path

    root = Path(__file__).resolve().parents[3]
    packaged = root / "molecule/rehearsal_host/engine/src/sglang/rehearsal/flags.json"
    assert packaged.resolve() == (root / "files/sglang_flags.json").resolve()
    assert json.loads(packaged.read_text(encoding="utf-8"))["sglang"] == "0.5.23"
