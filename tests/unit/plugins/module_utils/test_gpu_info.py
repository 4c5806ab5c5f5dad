# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils import gpu_info

ROOT = pathlib.Path(__file__).resolve().parents[4]
NVML = ROOT / "molecule/rehearsal_host/nvml"
SIX = (
    ("index", "index", "int"),
    ("uuid", "uuid", "text"),
    ("bus_id", "pci.bus_id", "bus"),
    ("memory_total_mib", "memory.total", "int"),
    ("ecc", "ecc.mode.current", "switch"),
    ("temperature_c", "temperature.gpu", "int"),
)


def uuid(index):
    return f"GPU-00000000-0000-4000-8000-00000000000{index}"


def gpu(index, **values):
    row = gpu_info.blank(index)
    row.update(
        uuid=uuid(index),
        bus_id=f"0000:{index + 3:02x}:00.0",
        memory_total_mib=97887,
        memory_used_mib=4,
        utilization_percent=0,
        power_draw_w=31.0,
        bar1_total_mib=131072,
        slot=None,
        **values,
    )
    return gpu_info.judge(row)


# -- cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            "0, GPU-00000000-0000-4000-8000-000000000000, 00000000:03:00.0, 97887, Enabled, 31\n"
            "1, GPU-00000000-0000-4000-8000-000000000001, 00000000:04:00.0, 97887, [N/A], [N/A]\n"
            "2, GPU-00000000-0000-4000-8000-000000000002, 00000000:53:00.0, [Unknown Error], Disabled, 33\n"
            "3, [GPU requires reset], 00000000:54:00.0, [GPU requires reset], [GPU requires reset], [GPU requires reset]\n",
            id="DRV-15",
        )
    ],
)
def test_a_bad_field_costs_only_itself(rows, outcome):
    gpus = [gpu_info.judge(row) for row in gpu_info.parse_smi_csv(rows, SIX)]
    assert [row["index"] for row in gpus] == [0, 1, 2, 3]
    assert [row["bus_id"] for row in gpus] == ["0000:03:00.0", "0000:04:00.0", "0000:53:00.0", "0000:54:00.0"]
    assert [row["usable"] for row in gpus] == [True, True, False, False]
    assert gpus[1]["ecc"] is None and gpus[1]["unknown"] == {"ecc": "[N/A]", "temperature_c": "[N/A]"}
    assert gpus[2]["memory_total_mib"] is None and gpus[2]["unusable_reason"] == "[Unknown Error]"
    assert gpus[2]["ecc"] is False and gpus[2]["temperature_c"] == 33
    assert gpus[3]["unusable_reason"] == "[GPU requires reset]"
    usable = " and ".join(str(row["index"]) for row in gpus if row["usable"])
    outcome("4 rows, usable 0 and 1", f"{len(gpus)} rows, usable {usable}", gpus[3]["unusable_reason"])


