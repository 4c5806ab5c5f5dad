# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPUs, start-up arguments and processes; the wheel and its lock."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import zipfile

import pytest
import rehearsal_engine as support
from sglang.rehearsal import devices, flags, resolve

UUIDS = ["GPU-00000000-0000-4000-8000-00000000000%d" % index for index in range(8)]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A description file and a run directory."""
    path = tmp_path / "gpus.json"

    def describe(**faults):
        gpus = [{"uuid": uuid, **({"fault": faults["gpu%d" % index]} if "gpu%d" % index in faults else {})} for index, uuid in enumerate(UUIDS)]
        path.write_text(json.dumps({"defaults": {"memory_total_mib": 97887, "memory_used_mib": 4}, "gpus": gpus}), encoding="utf-8")
        return path

    describe()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("REHEARSAL_GPUS", str(path))
    monkeypatch.setenv("REHEARSAL_GPU_PROCESSES", str(tmp_path / "run"))
    return describe


def args(**values):
    return {
        "tp_size": 4,
        "pp_size": 1,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "numa_node": None,
        "mem_fraction_static": 0.85,
        "speculative_algorithm": None,
        "max_total_tokens": None,
        "page_size": 256,
        **values,
    }


def placed(values, visible):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [UUIDS.index(gpu.uuid) for gpu in devices.place(values, environment)]


def test_by_index_uuid_or_all(host):
    assert placed(args(), None) == [0, 1, 2, 3]
    assert placed(args(), "4,5,6,7") == [4, 5, 6, 7]
    assert placed(args(), ",".join(UUIDS[4:])) == [4, 5, 6, 7]
    assert placed(args(base_gpu_id=4), None) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("values", "visible", "message"),
    [
        pytest.param({"tp_size": 8}, "4,5,6,7", "rank 4 asks for gpu_id 4", id="PD-16-tp"),
        pytest.param({"base_gpu_id": 4}, "4,5,6,7", "rank 0 asks for gpu_id 4", id="PD-16-base"),
        pytest.param({}, "", "No CUDA GPUs are available", id="none"),
        pytest.param({}, "0,1,9,3", "rank 2 asks for gpu_id 2, 2 visible", id="bad-entry-ends-the-list"),
        pytest.param({}, "GPU-ffffffff-0000-4000-8000-000000000000", "No CUDA GPUs", id="unknown-uuid"),
    ],
)
def test_refused_devices(host, values, visible, message):
    with pytest.raises(devices.DeviceError, match=message):
        placed(args(**values), visible)


def test_a_gpu_that_fell_off_the_bus(host):
    host(gpu5="missing")
    with pytest.raises(devices.DeviceError, match="invalid device ordinal"):
        placed(args(), ",".join(UUIDS[4:]))
    host(gpu5="lost")
    with pytest.raises(devices.DeviceError, match="device is lost"):
        placed(args(), ",".join(UUIDS[4:]))


def test_numa_list_is_indexed_by_gpu(host):
    with pytest.raises(IndexError, match="4 entries"):
        placed(args(base_gpu_id=4, numa_node=[1, 1, 1, 1]), None)
    assert placed(args(base_gpu_id=4, numa_node=[0, 0, 0, 0, 1, 1, 1, 1]), None) == [4, 5, 6, 7]


def test_memory_that_others_hold(host):
    gpus = devices.place(args(), {})
    devices.check_memory(gpus, 0.85)
    devices.register(os.getpid(), gpus[2], 0.4, "somebody")
    with pytest.raises(devices.DeviceError, match="CUDA out of memory.*GPU 2"):
        devices.check_memory(gpus, 0.85)


def test_entries_of_dead_processes_do_not_count(host, tmp_path):
    entry = {"pid": 4194304, "gpus": [UUIDS[0]], "used_mib_per_gpu": 90000, "name": "gone"}
    (tmp_path / "run" / "4194304.json").write_text(json.dumps(entry), encoding="utf-8")
    devices.check_memory(devices.place(args(), {}), 0.85)


def test_kv_capacity(host):
    gpus = devices.place(args(), {})
    assert 2_500_000 < devices.kv_tokens(args(), gpus) < 2_700_000
    assert devices.kv_tokens(args(speculative_algorithm="EAGLE"), gpus) < devices.kv_tokens(args(), gpus)
    assert devices.kv_tokens(args(max_total_tokens=1000), gpus) == 768
    with pytest.raises(devices.DeviceError, match="mem-fraction-static"):
        devices.kv_tokens(args(mem_fraction_static=0.3), gpus)


# ---- what the arguments become


@pytest.fixture
def resolved(tmp_path):
    config = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "max_position_embeddings": 1048576}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def run(*words):
        return resolve.resolve(flags.parse(["--model-path", str(tmp_path), *words]))

    return run


EAGLE = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]


def test_resolution(resolved):
    found = resolved("--page-size", "64", "--attention-backend", "triton", "--reasoning-parser", "auto", "--tool-call-parser", "auto")
    assert (found["page_size"], found["attention_backend"], found["moe_runner_backend"], found["kv_cache_dtype"]) == (
        256,
        "dsv4",
        "flashinfer_mxfp4",
        "fp8_e4m3",
    )
    assert (found["reasoning_parser"], found["tool_call_parser"]) == ("deepseek-v4", "deepseekv4")
    assert resolved(*EAGLE)["speculative_moe_runner_backend"] == "flashinfer_mxfp4"
    decode = resolved("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake_tcp")
    assert (decode["disaggregation_transfer_backend"], decode["disable_radix_cache"]) == ("mooncake", True)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        pytest.param(["--speculative-algorithm", "NEXTN"], AssertionError, id="NEXTN"),
        pytest.param(["--speculative-algorithm", "eagle"], AssertionError, id="lower-case"),
        pytest.param(["--speculative-algorithm", "EAGLE"], AssertionError, id="no-topk"),
        pytest.param(["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"], AssertionError, id="no-steps"),
        pytest.param(["--context-length", "2Mi"], ValueError, id="context"),
        pytest.param(["--quantization", "mxfp4"], ValueError, id="quantization"),
        pytest.param(["--dsv4-attn-backend", "trtllm"], ValueError, id="sm100-attention"),
        pytest.param(["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "fake"], AssertionError, id="fake-prefill"),
    ],
)
def test_arguments_that_end_a_start(resolved, words, kind):
    with pytest.raises(kind):
        resolved(*words)


def test_another_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', encoding="utf-8")
    with pytest.raises(ValueError, match="DeepseekV4"):
        resolve.resolve(argparse.Namespace(model_path=str(tmp_path)))


# ---- processes with GPUs


def test_ranks_register_and_go(engines, host, tmp_path):
    environment = {"REHEARSAL_GPUS": str(tmp_path / "gpus.json"), "REHEARSAL_GPU_PROCESSES": str(tmp_path / "run"), "CUDA_VISIBLE_DEVICES": ",".join(UUIDS[4:])}
    engine = engines(environment=environment)
    entries = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "run").iterdir()}
    children = engine.children()
    for rank in range(4):
        pid = children["sglang::scheduler_TP%d" % rank]
        assert entries["%d.json" % pid] == {"pid": pid, "gpus": [UUIDS[4 + rank]], "used_mib_per_gpu": 83203, "name": "sglang::scheduler_TP%d" % rank}
    assert len(entries) == 4
    second = engines(environment=environment, wait=False)
    assert second.popen.wait(20) == 1
    assert "CUDA out of memory" in second.log()
    assert engine.stop() == 0
    assert list((tmp_path / "run").iterdir()) == []


def test_rendezvous_port_that_is_taken(engines):
    port = str(support.free_port())
    first = engines("null", "--nccl-port", port)
    second = engines("null", "--nccl-port", port, wait=False)
    assert second.popen.wait(20) != 0
    assert "EADDRINUSE" in second.log()
    assert "port: " + port in second.log()
    assert first.stop() == 0


def test_http_port_that_is_taken(engines):
    first = engines()
    second = engines(port=first.port, wait=False)
    assert second.popen.wait(20) == 1
    assert "address already in use" in second.log()


# ---- the package


def test_lock_fits_the_sources(tmp_path):
    lock = support.LOCK.parent / "lock.py"
    assert subprocess.run([sys.executable, str(lock), "--check"], stdout=subprocess.PIPE, check=False).returncode == 0
    for _once in range(2):
        subprocess.run([sys.executable, str(lock), "--wheelhouse", str(tmp_path)], check=True, stdout=subprocess.PIPE)
        (wheel,) = tmp_path.glob("*.whl")
        assert wheel.name == "sglang-0.5.23+rehearsal-py3-none-any.whl"
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() in support.LOCK.read_text(encoding="utf-8")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "sglang/launch_server.py" in names
        assert json.loads(archive.read("sglang/rehearsal/flags.json"))["sglang"] == "0.5.23"
        assert archive.testzip() is None


def test_lock_holds_only_pins_with_hashes():
    lines = [line for line in support.LOCK.read_text(encoding="utf-8").replace("\\\n", " ").splitlines() if not line.startswith("#")]
    assert len(lines) > 10
    assert [line for line in lines if "==" not in line or "--hash=sha256:" not in line] == []
    assert "://" not in "".join(lines)
