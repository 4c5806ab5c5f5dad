# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import time

import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils import driver, gpu_info, p2p_probe, preflight

GROUPS = {"prefill": [0, 1, 2, 3], "decode": [4, 5, 6, 7]}
KERNEL = "6.8.0-90-generic"


def only(findings, ident):
    found = [item for item in findings if item["id"] == ident]
    assert len(found) == 1, [item["id"] for item in findings]
    return found[0]


# -- inventory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [pytest.param(["ubuntu", "cuda"], id="DRV-11-preflight"), pytest.param("ubuntu,cuda", id="DRV-11-text")])
def test_two_sources_of_the_driver_are_refused_up_front(source, outcome):
    item = only(preflight.driver_findings({"source": source, "branch": 580}), "driver_source")
    assert item["severity"] == "error" and "one origin" in item["what"] and "not both" in item["hint"]
    assert preflight.driver_findings({"source": "cuda", "branch": "580", "version": "580.95.05"}) == []
    outcome("error driver_source", item)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("/usr/local/cuda/compat:/usr/local/cuda/lib64", id="DRV-13"),
        pytest.param("/usr/local/cuda-13.0/compat", id="DRV-13-alone"),
        pytest.param("/opt/cuda-compat-13-0/lib", id="DRV-13-package"),
    ],
)
def test_a_compat_folder_in_a_library_path_is_refused(value, outcome):
    item = only(preflight.environment_findings({"sglang_dsv4_environment": {"LD_LIBRARY_PATH": value}}), "cuda_compat")
    assert item["severity"] == "error" and "803" in item["what"] and "compat" in item["what"] and "sglang_dsv4_environment" in item["what"]
    assert preflight.environment_findings({"x": {"LD_LIBRARY_PATH": value}}, allow_compat=True) == []
    outcome("error cuda_compat", item)


def test_a_path_that_only_sounds_like_compat_is_fine():
    assert preflight.environment_findings({"x": {"LD_LIBRARY_PATH": "/opt/incompatible/lib:/opt/compatibility"}, "y": None}) == []


def test_a_variable_that_no_role_reads_is_named_with_the_one_that_was_meant():
    found = preflight.variable_findings({"known": ["sglang_dsv4_start_timeout", "verification_mode"], "given": ["sglang_dsv4_start_timout", "preflight_x"]})
    assert [(item["id"], item["severity"]) for item in found] == [("unknown_variable", "warning")] * 2
    assert "preflight_x" in found[0]["what"] and "did you mean" not in found[0]["hint"]
    assert "sglang_dsv4_start_timout" in found[1]["what"] and found[1]["hint"] == "did you mean sglang_dsv4_start_timeout?"


@pytest.mark.parametrize("value, refused", [("pdd", True), (["pd"], True), ("pd", False), (None, False)])
def test_a_word_that_the_role_would_refuse_is_found_before_any_host_is_touched(value, refused):
    given = {"known": ["sglang_dsv4_mode"], "given": ["sglang_dsv4_mode"], "choices": {"sglang_dsv4_mode": ["pd", "single"]}}
    found = preflight.variable_findings({**given, "chosen": {"sglang_dsv4_mode": value}})
    assert [item["severity"] for item in found] == (["error"] if refused else [])
    assert not refused or ("sglang_dsv4_mode" in found[0]["what"] and found[0]["hint"].endswith("one of pd, single"))