@pytest.mark.parametrize("busy", [pytest.param([(100, 121.40, 624), (100, 119.87, 624), (0, 31.02, 4)], id="FAB-01")])
def test_busy_gpus_with_memory_and_no_process_are_wedged(busy, outcome):
    gpus = [gpu(i) for i in range(3)]
    for row, (utilization, watts, used) in zip(gpus, busy):
        row.update(utilization_percent=utilization, power_draw_w=watts, memory_used_mib=used)
        gpu_info.judge(row)
    found = gpu_info.health(gpus, [])
    assert [item["id"] for item in found] == ["gpu_wedged"]
    assert "[0, 1]" in found[0]["what"] and "reboot" in found[0]["hint"]
    # The same figures with a process, or with processes that cannot be seen, accuse nobody.
    gpus[0]["processes"] = [{"pid": 1, "name": "x", "used_mib": 600}]
    gpus[1]["unknown"]["processes"] = "Insufficient Permissions"
    assert not any(gpu_info.judge(row)["wedged"] for row in gpus)
    # Two of the three signals are not enough.
    gpus[2].update(utilization_percent=0, power_draw_w=121.0, memory_used_mib=624)
    assert gpu_info.judge(gpus[2])["wedged"] is False
    outcome("error gpu_wedged", found[0])


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(
            "[ 5.1] NVRM: loading NVIDIA UNIX Open Kernel Module\n"
            "[ 99.2] NVRM: Xid (PCI:0000:53:00): 79, GPU has fallen off the bus.\n"
            "[ 99.3] NVRM: Xid (PCI:0000:53:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)\n"
            "[ 99.4] NVRM: Xid (PCI:0000:04:00): 13, Graphics Exception\n",
            id="FAB-09",
        )
    ],
)
def test_xids_are_laid_at_the_instance_that_owns_the_gpu(log, host, outcome):
    gpus = [gpu(i) for i in range(8)]
    gpus[2]["bus_id"] = "0000:53:00.0"
    found = gpu_info.health(gpus, gpu_info.parse_xids(log), {"prefill": [0, 1, 2, 3], "decode": [4, 5, 6, 7]})
    assert [item["id"] for item in found] == ["gpu_xid", "gpu_xid"]  # 13 is the program's fault, not the card's
    assert all("0000:53:00.0" in item["what"] and "prefill" in item["what"] and "decode" not in item["what"] for item in found)
    assert all("power-cycle the host" in item["hint"] for item in found)
    # An earlier boot's Xids cannot be read: dmesg has this boot only, and the journal is cut at it.
    host.answer("dmesg", code=1, err="dmesg: read kernel buffer failed: Operation not permitted").answer(
        "journalctl --dmesg --boot=0", "quiet\n"
    )
    assert gpu_info.kernel_log(host) == ("quiet\n", None)
    assert "--boot=0" in host.calls[-1]
    outcome("error gpu_xid", found[0])


@pytest.mark.parametrize("sizes", [pytest.param([131072] * 7 + [256], id="FAB-15"), pytest.param([32768] * 5 + [8192], id="FAB-15-public")])
def test_one_small_bar1_is_named(sizes, outcome):
    gpus = [gpu(i) for i in range(len(sizes))]
    for row, size in zip(gpus, sizes):
        row["bar1_total_mib"] = size
    found = gpu_info.health(gpus, [])
    assert [item["id"] for item in found] == ["gpu_bar1_small"]
    assert gpus[-1]["bus_id"] in found[0]["what"] and str(sizes[-1]) in found[0]["what"] and "P2P" in found[0]["what"]
    assert found[0]["severity"] == "warning"
    assert [row["bar1_total_mib"] for row in gpus] == sizes
    outcome("warning gpu_bar1_small", found[0])


DMESG_06 = (
    "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:884)\nNVRM: GPU 0000:01:00.0: rm_init_adapter failed, device minor number 0\n"
)


@pytest.mark.parametrize("smi", [pytest.param("No devices were found\n", id="DRV-06")])
def test_no_devices_with_a_loaded_module_is_a_failed_start(smi, host, outcome):
    host.eight_gpus().loaded().modinfo().answer("nvidia-smi", smi, code=6).answer("dmesg", DMESG_06)
    facts = gpu_info.gather(host, None, plan={"gpu_count": 8})
    assert facts["counts"]["driver"] == 0 and facts["counts"]["pci"] == 8
    assert facts["source"] == "nvidia-smi"
    assert facts["driver"]["state"] == "adapter_init_failed"
    assert "0000:01:00.0" in facts["driver"]["reason"]
    assert "licence" in facts["driver"]["hint"] and "Above 4G" in facts["driver"]["hint"] and "install" not in facts["driver"]["hint"]
    outcome("adapter_init_failed", facts["driver"]["state"], facts["driver"]["reason"])


@pytest.mark.parametrize("smi", [pytest.param("Failed to initialize NVML: Driver/library version mismatch\n", id="DRV-04-facts")])
@pytest.mark.parametrize("flavour", ["open", "proprietary"])
def test_a_version_mismatch_asks_for_a_reboot(smi, flavour, host, outcome):
    host.eight_gpus().loaded("580.95.05", flavour).modinfo("580.126.09").answer("nvidia-smi", smi, code=18)
    facts = gpu_info.gather(host, None)
    assert facts["driver"]["state"] == "reboot_required"
    assert facts["driver"]["loaded_version"] == "580.95.05" and facts["driver"]["installed_version"] == "580.126.09"
    assert facts["driver"]["loaded_flavour"] == flavour
    assert "nothing has to be installed" in facts["driver"]["hint"]
    assert facts["source"] == "lspci" and len(facts["gpus"]) == 8
    assert facts["gpus"][0]["unknown"]["memory_total_mib"] == "only the PCI bus answered"
    outcome("reboot_required", facts["driver"]["state"], facts["driver"]["reason"])


