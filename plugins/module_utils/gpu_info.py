# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts of the GPUs of a host: from the driver's library, else from nvidia-smi, else from the PCI bus.

Every value is either known or null with a reason in ``unknown``; a GPU that answers badly keeps its row. The PCI
bus is always read as well, so that a GPU which the driver lost can be named by its slot.
"""

from __future__ import annotations

import glob
import json
import os
import re
import select
import signal
import sys
import time
import typing as t

from . import driver as drv
from .host_system import System

NVIDIA = "10de"
DISPLAY_CLASSES = ("0300", "0302")
MIB = 1024 * 1024

# Option of the modules, documented in doc_fragments/host.py.
PLAN = {
    "plan": {
        "type": "dict",
        "default": {},
        "options": {
            "gpu_count": {"type": "int"},
            "bus_ids": {"type": "list", "elements": "str", "default": []},
            "groups": {"type": "dict", "default": {}},
            "numa": {"type": "dict", "default": {}},
        },
    }
}

# Field of a GPU: name for nvidia-smi's --query-gpu, and how its text becomes a value.
SMI_FIELDS = (
    ("index", "index", "int"),
    ("uuid", "uuid", "text"),
    ("bus_id", "pci.bus_id", "bus"),
    ("name", "name", "text"),
    ("serial", "serial", "text"),
    ("compute_capability", "compute_cap", "text"),
    ("memory_total_mib", "memory.total", "int"),
    ("memory_used_mib", "memory.used", "int"),
    ("pcie_generation", "pcie.link.gen.current", "int"),
    ("pcie_generation_max", "pcie.link.gen.max", "int"),
    ("pcie_width", "pcie.link.width.current", "int"),
    ("pcie_width_max", "pcie.link.width.max", "int"),
    ("ecc", "ecc.mode.current", "switch"),
    ("mig", "mig.mode.current", "switch"),
    ("persistence", "persistence_mode", "switch"),
    ("power_limit_w", "power.limit", "float"),
    ("power_draw_w", "power.draw", "float"),
    ("temperature_c", "temperature.gpu", "int"),
    ("utilization_percent", "utilization.gpu", "int"),
)
FIELDS = tuple(name for name, _query, _kind in SMI_FIELDS) + ("bar1_total_mib", "numa_node")
# A GPU without one of these cannot be used by a plan.
NEEDED = ("uuid", "bus_id", "memory_total_mib")

P2P_WORDS = {
    0: "ok",
    1: "chipset_not_supported",
    2: "gpu_not_supported",
    3: "topology_not_supported",
    4: "disabled_by_regkey",
    5: "not_supported",
    6: "unknown",
}
P2P_MARKS = {
    "OK": "ok",
    "CNS": "chipset_not_supported",
    "GNS": "gpu_not_supported",
    "TNS": "topology_not_supported",
    "DR": "disabled_by_regkey",
    "NS": "not_supported",
    "U": "unknown",
    "X": "self",
}

# Xids after which restarting a service cannot help, and what does.
XID_REMEDY = {
    48: "double-bit ECC error: drain the GPU and reset it or reboot the host",
    62: "reboot the host",
    74: "check the slot and its cabling, then power-cycle the host",
    79: "the GPU fell off the bus: power-cycle the host (not a restart of the service)",
    95: "uncontained ECC error: reboot the host",
    119: "the GPU's firmware stopped answering: power-cycle the host",
    120: "the GPU's firmware failed: power-cycle the host",
    154: "the driver wants the GPU recovered: power-cycle the host (not a restart of the service)",
}

# A GPU is wedged when all three hold and no process is known on it.
WEDGED_UTILIZATION = 90
WEDGED_POWER_W = 60.0
WEDGED_MEMORY_MIB = 128


def bus_id(text: str | None) -> str | None:
    """One spelling of a PCI address: ``0000:03:00.0``. An 8-digit domain of zeros is the 4-digit one."""
    match = re.match(r"^\s*(?:PCI:)?(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?\s*$", text or "")
    if not match:
        return None
    domain, bus, device, function = match.groups()
    number = int(domain or "0", 16)
    return f"{number:04x}:{bus.lower()}:{device.lower()}.{function or '0'}"


def value_of(text: str, kind: str) -> tuple[t.Any, str | None]:
    """A field of nvidia-smi's CSV as ``(value, reason)``; one of the two is None."""
    text = text.strip()
    if text == "" or re.match(r"^\[.*\]$", text) or text in ("N/A", "Not Supported", "Unknown Error", "ERR!"):
        return None, text or "empty"
    if kind == "text":
        return text, None
    if kind == "bus":
        known = bus_id(text)
        return (known, None) if known else (None, text)
    if kind == "switch":
        return {"enabled": True, "disabled": False}.get(text.lower()), None if text.lower() in ("enabled", "disabled") else text
    match = re.match(r"^(-?\d+(?:\.\d+)?)(?:\s*(?:MiB|W|%|C|MHz))?$", text)
    if not match:
        return None, text
    return (float(match.group(1)) if kind == "float" else int(float(match.group(1)))), None