def test_an_inventory_says_everything_at_once():
    found = preflight.inventory(
        {
            "core_version": "2.17.1",
            "groups": {"dsv4_prefill": ["a"], "dsv4_decode": []},
            "driver": {"source": "cuda", "branch": 570, "version": "580.95.05-0ubuntu1"},
            "booleans": {"nvidia_driver_reboot_ok": "perhaps", "a": None, "b": "yes", "c": False},
            "plan_findings": [{"id": "gpus.count", "severity": "error", "what": "w", "hint": "h", "variable": "v"}],
        }
    )
    assert sorted(item["id"] for item in found) == [
        "ansible_version",
        "driver_branch",
        "driver_version",
        "gpus.count",
        "no_host",
        "not_a_boolean",
    ]
    assert set(found[2]) == {"id", "severity", "what", "hint"}
    assert only(found, "gpus.count")["what"] == "v: w", "the variable to mend is named"
    kept, ignored = preflight.sort_and_ignore(found, ["no_host"])
    assert [item["severity"] for item in kept] == sorted([item["severity"] for item in kept], key=preflight.SEVERITIES.index)
    assert [item["id"] for item in ignored] == ["no_host"]
    lines = preflight.table(kept, ignored)
    assert lines[0].startswith("error") and lines[-1] == "4 errors, 1 warning, 0 infos, 1 ignored"
    assert all(len(line) <= 150 for line in lines)


@pytest.mark.parametrize(
    "groups, found",
    [
        ({"dsv4_prefill": ["a"], "dsv4_decode": ["a"], "dsv4_router": ["a"]}, []),
        ({"dsv4_prefill": ["a"], "dsv4_decode": [], "dsv4_router": ["a"]}, [("error", "no_host")]),
        ({"dsv4_prefill": ["a"], "dsv4_decode": ["b"], "dsv4_router": ["a"]}, [("error", "split_pair"), ("error", "split_pair")]),
        ({"dsv4_prefill": ["a", "b"], "dsv4_decode": ["a", "b"], "dsv4_router": ["a"]}, [("error", "split_pair")]),
        # A host that is in dsv4 itself gets every play, wherever else it is.
        ({"dsv4": ["a", "b"], "dsv4_prefill": ["a"], "dsv4_decode": ["a"], "dsv4_router": ["a"]}, [("error", "split_pair")]),
        ({"dsv4_prefill": ["a", "b"], "dsv4_decode": ["b", "a"], "dsv4_router": ["a", "b"]}, [("info", "several_hosts")]),
    ],
)
def test_a_host_serves_a_whole_pair_or_nothing(groups, found):
    assert [(item["severity"], item["id"]) for item in preflight.placement_findings(groups)] == found


# -- host -----------------------------------------------------------------------------------------------------------

ACS = """00:03.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Starship/Matisse GPP Bridge
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
20:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Starship/Matisse GPP Bridge
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
e0:01.1 PCI bridge: a bridge above no GPU
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
"""


@pytest.mark.parametrize("text", [pytest.param(ACS, id="FAB-02")])
def test_only_redirecting_bridges_above_a_gpu_are_named(text, host, outcome):
    host.gpu("0000:03:00.0", bridges=("0000:00:03.1",)).gpu("0000:23:00.0", bridges=("0000:20:01.1",))
    pci, _reason = gpu_info.pci_gpus(host)
    item = only(preflight.acs_findings(preflight.parse_acs(text), pci), "acs_redirect")
    assert "0000:00:03.1" in item["what"] and "20:01.1" not in item["what"] and "e0:01.1" not in item["what"]
    assert "NCCL" in item["what"]
    assert all(word in item["hint"] for word in ("BIOS", "nvidia_driver_disable_acs", "sglang_dsv4_p2p"))
    outcome("warning acs_redirect", item)


@pytest.mark.parametrize("text", [pytest.param("00:03.1 PCI bridge: x\n\tCapabilities: <access denied>\n", id="FAB-02-denied")])
def test_access_denied_is_unknown_and_never_off(text, host, outcome):
    host.gpu("0000:03:00.0", bridges=("0000:00:03.1",))
    pci, _reason = gpu_info.pci_gpus(host)
    assert preflight.parse_acs(text) == {"0000:00:03.1": None}
    assert [item["id"] for item in preflight.acs_findings(preflight.parse_acs(text), pci)] == ["acs_unknown"]
    assert [item["id"] for item in preflight.acs_findings({}, pci, known=False)] == ["acs_unknown"]
    outcome("warning acs_unknown", preflight.acs_findings(preflight.parse_acs(text), pci)[0])