@pytest.mark.parametrize("bound", [pytest.param(["nvidia"] * 7 + ["nouveau"], id="DRV-08-facts"), pytest.param(["nouveau"] * 8, id="DRV-08-all")])
def test_nouveau_is_named_per_device(bound, host, outcome):
    for index, driver in enumerate(bound):
        host.gpu(f"0000:{index + 3:02x}:00.0", driver=driver)
    host.loaded().modinfo()
    facts = gpu_info.gather(host, None, sources=["lspci"])
    assert [device["driver"] for device in facts["pci"]] == bound
    assert facts["driver"]["state"] == "nouveau" and f"{bound.count('nouveau')} of 8" in facts["driver"]["reason"]
    assert "initramfs" in facts["driver"]["hint"]
    outcome("nouveau", facts["driver"]["state"], facts["driver"]["reason"])


def test_lspci_is_read_by_ids_and_not_by_names():
    rows = gpu_info.parse_lspci(
        "0000:03:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev a1)\n\tKernel driver in use: nouveau\n"
        "\tKernel modules: nouveau, nvidia_drm, nvidia\n"
        "0000:03:00.1 Audio device [0403]: NVIDIA Corporation Device [10de:22e8] (rev a1)\n\tKernel driver in use: snd_hda_intel\n"
        "04:00.0 VGA compatible controller [0300]: Some Vendor NVIDIA-like [1234:1111]\n"
        "00000000:54:00.0 VGA compatible controller [0300]: NVIDIA Corporation GB202GL [10de:2bb1] (rev a1)\n"
    )
    assert [(row["bus_id"], row["device_id"], row["driver"]) for row in rows] == [
        ("0000:03:00.0", "10de:2bb5", "nouveau"),
        ("0000:54:00.0", "10de:2bb1", None),
    ]


# -- what is missing is named by slot -----------------------------------------------------------------------------


def test_a_gpu_on_the_bus_that_the_driver_lost_is_named_by_slot(host):
    host.eight_gpus()
    host.write("sys/bus/pci/slots/7/address", "0000:53:00\n")
    pci, reason = gpu_info.pci_gpus(host)
    assert reason is None and len(pci) == 8
    gpus = [
        gpu(
            i,
        )
        for i in range(7)
    ]
    for row, device in zip(gpus, [d for d in pci if d["bus_id"] != "0000:53:00.0"]):
        row["bus_id"] = device["bus_id"]
    found = gpu_info.compare(gpus, pci, {"gpu_count": 8, "groups": {"prefill": [0, 1, 2, 3], "decode": [4, 5, 6, 7]}}, "nvml")
    assert {item["id"] for item in found} == {"gpu_missing_in_driver", "gpu_plan_index"}
    assert "0000:53:00.0 (slot 7)" in found[0]["what"]
    assert "decode wants GPUs [7]" in found[1]["what"]


def test_a_gpu_that_left_the_bus_is_named_by_the_plans_address(host):
    for bus in ("03", "04", "54"):
        host.gpu(f"0000:{bus}:00.0")
    pci, _reason = gpu_info.pci_gpus(host)
    found = gpu_info.compare(
        gpu_info.from_pci(pci), pci, {"gpu_count": 4, "bus_ids": ["00000000:53:00.0", "0000:54:00.0"], "groups": {}}, "lspci"
    )
    assert [item["id"] for item in found] == ["gpu_missing_on_bus", "gpu_count"]
    assert "53:00.0" in found[0]["what"] and "needs 4 GPUs, the PCI bus has 3" in found[1]["what"]


def test_the_bridges_above_a_gpu_come_from_sysfs(host):
    host.gpu("0000:03:00.0", bridges=("0000:00:03.1", "0000:01:00.0", "0000:02:01.0"))
    pci, _reason = gpu_info.pci_gpus(host)
    assert pci[0]["bridges"] == ["0000:00:03.1", "0000:01:00.0", "0000:02:01.0"]
    assert pci[0]["bar1_total_mib"] == 131072 and pci[0]["pcie_generation"] == 5 and pci[0]["numa_node"] == 0