def blank(index: int | None = None) -> dict[str, t.Any]:
    gpu: dict[str, t.Any] = {name: None for name in FIELDS}
    gpu.update(index=index, processes=[], unknown={}, usable=True, unusable_reason=None, wedged=False)
    return gpu


def judge(gpu: dict[str, t.Any]) -> dict[str, t.Any]:
    """Set ``usable`` and ``wedged`` from what is known of a GPU."""
    missing = [name for name in NEEDED if gpu[name] is None]
    if missing:
        gpu["usable"] = False
        gpu["unusable_reason"] = "; ".join(dict.fromkeys(gpu["unknown"].get(name, "not reported") for name in missing))
    gpu["wedged"] = False
    busy, draw, used = gpu["utilization_percent"], gpu["power_draw_w"], gpu["memory_used_mib"]
    if None not in (busy, draw, used) and "processes" not in gpu["unknown"] and not gpu["processes"]:
        gpu["wedged"] = busy >= WEDGED_UTILIZATION and draw >= WEDGED_POWER_W and used >= WEDGED_MEMORY_MIB
    return gpu


# -- nvidia-smi -------------------------------------------------------------------------------------------------


def parse_smi_csv(text: str, fields: t.Sequence[tuple[str, str, str]] = SMI_FIELDS) -> list[dict[str, t.Any]]:
    """Rows of ``nvidia-smi --query-gpu=... --format=csv,noheader[,nounits]``. A bad field costs only itself."""
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) < 2:
            continue
        gpu = blank()
        for (name, _query, kind), part in zip(fields, parts):
            gpu[name], reason = value_of(part, kind)
            if reason is not None:
                gpu["unknown"][name] = reason
        for name, _query, _kind in fields[len(parts) :]:
            gpu["unknown"][name] = "not reported"
        if gpu["index"] is None:
            gpu["index"] = len(gpus)
        gpus.append(gpu)
    return gpus


def parse_smi_apps(text: str) -> dict[str, list[dict[str, t.Any]]]:
    """Processes by GPU UUID, from ``--query-compute-apps=gpu_uuid,pid,process_name,used_memory``."""
    found: dict[str, list[dict[str, t.Any]]] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) < 4 or not parts[1].isdigit():
            continue
        used, _reason = value_of(parts[-1], "int")
        name, _reason = value_of(", ".join(parts[2:-1]), "text")
        found.setdefault(parts[0], []).append({"pid": int(parts[1]), "name": name, "used_mib": used})
    return found


def parse_smi_topology(text: str) -> list[list[str]]:
    """The matrix of ``nvidia-smi topo -p2p r``."""
    rows = []
    for line in text.splitlines():
        match = re.match(r"^\s*GPU\d+((?:\s+(?:X|OK|CNS|GNS|TNS|DR|NS|U))+)\s*$", line)
        if match:
            rows.append([P2P_MARKS[mark] for mark in match.group(1).split()])
    return rows


def parse_smi_bar1(text: str) -> dict[str, int | None]:
    """BAR1 totals by bus id, from ``nvidia-smi -q -d MEMORY``."""
    found: dict[str, int | None] = {}
    current, inside = None, False
    for line in text.splitlines():
        match = re.match(r"^GPU\s+(\S+)", line)
        if match:
            current, inside = bus_id(match.group(1)), False
        elif re.match(r"^\s+BAR1 Memory Usage", line):
            inside = True
        elif re.match(r"^\s+\S.*Usage", line):
            inside = False
        elif inside and current:
            match = re.match(r"^\s+Total\s*:\s*(.+)$", line)
            if match:
                found[current], _reason = value_of(match.group(1), "int")
                inside = False
    return found