@pytest.mark.parametrize("said", [pytest.param("Cuda compilation tools, release 12.8, V12.8.93\n", id="KRN-05")])
def test_an_old_toolkit_is_not_the_drivers_cuda(said, host, outcome):
    nvcc = host.folder / "usr/local/cuda-12.8/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    (host.folder / "usr/local/cuda").symlink_to("cuda-12.8")
    host.answer(str(host.folder / "usr/local/cuda/bin/nvcc"), said)
    facts = preflight.toolkit_facts(host)
    assert facts["version"] == "12.8"
    item = only(preflight.toolkit_findings(facts, "13.0", managed=False), "toolkit_too_old")
    assert item["severity"] == "error" and "toolkit 12.8 < 12.9, required for sm_120 JIT" in item["what"]
    assert "cuda-12.8" in item["what"] and "the driver offers CUDA 13.0" in item["what"]
    outcome("error toolkit_too_old", {**item, "what": item["what"].replace(str(host.folder), "")})


@pytest.mark.parametrize(
    "managed, severity", [pytest.param(False, "warning", id="KRN-05-no-nvcc"), pytest.param(True, "info", id="KRN-05-managed")]
)
def test_no_nvcc_is_another_verdict(managed, severity, host, outcome):
    item = only(preflight.toolkit_findings(preflight.toolkit_facts(host), "13.0", managed), "toolkit_missing")
    assert item["severity"] == severity
    assert preflight.toolkit_findings({"nvcc": "n", "home": "/usr/local/cuda", "target": None, "version": "12.9"}, None, False) == []
    outcome(f"{severity} toolkit_missing", item)


@pytest.mark.parametrize(
    "running, configured, states",
    [
        pytest.param("default", "pt", ["iommu_reboot", "iommu_translated"], id="FAB-14-preflight"),
        pytest.param("pt", "pt", [], id="FAB-14-pt"),
        pytest.param("off", "off", [], id="FAB-14-off"),
    ],
)
def test_the_iommu_that_runs_counts(running, configured, states):
    kernel = {"default": "translated", "pt": "pt", "off": "off"}[running]
    state = {"iommu": {"running": kernel, "asked_running": running, "asked_configured": configured}}
    found = preflight.iommu_findings(state, 8)
    assert [item["id"] for item in found] == states
    if states:
        assert (
            "iommu.configured=pt" in found[0]["what"]
            and "iommu.running=translated" in found[0]["what"]
            and "reboot_required=true" in found[0]["what"]
        )
    unknown = {"iommu": {"running": "unknown", "asked_running": "default", "asked_configured": "default"}}
    assert [item["id"] for item in preflight.iommu_findings(unknown, 8)] == ["iommu_translated"]


@pytest.mark.parametrize("drivers", [pytest.param(["nvidia"] * 7 + ["nouveau"], id="DRV-08-preflight")])
def test_the_one_device_that_nouveau_has_is_named(drivers, host, outcome):
    for index, name in enumerate(drivers):
        host.gpu(f"0000:{index + 3:02x}:00.0", driver=name)
    pci, _reason = gpu_info.pci_gpus(host)
    item = only(preflight.device_findings(pci), "gpu_bound_to_nouveau")
    assert "gpu_bound_to=nouveau: 0000:0a:00.0" in item["what"] and "0000:03" not in item["what"]
    assert "initramfs" in item["hint"] and "reboots once" in item["hint"]
    outcome("warning gpu_bound_to_nouveau", item)


@pytest.mark.parametrize("verdict", [pytest.param("adapter_init_failed", id="DRV-06-preflight")])
def test_a_failed_start_is_an_error_that_no_installation_mends(verdict):
    state = {"findings": []}
    facts = {"state": verdict, "reason": "could not start the GPUs at 0000:01:00.0", "hint": "licence, Above 4G Decoding"}
    assert preflight.state_findings(state, facts, managed=True)[0]["severity"] == "error"


