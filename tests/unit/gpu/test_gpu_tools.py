# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What of tests/gpu can be tested without a GPU: command lines, the comparison of two runs, and the trimming of fat binaries."""

from __future__ import annotations

import argparse
import importlib.util
import json
import struct
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FLAGS = json.loads((ROOT / "files/sglang_flags.json").read_text(encoding="utf-8"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", ROOT / "tests/gpu" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", name="servers")
def _servers():
    return load("servers")


def test_every_server_has_a_command_line_that_the_engine_takes(servers):
    from ansible_collections.blackwell.dsv4.plugins.module_utils.serving_plan import check_argv

    for name, server in servers.SERVERS.items():
        argv, environment = servers.command(name)
        assert environment["PYTHONPATH"].split(":")[-2:] == [str(ROOT / "tests/gpu/path"), servers.KERNELS]
        if server.instance != "router":
            assert check_argv(argv[1:], FLAGS["flags"]) == []
            assert environment["CUDA_VISIBLE_DEVICES"] == str(server.gpu)


def test_only_what_is_listed_differs_from_the_product(servers):
    """Whoever adds a flag to the product's units gets it here too."""
    argv = servers.command("decode")[0]
    text = (ROOT / "inventory/blackwell8/group_vars/all/topology.yml").read_text(encoding="utf-8")
    plan = servers.serving_plan(yaml.safe_load(text)["dsv4_topology"], engine=servers.ENGINE, model_path="/m")
    product = plan["instances"]["decode"]["argv"]
    flags = [{word for word in words if word.startswith("--")} for words in (argv, product)]
    assert flags[1] - flags[0] == {"--numa-node"}
    assert flags[0] - flags[1] == {"--config", "--load-format", "--moe-runner-backend", "--watchdog-timeout", "--cuda-graph-bs-decode", "--max-total-tokens"}


def test_two_halves_share_the_only_gpu(servers, monkeypatch):
    monkeypatch.setattr(servers, "GPUS", 1)
    assert [servers.command(name)[1]["CUDA_VISIBLE_DEVICES"] for name in ("prefill", "decode")] == ["0", "0"]


@pytest.mark.parametrize("program, ended", [
    pytest.param(["sh", "-c", "sleep 0.3; exit 70"], "status 70", id="status"),
    pytest.param(["sh", "-c", "kill -9 $$"], "status -9", id="signal"),
    pytest.param(["/nonexistent/engine"], "No such file", id="no-program"),
])
def test_a_server_log_says_how_the_server_ended(servers, monkeypatch, tmp_path, program, ended):
    monkeypatch.setattr(servers, "DIR", tmp_path)
    monkeypatch.setattr(servers, "command", lambda name: (program, {"PATH": "/usr/bin:/bin"}))
    servers.start("stock")
    deadline = time.monotonic() + 10
    while "==exit==" not in (log := (tmp_path / "logs/stock.log").read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.startswith("==start==") and ended in log.splitlines()[-1]
    assert not servers.alive("stock")


def steps(*rows):
    return {"tokens": [row[0][0] for row in rows], "top": [list(row) for row in rows]}


@pytest.fixture(scope="module", name="measure")
def _measure():
    sys.path.insert(0, str(ROOT / "tests/gpu"))
    try:
        return load("measure")
    finally:
        sys.path.remove(str(ROOT / "tests/gpu"))


def test_agreement_ends_with_the_first_token_that_differs(measure):
    one = steps([[7, -1.0], [8, -1.5]], [[3, -1.0], [4, -1.1]], [[9, -5.0]])
    two = steps([[7, -1.25], [8, -1.5]], [[4, -1.0], [3, -1.05]], [[1, 0.0]])
    found = measure.agreement(one, two)
    assert (found["steps"], found["differs_at"], found["missing"]) == (2, 1, 0)
    assert found["first"] == [0.25, 0] and found["later"] == pytest.approx([0.05, 0.1])
    assert found["margin"] == pytest.approx(0.1)
    assert measure.agreement(one, one)["differs_at"] is None and not any(measure.agreement(one, one)["later"])
    broken = steps([[7, float("nan")], [8, -1.5]])
    assert measure.agreement(one, broken)["first"] == [float("inf"), 0]


def test_compare_holds_two_ways_of_batching_of_one_server_against_each_other(measure, tmp_path, capsys):
    runs = {key: [steps([[7, -1.0]], *([[3, at], [4, -2.0]] for at in values))] for key, values in (("1", (-1.0, -1.25)), ("8", (-1.0, -1.5)))}
    (tmp_path / "one.json").write_text(json.dumps({"lengths": [5], "runs": runs}), encoding="utf-8")
    both = [str(tmp_path / "one.json")] * 2
    measure.compare(argparse.Namespace(one=both[0], two=both[1], at_once=["1", "8"]))
    assert "| 1, 8 | 5 to 5 | 1 | 0.000 | 0.062 | 0.25 | 0.25 | 1 | 0 of 5 |" in capsys.readouterr().out


def fat_binary(*entries):
    """A container of (kind, arch, payload)."""
    body = b""
    for kind, arch, payload in entries:
        body += struct.pack("<HHIQIIHHI", kind, 1, 64, len(payload), 0, 0, 0, 0, arch).ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_code_for_other_gpus_is_zeroed_and_nothing_else():
    assemble = load("assemble")
    library = b"head" + fat_binary((2, 80, b"A" * 32), (2, 90, b"B" * 16), (1, 80, b"ptx!")) + b"middle" + fat_binary((2, 120, b"C" * 8)) + b"tail"
    data = bytearray(library)
    assert assemble.other_code(data, 90) == 40
    assert bytes(data) == library.replace(b"A" * 32, bytes(32)).replace(b"C" * 8, bytes(8))


def test_parts_leave_out_what_a_server_does_not_load():
    assemble = load("assemble")
    assert assemble.unwanted("torch/include/ATen/ATen.h") and assemble.unwanted("sgl_kernel/flash_ops.abi3.so")
    assert not assemble.unwanted("torch/lib/libtorch_cpu.so") and not assemble.unwanted("torch/testing/_internal/common_utils.py")
    assert assemble.lock()["sglang"] == "0.5.23" and assemble.lock()["networkx"] != "3.6.1"