def from_smi(system: System, smi: str = "nvidia-smi", peers: bool = True) -> dict[str, t.Any]:
    """What nvidia-smi knows. ``ok`` says whether it answered at all; ``reason`` is its own text when not."""
    path = smi if "/" in smi else system.which(smi)
    if not path:
        return {"ok": False, "reason": "nvidia-smi is not installed", "gpus": []}
    answer = system.run([path, "--query-gpu=" + ",".join(query for _name, query, _kind in SMI_FIELDS), "--format=csv,noheader,nounits"])
    text = (answer.out + answer.err).strip()
    if answer.code or "No devices were found" in answer.out:
        return {"ok": "No devices were found" in text, "reason": text.splitlines()[0] if text else f"exit code {answer.code}", "gpus": []}
    gpus = parse_smi_csv(answer.out)
    apps = system.run([path, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"])
    by_uuid = parse_smi_apps(apps.out) if apps.code == 0 else {}
    bars = system.run([path, "-q", "-d", "MEMORY"])
    bar1 = parse_smi_bar1(bars.out) if bars.code == 0 else {}
    for gpu in gpus:
        gpu["processes"] = by_uuid.get(gpu["uuid"], [])
        if apps.code:
            gpu["unknown"]["processes"] = apps.err.strip() or f"exit code {apps.code}"
        gpu["bar1_total_mib"] = bar1.get(gpu["bus_id"])
        if gpu["bar1_total_mib"] is None:
            gpu["unknown"]["bar1_total_mib"] = "not reported by nvidia-smi"
    result: dict[str, t.Any] = {"ok": True, "reason": None, "gpus": gpus, "p2p": None}
    if peers and len(gpus) > 1:
        matrix = parse_smi_topology(system.run([path, "topo", "-p2p", "r"]).out)
        result["p2p"] = {"read": matrix} if len(matrix) == len(gpus) else None
    head = system.run([path])
    match = re.search(r"CUDA Version:\s*(\d+\.\d+)", head.out)
    result["cuda_version"] = match.group(1) if match else None
    match = re.search(r"Driver Version:\s*(\d[\d.]*)", head.out)
    result["library_version"] = match.group(1) if match else None
    return result


# -- NVML -------------------------------------------------------------------------------------------------------


def text(value: t.Any) -> t.Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def from_nvml(nvml: t.Any, peers: bool = True) -> dict[str, t.Any]:
    """What the driver's library knows, through ``nvml`` (the module pynvml of nvidia-ml-py)."""
    error = nvml.NVMLError
    try:
        nvml.nvmlInit()
    except error as problem:
        return {"ok": False, "reason": str(problem), "code": getattr(problem, "value", None), "gpus": []}
    try:
        return _ask_nvml(nvml, error, peers)
    finally:
        try:
            nvml.nvmlShutdown()
        except error:
            pass


def _ask_nvml(nvml: t.Any, error: type[Exception], peers: bool) -> dict[str, t.Any]:
    result: dict[str, t.Any] = {"ok": True, "reason": None, "gpus": [], "p2p": None}
    try:
        count = nvml.nvmlDeviceGetCount()
    except error as problem:
        return {"ok": False, "reason": str(problem), "gpus": []}
    try:
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        result["cuda_version"] = f"{version // 1000}.{version % 1000 // 10}"
    except error:
        result["cuda_version"] = None
    try:
        result["library_version"] = text(nvml.nvmlSystemGetDriverVersion())
    except error:
        result["library_version"] = None
    handles = []
    for index in range(count):
        gpu = blank(index)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except error as problem:
            handles.append(None)
            gpu["unknown"] = {name: str(problem) for name in (*FIELDS, "processes") if name != "index"}
            result["gpus"].append(gpu)
            continue
        handles.append(handle)
        _ask_gpu(nvml, error, handle, gpu)
        result["gpus"].append(gpu)
    if peers and count > 1:
        result["p2p"] = {
            "read": _peer_matrix(nvml, error, handles, 0),
            "write": _peer_matrix(nvml, error, handles, 1),
        }
    return result


def _ask_gpu(nvml: t.Any, error: type[Exception], handle: t.Any, gpu: dict[str, t.Any]) -> None:
    def ask(names: str, question: t.Callable[[], t.Any]) -> None:
        fields = names.split()
        try:
            answer = question()
        except error as problem:
            for name in fields:
                gpu["unknown"][name] = str(problem)
            return
        for name, value in zip(fields, answer if isinstance(answer, tuple) else (answer,)):
            if name == "processes":
                gpu[name] = value
            else:
                gpu[name] = text(value)

    def memory() -> tuple[int, int]:
        # The first version of this call counts what the driver reserves for itself as used, nvidia-smi does not.
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        except (AttributeError, error):
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return info.total // MIB, info.used // MIB

    def process(entry: t.Any) -> dict[str, t.Any]:
        try:
            name = text(nvml.nvmlSystemGetProcessName(entry.pid))
        except error:
            name = None
        return {"pid": entry.pid, "name": name, "used_mib": None if entry.usedGpuMemory is None else entry.usedGpuMemory // MIB}

    def version(pair: t.Any) -> str:
        return f"{pair[0]}.{pair[1]}"

    ask("bus_id", lambda: bus_id(text(nvml.nvmlDeviceGetPciInfo(handle).busId)))
    ask("uuid", lambda: nvml.nvmlDeviceGetUUID(handle))
    ask("name", lambda: nvml.nvmlDeviceGetName(handle))
    ask("serial", lambda: nvml.nvmlDeviceGetSerial(handle))
    ask("compute_capability", lambda: version(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    ask("memory_total_mib memory_used_mib", memory)
    ask("bar1_total_mib", lambda: nvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total // MIB)
    ask("pcie_generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
    ask("pcie_generation_max", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    ask("pcie_width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    ask("pcie_width_max", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    ask("ecc", lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]))
    ask("mig", lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
    ask("persistence", lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)))
    ask("power_limit_w", lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
    ask("power_draw_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    ask("temperature_c", lambda: nvml.nvmlDeviceGetTemperatureV(handle, 0))
    ask("utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    ask("numa_node", lambda: nvml.nvmlDeviceGetNumaNodeId(handle))
    ask("processes", lambda: [process(entry) for entry in nvml.nvmlDeviceGetComputeRunningProcesses(handle)])


def _peer_matrix(nvml: t.Any, error: type[Exception], handles: list[t.Any], capability: int) -> list[list[str]]:
    def cell(a: int, b: int) -> str:
        if a == b:
            return "self"
        if handles[a] is None or handles[b] is None:
            return "unknown"
        try:
            return P2P_WORDS.get(nvml.nvmlDeviceGetP2PStatus(handles[a], handles[b], capability), "unknown")
        except error:
            return "unknown"

    return [[cell(a, b) for b in range(len(handles))] for a in range(len(handles))]


def load_nvml(path: str | None) -> tuple[t.Any, str | None]:
    """The module pynvml and, when it cannot be loaded, None with the reason."""
    if path:
        found = sorted(glob.glob(os.path.join(path, "lib", "python3*", "site-packages"))) or [path]
        sys.path[:0] = found
    try:
        import pynvml
    except ImportError as error:
        where = f" in {path}" if path else ""
        return None, f"nvidia-ml-py cannot be loaded{where}: {error}"
    return pynvml, None


def in_child(question: t.Callable[[], dict[str, t.Any]], limit: float) -> dict[str, t.Any]:
    """Answer of ``question`` asked in a child process, so that a call which never returns costs only ``limit`` seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # never returns; whatever goes wrong becomes an answer
        code = 0
        try:
            os.close(reading)
            try:
                answer = question()
            except BaseException as problem:  # the parent must hear of it
                answer = {"ok": False, "reason": f"{type(problem).__name__}: {problem}", "gpus": []}
            with os.fdopen(writing, "wb") as out:
                out.write(json.dumps(answer).encode("utf-8"))
        except BaseException:  # the pipe is gone
            code = 1
        os._exit(code)
    os.close(writing)
    parts, end = [], time.monotonic() + limit
    try:
        while True:
            ready, _w, _x = select.select([reading], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                return {"ok": False, "reason": f"the driver's library gave no answer within {limit:g} s", "gpus": []}
            part = os.read(reading, 65536)
            if not part:
                break
            parts.append(part)
    finally:
        os.close(reading)
        try:
            os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            pass
    try:
        return json.loads(b"".join(parts))
    except ValueError:
        return {"ok": False, "reason": "the driver's library ended the process that asked it", "gpus": []}


# -- the PCI bus ------------------------------------------------------------------------------------------------


def speed_generation(speed: str | None) -> int | None:
    """PCIe generation of a link speed such as ``32.0 GT/s PCIe``."""
    match = re.match(r"^\s*(\d+(?:\.\d+)?)", speed or "")
    return {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}.get(float(match.group(1))) if match else None


def whole(value: str | None) -> int | None:
    match = re.match(r"^\s*(-?\d+)\s*$", value or "")
    return int(match.group(1)) if match else None


def bar_size_mib(resource: str | None) -> int | None:
    """Largest memory window of a device, from sysfs ``resource``; for a GPU this is BAR1."""
    sizes = []
    for line in (resource or "").splitlines()[:6]:
        words = line.split()
        if len(words) == 3:
            first, last = int(words[0], 16), int(words[1], 16)
            if last > first:
                sizes.append(last - first + 1)
    return max(sizes) // MIB if sizes else None


def pci_slots(system: System) -> dict[str, str]:
    """Names of the physical slots by bus and device (``0000:03:00``), where the firmware tells them."""
    slots = {}
    for name in system.listed(system.sys("bus/pci/slots")):
        address = (system.read(system.sys(f"bus/pci/slots/{name}/address")) or "").strip().lower()
        if address:
            slots[address] = name
    return slots


def pci_from_sysfs(system: System) -> list[dict[str, t.Any]]:
    """NVIDIA GPUs on the bus, with the bridges above each, from sysfs."""
    folder = system.sys("bus/pci/devices")
    slots = pci_slots(system)
    found = []
    for name in system.listed(folder):
        path = os.path.join(folder, name)

        def read(field: str, path: str = path) -> str | None:
            value = system.read(os.path.join(path, field))
            return value.strip() if value is not None else None

        if (read("vendor") or "").lower() != f"0x{NVIDIA}" or (read("class") or "")[2:6] not in DISPLAY_CLASSES:
            continue
        link = os.path.join(path, "driver")
        group = os.path.join(path, "iommu_group")
        above = [part for part in system.real(path).split("/")[:-1] if re.match(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$", part)]
        found.append(
            {
                "bus_id": bus_id(name),
                "device_id": f"{NVIDIA}:{(read('device') or '0x?')[2:].lower()}",
                "driver": os.path.basename(system.real(link)) if system.exists(link) else None,
                "slot": next(
                    (slots[key] for key in (name.rsplit(".", 1)[0], *(b.rsplit(".", 1)[0] for b in reversed(above))) if key in slots), None
                ),
                "numa_node": whole(read("numa_node")),
                "pcie_generation": speed_generation(read("current_link_speed")),
                "pcie_generation_max": speed_generation(read("max_link_speed")),
                "pcie_width": whole(read("current_link_width")),
                "pcie_width_max": whole(read("max_link_width")),
                "bar1_total_mib": bar_size_mib(read("resource")),
                "iommu_group_type": (system.read(os.path.join(group, "type")) or "unknown").strip() if system.exists(group) else None,
                "bridges": above,
            }
        )
    return found


def parse_lspci(output: str) -> list[dict[str, t.Any]]:
    """NVIDIA display devices of ``lspci -Dnnk`` (any of -nn, -k, -v), matched on ids, never on names."""
    found: list[dict[str, t.Any]] = []
    current = None
    for line in output.splitlines():
        match = re.match(r"^((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\s+(.*)$", line)
        if match:
            ids = re.search(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]", match.group(2))
            kind = re.search(r"\[(03[0-9a-f]{2})\]", match.group(2))
            current = None
            if ids and ids.group(1) == NVIDIA and kind and kind.group(1) in DISPLAY_CLASSES:
                current = {
                    "bus_id": bus_id(match.group(1)),
                    "device_id": f"{ids.group(1)}:{ids.group(2)}",
                    "driver": None,
                    "slot": None,
                    "numa_node": None,
                    "pcie_generation": None,
                    "pcie_generation_max": None,
                    "pcie_width": None,
                    "pcie_width_max": None,
                    "bar1_total_mib": None,
                    "iommu_group_type": None,
                    "bridges": [],
                }
                found.append(current)
        elif current is not None:
            match = re.match(r"^\s+Kernel driver in use:\s*(\S+)", line)
            if match:
                current["driver"] = match.group(1)
    return found


def pci_gpus(system: System) -> tuple[list[dict[str, t.Any]], str | None]:
    """GPUs on the bus and, when they could not be read, why."""
    found = pci_from_sysfs(system)
    if found or system.listed(system.sys("bus/pci/devices")):
        return found, None
    path = system.which("lspci")
    if not path:
        return [], "no PCI bus in sysfs, and lspci is not installed"
    answer = system.run([path, "-Dnnk"])
    return parse_lspci(answer.out), None if answer.code == 0 else (answer.err.strip() or f"lspci: exit code {answer.code}")


def from_pci(pci: list[dict[str, t.Any]]) -> list[dict[str, t.Any]]:
    """GPUs as far as the bus knows them; nothing on it says memory or UUID."""
    gpus = []
    for index, device in enumerate(pci):
        gpu = blank(index)
        for name in FIELDS:
            if name != "index":
                gpu[name] = device.get(name)
                if gpu[name] is None:
                    gpu["unknown"][name] = "only the PCI bus answered"
        gpu["unknown"]["processes"] = "only the PCI bus answered"
        gpus.append(gpu)
    return gpus


# -- putting it together ----------------------------------------------------------------------------------------


def parse_xids(output: str) -> list[dict[str, t.Any]]:
    """Xids of a kernel log, one entry per GPU and number. The log has the bus id without its function."""
    found: dict[tuple[str | None, int], dict[str, t.Any]] = {}
    for line in output.splitlines():
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)$", line)
        if match:
            key = (bus_id(match.group(1)), int(match.group(2)))
            entry = found.setdefault(key, {"bus_id": key[0], "xid": key[1], "count": 0, "text": "", "remedy": XID_REMEDY.get(key[1])})
            entry["count"] += 1
            entry["text"] = match.group(3).strip()
    return list(found.values())


def parse_init_failures(output: str) -> list[str]:
    """Bus ids of GPUs that the module could not start, from a kernel log."""
    return list(
        dict.fromkeys(filter(None, (bus_id(found) for found in re.findall(r"NVRM: GPU ([0-9a-fA-F:.]+): RmInitAdapter failed", output))))
    )


def kernel_log(system: System) -> tuple[str, str | None]:
    """Kernel messages since this boot, and why there are none. The journal is cut at this boot as well."""
    reason = "neither dmesg nor journalctl answered"
    for name, argv in (("dmesg", []), ("journalctl", ["--dmesg", "--boot=0", "--no-pager", "--output=cat"])):
        path = system.which(name)
        if path:
            answer = system.run([path, *argv])
            if answer.code == 0:
                return answer.out, None
            reason = answer.err.strip() or f"{name}: exit code {answer.code}"
    return "", reason


def unit_of(cgroup: str | None) -> str | None:
    """systemd unit of ``/proc/<pid>/cgroup``."""
    for line in (cgroup or "").splitlines():
        match = re.search(r"/([^/]+\.(?:service|scope))(?:/|$)", line)
        if match:
            return match.group(1)
    return None


def describe_processes(gpus: list[dict[str, t.Any]], system: System, real_proc: str = "/proc") -> None:
    """Add name, unit and parent of each GPU process, as the host's own /proc tells them."""
    for gpu in gpus:
        for process in gpu["processes"]:
            folder = os.path.join(real_proc, str(process["pid"]))
            if not process.get("name"):
                process["name"] = (system.read(os.path.join(folder, "comm")) or "").strip() or None
            process["unit"] = unit_of(system.read(os.path.join(folder, "cgroup")))
            status = system.read(os.path.join(folder, "status")) or ""
            match = re.search(r"(?m)^PPid:\s*(\d+)", status)
            process["parent"] = int(match.group(1)) if match else None
            match = re.search(r"(?m)^Uid:\s*(\d+)", status)
            process["uid"] = int(match.group(1)) if match else None


def complete(gpus: list[dict[str, t.Any]], pci: list[dict[str, t.Any]]) -> None:
    """Fill what the driver does not tell from the bus, by bus id. The bus wins for the NUMA node: the kernel acts on it."""
    by_bus = {device["bus_id"]: device for device in pci}
    for gpu in gpus:
        device = by_bus.get(gpu["bus_id"])
        if not device:
            continue
        if device["numa_node"] is not None:
            gpu["numa_node"] = device["numa_node"]
            gpu["unknown"].pop("numa_node", None)
        for name in ("pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max", "bar1_total_mib"):
            if gpu[name] is None and device[name] is not None:
                gpu[name] = device[name]
                gpu["unknown"].pop(name, None)
        gpu["slot"] = device["slot"]
    for gpu in gpus:
        gpu.setdefault("slot", None)


def finding(ident: str, severity: str, what: str, hint: str) -> dict[str, str]:
    return {"id": ident, "severity": severity, "what": what, "hint": hint}


def place(device: dict[str, t.Any] | str) -> str:
    """How a GPU is named to somebody who has to walk to the machine."""
    if isinstance(device, str):
        return device
    return f"{device['bus_id']} (slot {device['slot']})" if device.get("slot") else str(device["bus_id"])


def compare(gpus: list[dict[str, t.Any]], pci: list[dict[str, t.Any]], plan: dict[str, t.Any], source: str) -> list[dict[str, str]]:
    """The bus, the driver and the plan against each other. ``plan``: gpu_count, bus_ids, groups {name: [index]}."""
    findings = []
    on_bus = {device["bus_id"]: device for device in pci}
    driven = {gpu["bus_id"] for gpu in gpus if gpu["bus_id"]}
    if source != "lspci":
        for address, device in on_bus.items():
            if address not in driven:
                findings.append(
                    finding(
                        "gpu_missing_in_driver",
                        "error",
                        f"the GPU at {place(device)} is on the PCI bus, but the driver does not show it (bound to {device['driver'] or 'no driver'})",
                        "read the kernel log for that address (NVRM, Xid, AER); a GPU that fell off the bus needs a power cycle of the host",
                    )
                )
    for wanted in plan.get("bus_ids") or []:
        address = bus_id(wanted)
        if address not in on_bus and address not in driven:
            findings.append(
                finding(
                    "gpu_missing_on_bus",
                    "error",
                    f"the plan has a GPU at {wanted}, the PCI bus has none there",
                    "reseat the card, check its power cable and the slot's setting in the BIOS",
                )
            )
    count = plan.get("gpu_count")
    have = len(on_bus) or len(gpus)
    if count and have < count:
        known = ", ".join(place(device) for device in pci) or "none"
        findings.append(
            finding(
                "gpu_count",
                "error",
                f"the plan needs {count} GPUs, the PCI bus has {have}: {known}",
                "a slot that is not in this list has lost its card; set preflight_gpu_bus_ids to have it named",
            )
        )
    by_index = {gpu["index"]: gpu for gpu in gpus}
    for name, indexes in (plan.get("groups") or {}).items():
        absent = [index for index in indexes if index not in by_index]
        if absent and source != "lspci":
            findings.append(
                finding(
                    "gpu_plan_index",
                    "error",
                    f"{name} wants GPUs {absent}, the driver has {sorted(by_index)}",
                    f"mend dsv4_topology.instances.{name}.gpus or bring the missing GPU back",
                )
            )
        for index in indexes:
            gpu = by_index.get(index)
            if gpu is not None and not gpu["usable"] and source != "lspci":
                findings.append(
                    finding(
                        "gpu_unusable",
                        "error",
                        f"GPU {index} at {place(gpu)}, planned for {name}, cannot be used: {gpu['unusable_reason']}",
                        "reset the GPU (nvidia-smi --gpu-reset) while nothing uses it, or reboot the host",
                    )
                )
    return findings


def health(gpus: list[dict[str, t.Any]], xids: list[dict[str, t.Any]], groups: dict[str, list[int]] | None = None) -> list[dict[str, str]]:
    """Findings about the state of the GPUs: wedged, Xid since boot, odd BAR1, narrow link, MIG."""
    findings = []
    wedged = [gpu["index"] for gpu in gpus if gpu["wedged"]]
    if wedged:
        findings.append(
            finding(
                "gpu_wedged",
                "error",
                f"GPUs {wedged} are busy and hold memory with no process on them",
                "nothing that is restarted can run on them: reboot the host, or let the operator reset these GPUs",
            )
        )
    by_bus = {gpu["bus_id"]: gpu for gpu in gpus}
    for xid in xids:
        if not xid["remedy"]:
            continue
        gpu = by_bus.get(xid["bus_id"])
        owners = [name for name, indexes in (groups or {}).items() if gpu is not None and gpu["index"] in indexes]
        owner = f", GPU of {' and '.join(owners)}" if owners else ""
        findings.append(finding("gpu_xid", "error", f"Xid {xid['xid']} at {xid['bus_id']}{owner}: {xid['text']}", xid["remedy"]))
    sizes = [gpu["bar1_total_mib"] for gpu in gpus if gpu["bar1_total_mib"]]
    if sizes:
        usual = max(sizes)
        for gpu in gpus:
            if gpu["bar1_total_mib"] and gpu["bar1_total_mib"] < usual:
                findings.append(
                    finding(
                        "gpu_bar1_small",
                        "warning",
                        f"BAR1 of the GPU at {place(gpu)} is {gpu['bar1_total_mib']} MiB, smaller than its peers' {usual} MiB; P2P to it will fail or crawl",
                        "switch on Above 4G Decoding and Resizable BAR for this slot in the BIOS",
                    )
                )
    for gpu in gpus:
        if gpu["pcie_width"] and gpu["pcie_width_max"] and gpu["pcie_width"] < gpu["pcie_width_max"]:
            findings.append(
                finding(
                    "gpu_pcie_width",
                    "warning",
                    f"the GPU at {place(gpu)} runs at x{gpu['pcie_width']}, it can x{gpu['pcie_width_max']}",
                    "reseat the card and check riser, cable and bifurcation of the slot",
                )
            )
        if gpu["mig"]:
            findings.append(
                finding(
                    "gpu_mig",
                    "error",
                    f"MIG is on for GPU {gpu['index']} at {place(gpu)}; tensor parallelism needs whole GPUs",
                    f"nvidia-smi -i {gpu['index']} -mig 0",
                )
            )
    return findings


def numa_findings(
    gpus: list[dict[str, t.Any]], groups: dict[str, list[int]], nodes: dict[str, int], present: list[int]
) -> list[dict[str, str]]:
    """NUMA nodes of the plan against those of the GPUs. -1 in the plan binds nothing; -1 from the firmware cannot be bound."""
    findings = []
    by_index = {gpu["index"]: gpu for gpu in gpus}
    for name, node in nodes.items():
        if node is None or int(node) < 0:
            continue
        if present and int(node) not in present:
            findings.append(
                finding(
                    "numa_node_absent",
                    "error",
                    f"{name} is planned for NUMA node {node}, the host has {present}",
                    f"mend dsv4_topology.instances.{name}.numa_node",
                )
            )
            continue
        away = [index for index in groups.get(name, []) if index in by_index and by_index[index]["numa_node"] not in (None, -1, int(node))]
        if away:
            real = sorted({by_index[index]["numa_node"] for index in away})
            findings.append(
                finding(
                    "numa_mismatch",
                    "error",
                    f"{name} is bound to NUMA node {node}, but its GPUs {away} are on node {', '.join(map(str, real))}",
                    f"give {name} GPUs of node {node}, or set dsv4_topology.instances.{name}.numa_node to {real[0] if len(real) == 1 else -1}",
                )
            )
        unknown = [index for index in groups.get(name, []) if index in by_index and by_index[index]["numa_node"] in (None, -1)]
        if unknown and len(present) > 1:
            findings.append(
                finding(
                    "numa_unknown",
                    "warning",
                    f"the firmware tells no NUMA node for GPUs {unknown} of {name}",
                    f"look for NPS or NUMA settings in the BIOS, or set dsv4_topology.instances.{name}.numa_node to -1",
                )
            )
    return findings


def numa_nodes(system: System) -> list[int]:
    """NUMA nodes of the host."""
    return sorted(int(name[4:]) for name in system.listed(system.sys("devices/system/node")) if re.match(r"^node\d+$", name))


def gather(
    system: System,
    nvml: t.Any,
    sources: t.Sequence[str] = ("nvml", "nvidia-smi", "lspci"),
    smi: str = "nvidia-smi",
    peers: bool = True,
    plan: dict[str, t.Any] | None = None,
    limit: float = 30.0,
    nvml_missing: str | None = None,
) -> dict[str, t.Any]:
    """All facts of one host. ``nvml`` is pynvml, or None with the reason in ``nvml_missing``."""
    began = time.monotonic()
    plan = plan or {}
    groups = plan.get("groups") or {}
    pci, pci_reason = pci_gpus(system)
    tried, answer, source = [], {"gpus": [], "p2p": None}, "lspci"
    for name in sources:
        if name == "lspci":
            tried.append({"source": name, "ok": pci_reason is None, "reason": pci_reason})
            answer, source = {"gpus": from_pci(pci), "p2p": None}, name
            break
        if name == "nvml":
            reply = (
                in_child(lambda: from_nvml(nvml, peers), limit)
                if nvml is not None
                else {"ok": False, "reason": nvml_missing or "nvidia-ml-py is not installed"}
            )
        else:
            reply = from_smi(system, smi, peers)
        tried.append({"source": name, "ok": reply["ok"], "reason": reply["reason"]})
        if reply["ok"]:
            answer, source = reply, name
            break
    else:
        if not tried or not tried[-1]["ok"]:
            source = "none"
    gpus = answer["gpus"]
    complete(gpus, pci)
    describe_processes(gpus, system)
    for gpu in gpus:
        judge(gpu)
    log, log_reason = kernel_log(system)
    state = drv.module_facts(system)
    state["library_version"] = answer.get("library_version")
    state["cuda_version"] = answer.get("cuda_version")
    state["unknown"] = {}
    if answer.get("cuda_version") is None:
        state["unknown"]["cuda_version"] = (
            "; ".join(f"{entry['source']}: {entry['reason']}" for entry in tried if not entry["ok"]) or "not reported"
        )
    init_failures = parse_init_failures(log)
    failures = [entry["reason"] or "" for entry in tried if not entry["ok"] and entry["source"] != "lspci"]
    state.update(
        drv.verdict(
            state,
            failures,
            [device["driver"] for device in pci],
            len(gpus) if source in ("nvml", "nvidia-smi") else None,
            len(pci),
            init_failures,
        )
    )
    xids = parse_xids(log)
    return {
        "gpus": gpus,
        "pci": pci,
        "source": source,
        "sources": tried,
        "driver": state,
        "p2p": answer.get("p2p"),
        "xids": xids,
        "unknown": {name: reason for name, reason in (("pci", pci_reason), ("xids", log_reason)) if reason},
        "counts": {
            "pci": len(pci),
            "driver": len(gpus) if source in ("nvml", "nvidia-smi") else 0,
            "usable": sum(1 for gpu in gpus if gpu["usable"]) if source in ("nvml", "nvidia-smi") else 0,
            "plan": plan.get("gpu_count"),
        },
        "findings": (
            compare(gpus, pci, plan, source)
            + health(gpus, xids, groups)
            + numa_findings(gpus, groups, plan.get("numa") or {}, numa_nodes(system))
        ),
        "seconds": round(time.monotonic() - began, 3),
    }