@pytest.mark.parametrize(
    "managed, severity", [pytest.param(True, "warning", id="DRV-01-managed"), pytest.param(False, "error", id="DRV-01-preflight")]
)
def test_what_the_driver_role_mends_is_no_error_before_it(managed, severity):
    state = {
        "findings": [driver.finding("driver_wrong_flavour", "error", "open kernel module required on Blackwell; found proprietary", "")]
    }
    verdict = {"state": "wrong_flavour", "reason": "open kernel module required on Blackwell; found proprietary", "hint": ""}
    assert [(item["id"], item["severity"]) for item in preflight.state_findings(state, verdict, managed)] == [
        ("driver_wrong_flavour", severity)
    ]


def test_a_driver_that_does_not_build_for_the_kernel_is_known_before():
    state = {"target_version": None, "target_kernel": "7.1.0-3-amd64", "target_kernel_reason": None}
    assert "580.159.04" in only(preflight.kernel_findings(state, "580.142", {}), "kernel_too_new")["hint"]
    assert preflight.kernel_findings(state, "580.159.04", {}) == []
    assert preflight.kernel_findings({**state, "target_kernel": "6.12.57"}, "580.95.05", {}) == []


def test_headers_are_looked_for_where_the_next_kernel_needs_them(host):
    host.write(f"lib/modules/{KERNEL}/build/Makefile", "")
    host.write("var/lib/apt/lists/archive_Packages", "")
    host.answer(
        "apt-cache policy linux-headers-6.8.0-100-generic",
        "linux-headers-6.8.0-100-generic:\n  Installed: (none)\n  Candidate: (none)\n  Version table:\n",
    )
    headers = preflight.headers_of(host, [KERNEL, "6.8.0-100-generic", None])
    assert headers == {KERNEL: True, "6.8.0-100-generic": False}
    state = {"target_version": None, "target_kernel": "6.8.0-100-generic", "target_kernel_reason": None}
    assert "6.8.0-100-generic" in only(preflight.kernel_findings(state, "", headers), "headers_missing")["what"]


def test_listening_ports_and_their_holders():
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0\n"
        "   1: 0100007F:7531 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0 0 10 0\n"
    )
    found = preflight.parse_listeners(table)
    assert found == [{"address": "127.0.0.1", "port": 30000, "inode": 4711}]
    six = "h\n   0: 00000000000000000000000001000000:7530 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 99 1\n"
    assert preflight.parse_listeners(six, six=True)[0]["address"] == "::1"
    held = [{**found[0], "pid": 7, "command": "python", "unit": "sglang-dsv4-prefill.service"}]
    planned = [{"port": 30000, "what": "prefill"}, {"port": 30000, "what": "again"}]
    assert preflight.port_findings(held, planned, ["sglang-dsv4-prefill"]) == []
    item = only(preflight.port_findings(held, planned, ["sglang-dsv4"]), "port_in_use")
    assert "port 30000 (prefill)" in item["what"] and "process 7 (python" in item["what"]


def test_our_own_listener_is_found_by_its_socket(tmp_path):
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        mine = [entry for entry in preflight.listeners(preflight.System()) if entry["port"] == port]
    assert mine and mine[0]["pid"] == os.getpid()


def test_needs_of_one_disk_add_up():
    spaces = [
        {"path": "/a", "what": "model", "need_gib": 200, "free_gib": 210.0, "device": 1},
        {"path": "/b", "what": "releases", "need_gib": 30, "free_gib": 210.0, "device": 1},
        {"path": "/c", "what": "x", "need_gib": 30, "free_gib": 31.0, "device": 2},
    ]
    item = only(preflight.disk_findings(spaces), "disk_full")
    assert "210 GiB are free, 230 GiB are needed" in item["what"] and "/c" not in item["what"]


def test_space_is_measured_where_the_folder_will_be(tmp_path):
    staged = str(tmp_path / "marker")
    rows = [{"path": str(tmp_path / "not" / "there"), "need_gib": 1}, {"path": "/x", "need_gib": 1, "unless": staged}]
    assert [row["path"] for row in preflight.disk_space(rows)] == [rows[0]["path"], "/x"]
    (tmp_path / "marker").touch()
    space = preflight.disk_space(rows)
    assert len(space) == 1 and space[0]["free_gib"] > 0