@pytest.mark.parametrize(
    "written, one",
    [
        ("00000000:03:00.0", "0000:03:00.0"),
        ("0000:D3:00.0", "0000:d3:00.0"),
        ("03:00.0", "0000:03:00.0"),
        ("PCI:0000:53:00", "0000:53:00.0"),
        ("00010000:03:00.0", "10000:03:00.0"),
        ("nonsense", None),
        (None, None),
    ],
)
def test_one_spelling_of_a_pci_address(written, one):
    assert gpu_info.bus_id(written) == one


def test_smi_processes_and_topology():
    apps = gpu_info.parse_smi_apps(f"{uuid(4)}, 2505781, sglang::scheduler_TP0, 100998 MiB\n{uuid(5)}, 7, a, b, [N/A]\n[Not Supported]\n")
    assert apps[uuid(4)] == [{"pid": 2505781, "name": "sglang::scheduler_TP0", "used_mib": 100998}]
    assert apps[uuid(5)] == [{"pid": 7, "name": "a, b", "used_mib": None}]
    assert gpu_info.parse_smi_topology("\tGPU0\tGPU1\nGPU0\tX\tCNS\nGPU1\tOK\tX\n\nLegend:\n  X    = Self\n") == [
        ["self", "chipset_not_supported"],
        ["ok", "self"],
    ]


def test_the_shapes_of_a_real_nvidia_smi():
    # Headings in a terminal's colours, a blank before each name, other sections with a Total of their own.
    topo = " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
    assert gpu_info.parse_smi_topology(topo) == [["self", "ok"], ["ok", "self"]]
    usage = (
        "GPU 00000000:00:06.0\n    FB Memory Usage\n        Total                 : 143771 MiB\n        Used                  : 0 MiB\n"
        "    BAR1 Memory Usage\n        Total                 : 262144 MiB\n    Conf Compute Protected Memory Usage\n        Total                 : 0 MiB\n\n"
    )
    assert gpu_info.parse_smi_bar1(usage + usage.replace("06.0", "07.0").replace("262144 MiB", "[N/A]")) == {
        "0000:00:06.0": 262144,
        "0000:00:07.0": None,
    }


def test_the_unit_of_a_process_is_told_from_its_cgroup():
    assert gpu_info.unit_of("0::/system.slice/sglang-dsv4-decode.service\n") == "sglang-dsv4-decode.service"
    assert gpu_info.unit_of("0::/user.slice/user-0.slice/session-3.scope/x\n") == "session-3.scope"
    assert gpu_info.unit_of("0::/\n") is None and gpu_info.unit_of(None) is None


def test_a_library_that_never_answers_costs_the_limit_only():
    began = time.monotonic()
    answer = gpu_info.in_child(lambda: time.sleep(60), 0.3)
    assert not answer["ok"] and "0.3 s" in answer["reason"] and time.monotonic() - began < 5
    answer = gpu_info.in_child(lambda: os._exit(3), 5)
    assert not answer["ok"] and "ended the process" in answer["reason"]
    assert "ValueError: invalid literal" in gpu_info.in_child(lambda: int("bad"), 5)["reason"]


# -- the stand-in library under the real nvidia-ml-py ---------------------------------------------------------------

ASK = """
import json, sys
import pynvml
from ansible_collections.blackwell.dsv4.plugins.module_utils import gpu_info
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import System
system = System(sys.argv[1] + "/proc", sys.argv[1] + "/sys", search_path=sys.argv[1] + "/bin")
print(json.dumps(gpu_info.gather(system, pynvml, sources=json.loads(sys.argv[2]))))
"""

COPY = """
import json, sys
from ansible_collections.blackwell.dsv4.plugins.module_utils import p2p_probe
print(json.dumps(p2p_probe.probe(json.loads(sys.argv[2]), 3)))
"""


