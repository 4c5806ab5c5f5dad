# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ended a server, from the last lines of its journal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.blackwell.dsv4.plugins.module_utils import journal_classifier as logic

GRAPHS = ["Capture cuda graph begin. This can take up to several minutes.", "Traceback (most recent call last):",
          '  File "x.py", line 7, in init_cuda_graphs', "Exception: Capture CUDA graph failed"]


def check(answer, name, permanent, *words):
    assert answer["class"] == name
    assert answer["permanent"] is permanent
    for word in words:
        assert word in "%s %s %s" % (answer["what"], answer["advice"], answer["details"]), word


@pytest.mark.parametrize("lines,options,name,permanent,words", [
    pytest.param(
        ["tvm.error.InternalError: Assertion error (/deepgemm/csrc/apis/hyperconnection.hpp:56): Unsupported architecture",
         "systemd[1]: sglang-dsv4-prefill.service: Main process exited, code=exited, status=1/FAILURE"],
        {"engine_version": "0.5.21"}, "kernel_unsupported_on_sm120", True, ["0.5.21", "0.5.23", "rollback.yml"],
        id="KRN-01"),
    pytest.param(
        GRAPHS + ["RuntimeError: RMSNorm failed with error code no kernel image is available for execution on the device"],
        {}, "no_kernel_image", True, ["sm_120"], id="KRN-03"),
    pytest.param(
        ["ptxas error : Entry function 'void paged_mqa_logits_metadata<64>' uses too much shared data "
         "(0xc980 bytes, 0xc000 max)", "Scheduler hit an exception: RuntimeError"],
        {}, "shared_memory_limit", True, ["51584", "49152", "cuda_graph_max_bs_decode"], id="KRN-07"),
    pytest.param(
        ["triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376"],
        {}, "shared_memory_limit", True, ["131072", "101376"], id="KRN-07 Triton"),
    pytest.param(
        GRAPHS + ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of "
                  "95.07 GiB of which 298.69 MiB is free. Including non-PyTorch memory, this process has 94.77 GiB memory in "
                  "use."],
        {}, "oom_load_or_capture", True, ["mem_fraction_static"], id="KRN-10"),
    pytest.param(
        ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 3 has a total capacity of "
         "95.07 GiB of which 298.69 MiB is free. Including non-PyTorch memory, this process has 40.00 GiB memory in use."],
        {}, "oom_load_or_capture", True, ["another process holds 54.8 GiB of GPU 3"], id="KRN-10 orphan"),
    pytest.param(
        ["[TP2] dsv4_sm120: nextn_moe: NaN in 3 of 3 rows of the draft so far",
         "[TP2] dsv4_sm120: nextn_moe: the draft computes NaN in 48 of its last 48 rows; ending",
         "SIGQUIT received. signum=3, frame=None. It usually means one child failed."],
        {}, "draft_nan", True, ["dsv4_topology.speculation", "files/moe_methods.json"], id="draft of NaN"),
    pytest.param(
        ["CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 94.97 GiB"],
        {"used_mib": [93817, 15, 15, 15]}, "load_not_spread", True, ["93.8 GiB / 15 MiB x3"], id="FAB-11-journal"),
    pytest.param(
        ["setting membind: Invalid argument", "exit code 1"], {}, "numa_refused", True,
        ["NUMA binding refused by cpuset/seccomp"], id="FAB-12-journal"),
    pytest.param(
        ["[rank0]: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
         "port: 35061, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"],
        {}, "port_in_use", False, ["35061"], id="PD-02-journal"),
    pytest.param(
        ["Load weight begin. avail mem=94.20 GB", "sglang-dsv4-decode.service: start operation timed out. Terminating."],
        {"result": "timeout"}, "start_timeout", False, ["weight load", "sglang_dsv4_start_timeout"], id="SVC-01-journal"),
    pytest.param(
        ["RuntimeError: no CUDA-capable device is detected"], {}, "no_gpu", False, ["nvidia-uvm"], id="SVC-06-journal"),
    pytest.param(
        ["Failed to register memory: Cannot allocate memory"], {}, "memlock", True, ["LimitMEMLOCK"], id="SVC-08-journal"),
    pytest.param(
        ["PermissionError: [Errno 13] Permission denied: '/tmp/triton/abc.lock'"], {}, "cache_permission", True,
        ["/var/cache/dsv4"], id="SVC-10-journal"),
])
def test_real_reports(lines, options, name, permanent, words):
    check(logic.classify(lines, **options), name, permanent, *words)


@pytest.mark.parametrize("line,name", [
    ("launch_server.py: error: unrecognized arguments: --nonsense", "bad_arguments"),
    ("ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory", "missing_library"),
    ("ModuleNotFoundError: No module named 'mooncake'", "missing_package"),
    ("OSError: [Errno 28] No space left on device", "disk_full"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "checkpoint"),
    ("could not fetch prefill parallel info from 127.0.0.1:8998", "peer_timeout"),
    ("port 30001 (port of sglang-dsv4) is held on 0.0.0.0 by pid 12 (nginx, unit nginx.service): port 30001 is taken",
     "port_in_use"),
    ("something that nobody has seen before", "unknown"),
])
def test_other_lines(line, name):
    assert logic.classify(["first", line])["class"] == name


def test_four_full_cards_are_an_ordinary_shortage():
    lines = ["CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 94.97 GiB"]
    assert logic.classify(lines, used_mib=[93817, 93000, 92000, 93500])["class"] == "oom_load_or_capture"
    assert logic.memory_spread([93817, 15]) and not logic.memory_spread([93817]) and not logic.memory_spread([])


def test_phases_of_a_start():
    lines = ["server_args=ServerArgs(...)", "Load weight begin. avail mem=1", "Capture cuda graph begin"]
    assert [logic.last_phase(lines[:count]) for count in range(4)] == [
        "nothing logged", "argument check", "weight load", "CUDA graph capture"]


def test_the_unknown_stays_unknown_with_its_last_lines():
    answer = logic.classify(["line %d" % number for number in range(30)])
    assert answer["class"] == "unknown" and answer["permanent"] is False
    assert answer["evidence"].splitlines() == ["line %d" % number for number in range(25, 30)]


@given(st.lists(st.text(max_size=60), max_size=12))
def test_any_journal_gets_an_answer(lines):
    answer = logic.classify(lines)
    assert answer["class"] and isinstance(answer["permanent"], bool)