@pytest.mark.parametrize("first", [pytest.param("/usr/local/cuda-13.0/compat/libcuda.so.1", id="DRV-13-ldconfig")])
def test_a_compat_library_before_the_drivers_is_found(first, host, outcome):
    host.answer(
        "ldconfig -p",
        f"2 libs found in cache\n\tlibcuda.so.1 (libc6,x86-64) => {first}\n\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1\n",
    )
    item = only(preflight.compat_findings(host), "cuda_compat_ldconfig")
    assert first in item["what"]
    host.answer("ldconfig -p", "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1\n")
    assert preflight.compat_findings(host) == []
    outcome("error cuda_compat_ldconfig", item)


def test_other_users_of_the_gpus_are_named_and_ours_are_not():
    gpus = [
        {"index": 0, "processes": [{"pid": 7, "name": "train", "unit": None}, {"pid": 8, "name": "sglang", "unit": "sglang-dsv4.service"}]},
        {"index": 1, "processes": [{"pid": 7, "name": "train", "unit": None}]},
    ]
    item = only(preflight.process_findings(gpus, ["sglang-dsv4"]), "gpu_in_use")
    assert "process 7 (train" in item["what"] and "[0, 1]" in item["what"]


def whole_host(host):
    host.eight_gpus().loaded().modinfo()
    host.write("etc/os-release", 'ID=ubuntu\nVERSION_ID="24.04"\n').write("proc/meminfo", "MemTotal:       528280576 kB\n")
    host.write(f"boot/vmlinuz-{KERNEL}", "").write("proc/cmdline", "root=x iommu=pt\n").write(
        f"usr/src/linux-headers-{KERNEL}/Makefile", ""
    )
    host.write("sys/kernel/iommu_groups/1/type", "identity\n")
    return host


def test_a_bare_host_says_everything_at_once_and_a_good_one_nothing(host):
    (host.folder / "sys/bus/pci/devices").mkdir(parents=True)
    bare = preflight.host(
        host,
        gpu_info.gather(host, None, plan={"gpu_count": 8}),
        {"memory_gib": 64, "driver_managed": True, "toolkit_managed": True, "machine": "x86_64"},
    )
    found = {item["id"]: item["severity"] for item in bare["findings"]}
    assert found["os_unsupported"] == "error" and found["gpu_count"] == "error" and found["memory_unknown"] == "warning"
    assert found["driver_not_installed"] == "info" and found["toolkit_missing"] == "info"


def test_facts_keep_driver_and_toolkit_apart(host):
    whole_host(host)
    facts = gpu_info.gather(host, None, plan={"gpu_count": 8})
    result = preflight.host(host, facts, {"memory_gib": 256, "toolkit_managed": True, "machine": "x86_64"})
    assert "driver_cuda" in result["facts"] and result["facts"]["toolkit_cuda"] is None
    assert result["facts"]["iommu"]["running"] == "pt" and result["facts"]["cmdline_proposed"] == []
    assert not {"os_unsupported", "memory_small", "iommu_translated", "headers_missing", "gpu_count"} & {
        item["id"] for item in result["findings"]
    }


# -- copy and compare -------------------------------------------------------------------------------------------------

A, B, C = "0000:03:00.0", "0000:04:00.0", "0000:53:00.0"


def answer(status, reason=None):
    return lambda _cuda, source, target: {"from": source, "to": target, "status": status, "reason": reason, "gib_per_s": 1.0}


@pytest.mark.parametrize("status", [pytest.param("wrong_data", id="FAB-04")])
def test_a_copy_that_reports_success_with_wrong_data_is_an_error(status, outcome):
    result = p2p_probe.probe(
        [(A, B), (B, A)], 5, make=lambda: None, copy=answer(status, "4096 of 4096 bytes differ although the copy reported success")
    )
    item = only(preflight.p2p_findings(result), "p2p_wrong_data")
    assert item["severity"] == "error" and f"{A} > {B}" in item["what"] and "IOMMU" in item["hint"]
    assert preflight.p2p_findings(p2p_probe.probe([(A, B)], 5, make=lambda: None, copy=answer("ok"))) == []
    outcome("error p2p_wrong_data", item)