class StandIn:
    def __init__(self, folder, library):
        self.folder, self.library = folder, library
        self.description = json.loads((NVML / "gpus.json").read_text(encoding="utf-8"))
        self.description["driver"]["loaded_version_file"] = str(folder / "proc/driver/nvidia/version")
        for name in ("proc/driver/nvidia", "sys", "bin", "processes"):
            (folder / name).mkdir(parents=True)
        (folder / "bin/nvidia-smi").symlink_to(library / "nvidia-smi")
        self.load("580.95.05")

    def load(self, version):
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
        (self.folder / "proc/driver/nvidia/version").write_text(text, encoding="utf-8")

    def ask(self, *sources):
        return self.run(ASK, sources or ["nvml", "nvidia-smi", "lspci"])

    def copy(self, *pairs):
        return self.run(COPY, pairs)

    def run(self, program, argument):
        (self.folder / "gpus.json").write_text(json.dumps(self.description), encoding="utf-8")
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library),
            "REHEARSAL_GPUS": str(self.folder / "gpus.json"),
            "REHEARSAL_GPU_PROCESSES": str(self.folder / "processes"),
            "PYTHONPATH": str(ROOT / ".collections"),
        }
        done = subprocess.run(
            [sys.executable, "-c", program, str(self.folder), json.dumps(argument)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    pytest.importorskip("pynvml")
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([str(NVML / "build.sh"), str(folder)], check=True)
    return folder


@pytest.fixture
def stand_in(tmp_path, library):
    return StandIn(tmp_path, library)


def test_eight_gpus_are_read_in_under_a_second(stand_in):
    facts = stand_in.ask()
    assert facts["source"] == "nvml" and facts["counts"]["driver"] == 8 and facts["counts"]["usable"] == 8
    assert facts["seconds"] < 1.0
    first = facts["gpus"][0]
    assert first["uuid"] == uuid(0) and first["bus_id"] == "0000:03:00.0" and first["compute_capability"] == "12.0"
    assert first["memory_total_mib"] == 97887 and first["ecc"] is True and first["power_limit_w"] == 600.0
    assert first["serial"] is None and first["unknown"]["serial"] == "Not Supported"
    assert facts["p2p"]["read"][0] == ["self"] + ["ok"] * 7 and len(facts["p2p"]["write"]) == 8
    assert facts["driver"]["cuda_version"] == "13.0" and facts["driver"]["library_version"] == "580.95.05"


def test_nvidia_smi_tells_the_same_as_the_library(stand_in):
    by_library, by_smi = stand_in.ask("nvml"), stand_in.ask("nvidia-smi")
    assert by_smi["source"] == "nvidia-smi"
    for one, other in zip(by_library["gpus"], by_smi["gpus"]):
        for name in gpu_info.FIELDS:
            if name not in ("bar1_total_mib", "numa_node"):  # nvidia-smi's table does not have them
                assert one[name] == other[name], name
    assert by_smi["p2p"]["read"] == by_library["p2p"]["read"]
    assert by_smi["driver"]["cuda_version"] == "13.0"


def test_live_processes_count_and_dead_ones_do_not(stand_in):
    child = subprocess.Popen(["true"])
    child.wait()
    for name, pid in (("live", os.getpid()), ("dead", child.pid)):
        (stand_in.folder / f"processes/{name}.json").write_text(
            json.dumps({"pid": pid, "gpus": [uuid(2)], "used_mib_per_gpu": 78000, "name": "sglang::scheduler_TP0"}), encoding="utf-8"
        )
    (stand_in.folder / "processes/torn.json").write_text('{"pid": ', encoding="utf-8")
    gpus = stand_in.ask()["gpus"]
    assert [process["pid"] for process in gpus[2]["processes"]] == [os.getpid()]
    assert gpus[2]["memory_used_mib"] == 78004 and gpus[2]["processes"][0]["name"] == "sglang::scheduler_TP0"
    assert gpus[2]["processes"][0]["parent"] == os.getppid()
    assert not gpus[3]["processes"] and gpus[3]["memory_used_mib"] == 4


def test_faults_keep_their_rows(stand_in):
    rows = stand_in.description["gpus"]
    rows[0]["fault"], rows[1]["fault"], rows[2]["fault"] = "missing", "lost", "reset_required"
    rows[3]["errors"] = {"memory": "unknown", "ecc": "not_supported"}
    rows[4]["numa_node"] = -1
    for sources in (("nvml",), ("nvidia-smi",)):
        facts = stand_in.ask(*sources)
        if sources == ("nvidia-smi",):
            # The real program gives up at the first GPU without a handle; the answer says so and nothing is made up.
            assert facts["source"] == "none" and "GPU is lost" in facts["sources"][0]["reason"]
            continue
        gpus = facts["gpus"]
        assert facts["counts"]["driver"] == 7 and len(gpus) == 7
        assert [row["usable"] for row in gpus] == [False, False, False, True, True, True, True]
        assert "lost" in gpus[0]["unusable_reason"].lower()
        assert gpus[1]["unusable_reason"] == "GPU requires restart" and gpus[1]["bus_id"] == "0000:53:00.0"
        assert gpus[2]["memory_total_mib"] is None and gpus[2]["unknown"]["ecc"] == "Not Supported" and gpus[2]["uuid"] == uuid(3)
        assert gpus[3]["numa_node"] is None and "numa_node" in gpus[3]["unknown"]
        assert facts["p2p"]["read"][0][1] == "unknown"


def test_a_mismatch_falls_through_to_the_bus_and_is_called_by_its_name(stand_in):
    stand_in.load("580.126.09")
    facts = stand_in.ask()
    assert [entry["ok"] for entry in facts["sources"]][:2] == [False, False]
    assert facts["driver"]["state"] == "reboot_required"
    (stand_in.folder / "proc/driver/nvidia/version").unlink()
    facts = stand_in.ask()
    assert facts["driver"]["state"] == "not_installed" and facts["driver"]["loaded_version"] is None


def test_p2p_that_is_refused_is_shown(stand_in):
    stand_in.description["p2p"] = [{"gpus": [0, 5], "read": "chipset_not_supported"}]
    read = stand_in.ask()["p2p"]["read"]
    assert read[0][5] == read[5][0] == "chipset_not_supported" and read[0][4] == "ok"


def test_copies_between_gpus_go_through_the_cuda_library(stand_in):
    a, b, c = (gpu["bus_id"] for gpu in stand_in.description["gpus"][:3])
    assert [row["status"] for row in stand_in.copy((a, b), (b, a))["pairs"]] == ["ok", "ok"]
    stand_in.description["p2p"] = [
        {"gpus": [0, 1], "copy": "wrong_data"},
        {"gpus": [1, 2], "read": "chipset_not_supported"},
        {"gpus": [0, 2], "copy": "hang"},
    ]
    rows = stand_in.copy((a, b), (b, c), (c, a), (a, c))["pairs"]
    assert [row["status"] for row in rows] == ["wrong_data", "no_peer_access", "timeout", "not_tried"]
    assert "of 4096 bytes differ although the copy reported success" in rows[0]["reason"]
    stand_in.load("580.126.09")
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in stand_in.copy((a, b))["reason"]


GROUPS = {"prefill": [0, 1, 2, 3], "decode": [4, 5, 6, 7]}


def only(findings, ident):
    found = [item for item in findings if item["id"] == ident]
    assert len(found) == 1, [item["id"] for item in findings]
    return found[0]


def test_numa_nodes_of_the_plan_are_compared_with_the_gpus():
    gpus = [{"index": index, "numa_node": 0 if index < 4 else 1} for index in range(8)]
    assert gpu_info.numa_findings(gpus, GROUPS, {"prefill": 0, "decode": 1}, [0, 1]) == []
    item = only(gpu_info.numa_findings(gpus, GROUPS, {"prefill": 0, "decode": 0}, [0, 1]), "numa_mismatch")
    assert (
        "decode" in item["what"]
        and "[4, 5, 6, 7]" in item["what"]
        and "node 1" in item["what"]
        and "instances.decode.numa_node to 1" in item["hint"]
    )
    assert only(gpu_info.numa_findings(gpus, GROUPS, {"decode": 1}, [0]), "numa_node_absent")
    assert gpu_info.numa_findings(gpus, GROUPS, {"decode": -1}, [0]) == []
    for gpu in gpus:
        gpu["numa_node"] = -1
    assert only(gpu_info.numa_findings(gpus, GROUPS, {"decode": 1}, [0, 1]), "numa_unknown")["severity"] == "warning"


def test_the_nodes_of_a_plan_are_among_the_findings(host):
    host.eight_gpus(numa=0).write("sys/devices/system/node/node0/cpulist", "0-63").write("sys/devices/system/node/node1/cpulist", "64-127")
    facts = gpu_info.gather(host, None, sources=["lspci"], plan={"groups": GROUPS, "numa": {"prefill": 0, "decode": 1}})
    assert only(facts["findings"], "numa_mismatch")["what"].startswith("decode is bound to NUMA node 1")
