# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the check of command lines collects them; the engine itself is not needed here."""
from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from ansible_collections.blackwell.dsv4.plugins.filter.systemd_word import systemd_word

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check_engine_args", ROOT / "tests" / "engine_args" / "check_engine_args.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_unit_gives_back_what_was_rendered(check, tmp_path):
    argv = ["/opt/engine/bin/python", "-m", "sglang.launch_server", "--model-path", "/m", "--default-chat-template-kwargs", '{"a": "50% of $x"}']
    environment = {"SGLANG_HOST_IP": "127.0.0.1", "X": "two words 100%"}
    lines = ["[Service]", "# ExecStart=/bin/false -m sglang.launch_server"]
    lines += ["Environment=" + systemd_word("%s=%s" % pair, command=False) for pair in environment.items()]
    lines += ["ExecStart=" + " \\\n    ".join(map(systemd_word, argv)), "Restart=always", ""]
    (tmp_path / "worker.service").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "router.service").write_text("[Service]\nExecStart=/opt/router/bin/python launcher.py\n", encoding="utf-8")
    found, = check.from_units(tmp_path)
    assert found == {"name": "worker.service", "argv": argv, "environment": environment}
    assert check.arguments_of(found["argv"]) == argv[3:]


@pytest.mark.parametrize("name", ["blackwell8", "rehearsal"])
def test_an_inventory_gives_every_worker_in_every_variant(check, name):
    lines = check.from_inventory(ROOT / "inventory" / name)
    assert len(lines) == 2 * 4 * 3  # transfer backends; none, none by UUID, mtp, dspark; prefill, decode, single
    assert len({line["name"] for line in lines}) == len(lines)
    for line in lines:
        words = check.arguments_of(line["argv"])
        assert ("--speculative-algorithm" in words) == (" mtp" in line["name"] or " dspark" in line["name"])
        assert words[words.index("--model-path") + 1] == "/model"


def test_every_flag_of_the_inventories_is_in_the_table(check):
    flags = json.loads((ROOT / "files" / "sglang_flags.json").read_text(encoding="utf-8"))["flags"]
    known = {name for flag, entry in flags.items() for name in [flag, *entry["aliases"]]}
    for name in ("blackwell8", "rehearsal"):
        for line in check.from_inventory(ROOT / "inventory" / name):
            assert [word for word in check.arguments_of(line["argv"]) if word.startswith("--") and word not in known] == []