class WrongCuda:
    """A driver whose peer copy says yes and moves nothing."""

    def __init__(self, honest):
        self.honest, self.memory, self.library = honest, {}, self

    def cuCtxEnablePeerAccess(self, _peer, _flags):
        return 0

    def device(self, bus_id):
        return bus_id

    context = device

    def current(self, _context):
        pass

    def can_access(self, _one, _other):
        return True

    def allocate(self, size):
        self.memory[len(self.memory)] = bytearray(size)
        return len(self.memory) - 1

    def __call__(self, name, *arguments):
        if name == "cuMemcpyHtoD_v2":
            self.memory[arguments[0]][:] = arguments[1]
        elif name == "cuMemsetD8_v2":
            self.memory[arguments[0]][:] = bytes([0xA5]) * len(self.memory[arguments[0]])
        elif name == "cuMemcpyPeer" and self.honest:
            self.memory[arguments[0]][:] = self.memory[arguments[2]]
        elif name == "cuMemcpyDtoH_v2":
            arguments[0].raw = bytes(self.memory[arguments[1]])


@pytest.mark.parametrize("honest", [pytest.param(False, id="FAB-04-dropped"), pytest.param(True, id="FAB-04-honest")])
def test_the_bytes_are_compared(honest):
    row = p2p_probe.copy_pair(WrongCuda(honest), A, B, sizes=(4096, 8192))
    assert row["status"] == ("ok" if honest else "wrong_data")
    assert honest or "of 4096 bytes differ" in row["reason"]


def test_a_copy_that_never_ends_costs_the_limit_and_is_named():
    def copy(cuda, source, target):
        if source == B:
            time.sleep(60)
        return answer("ok")(cuda, source, target)

    began = time.monotonic()
    result = p2p_probe.probe([(A, B), (B, A), (C, A)], 0.7, make=lambda: None, copy=copy)
    assert time.monotonic() - began < 5
    assert [row["status"] for row in result["pairs"]] == ["ok", "timeout", "not_tried"]
    assert f"{B} > {A}" in only(preflight.p2p_findings(result), "p2p_timeout")["what"]


def test_many_short_copies_are_no_long_one():
    def copy(cuda, source, target):
        time.sleep(0.3)
        return answer("ok")(cuda, source, target)

    result = p2p_probe.probe([(A, B), (B, A), (A, C), (C, A)], 1.0, make=lambda: None, copy=copy)
    assert [row["status"] for row in result["pairs"]] == ["ok"] * 4


def test_where_cuda_is_not_there_it_says_so():
    def refuse():
        raise p2p_probe.CudaError("libcuda.so.1 cannot be loaded")

    result = p2p_probe.probe([(A, B)], 5, make=refuse)
    assert result == {"ran": False, "reason": "libcuda.so.1 cannot be loaded", "pairs": []}
    item = only(preflight.p2p_findings(result), "p2p_not_tested")
    assert item["severity"] == "info" and "libcuda" in item["what"]
    assert not p2p_probe.probe([(A, B)], 5, make=lambda: os._exit(1))["ran"]


def test_peers_are_the_gpus_of_one_instance():
    pairs = preflight.peer_pairs(GROUPS)
    assert len(pairs) == 24 and (0, 3) in pairs and (3, 0) in pairs and (3, 4) not in pairs
    matrix = [["self" if a == b else "ok" for b in range(8)] for a in range(8)]
    assert preflight.matrix_findings({"read": matrix}, pairs) == [] and preflight.matrix_findings(None, pairs) == []
    matrix[0][1] = "chipset_not_supported"
    assert "0>1 chipset_not_supported" in only(preflight.matrix_findings({"read": matrix}, pairs), "p2p_refused")["what"]
