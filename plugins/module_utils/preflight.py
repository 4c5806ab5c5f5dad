# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What of an inventory and of a host would go wrong later, all at once: severity, what, how to mend.

A finding is an error (the deployment cannot work), a warning (it works, but worse than it could, or a later role mends it), or an
info (worth knowing). What could not be read is never reported as being right.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import socket
import struct
import typing as t

from . import driver, gpu_info, p2p_probe
from .driver import finding
from .host_system import System

GIB = 1024**3
SUPPORTED = {"ubuntu": ("24.04",), "debian": ("12", "13")}
# RTX PRO 6000 Blackwell: Workstation, Max-Q Workstation and Server Edition.
KNOWN_DEVICES = {"10de:2bb1": "Workstation", "10de:2bb4": "Max-Q", "10de:2bb5": "Server"}
SEVERITIES = ("error", "warning", "info")
# Kernels that a driver branch is known not to build for: branch, first version that builds again, lowest kernel concerned.
BUILD_LIMITS = ((550, None, (6, 17)), (575, None, (6, 17)), (580, "580.159.04", (7, 1)))
JIT_TOOLKIT = (12, 9)
IOMMU_PROPOSAL = "iommu=pt"

# Options of the modules, documented in doc_fragments/preflight.py.
STRINGS = {"type": "list", "elements": "str", "default": []}
IGNORE = {"ignore": STRINGS}


# -- inventory --------------------------------------------------------------------------------------------------


def compat_elements(value: str) -> list[str]:
    """Elements of a search path that are a cuda-compat folder: one of its parts is named compat."""
    return [
        element for element in value.split(":") if any(part == "compat" or part.startswith("cuda-compat") for part in element.split("/"))
    ]


def environment_findings(environments: dict[str, dict[str, t.Any]], allow_compat: bool = False) -> list[dict[str, str]]:
    """Hand-written environments of units. ``environments``: variable name -> environment."""
    findings = []
    for where, environment in environments.items():
        for name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
            elements = compat_elements(str((environment or {}).get(name, "")))
            if elements and not allow_compat:
                findings.append(
                    finding(
                        "cuda_compat",
                        "error",
                        f"{where}: {name} has {', '.join(elements)}, whose libcuda shadows the driver's (CUDA error 803)",
                        "take it out; preflight_allow_cuda_compat permits it for a data-centre driver that is older than its toolkit",
                    )
                )
    return findings


def boolean_findings(booleans: dict[str, t.Any]) -> list[dict[str, str]]:
    """Values that should be booleans. Strings that say yes or no pass, since every use converts them."""
    findings = []
    for name, value in booleans.items():
        if value is None or isinstance(value, bool) or str(value).lower() in ("true", "false", "yes", "no", "1", "0", "on", "off"):
            continue
        findings.append(finding("not_a_boolean", "error", f"{name} is {value!r}, not a boolean", f"set {name} to true or false"))
    return findings


def variable_findings(given: dict[str, t.Any]) -> list[dict[str, str]]:
    """Variables with a role's prefix: names that no role reads, and words that are not among the ones that the role accepts.

    ``known``: names; ``given``: names that have a value; ``choices``: words by name; ``chosen``: value by name.
    """
    findings = []
    known = set(given.get("known") or [])
    for name in sorted(set(given.get("given") or []) - known):
        near = difflib.get_close_matches(name, known, 1, 0.8)
        hint = f"did you mean {near[0]}?" if near else "the README's tables list every variable"
        findings.append(finding("unknown_variable", "warning", f"{name} is set, and no role reads it", hint))
    for name, value in sorted((given.get("chosen") or {}).items()):
        words = given["choices"][name]
        if value is not None and value not in words:
            findings.append(finding("not_a_choice", "error", f"{name} is {value!r}", f"set {name} to one of {', '.join(map(str, words))}"))
    return findings


def driver_findings(wanted: dict[str, t.Any]) -> list[dict[str, str]]:
    """What the inventory says of the driver: source, branch, version."""
    findings = []
    source = wanted.get("source", "cuda")
    if isinstance(source, (list, tuple)) or str(source) not in ("cuda", "distribution"):
        findings.append(
            finding(
                "driver_source",
                "error",
                f"nvidia_driver_source is {source!r}: the driver must come from one origin",
                "choose cuda or distribution, not both; apt cannot combine packages of two origins",
            )
        )
    number = driver.branch(str(wanted.get("branch", 580)))
    if number is None or number < 580:
        findings.append(
            finding("driver_branch", "error", f"nvidia_driver_branch is {wanted.get('branch')!r}", "Blackwell needs branch 580 or newer")
        )
    version = str(wanted.get("version") or "")
    if version and not re.match(r"^\d+(\.\d+)+$", version):
        findings.append(
            finding(
                "driver_version",
                "error",
                f"nvidia_driver_version is {version!r}",
                "give a version such as 580.95.05, without the package revision",
            )
        )
    elif version and number is not None and driver.branch(version) != number:
        findings.append(
            finding("driver_version", "error", f"nvidia_driver_version {version} is not of branch {number}", "let branch and version agree")
        )
    return findings


def core_findings(version: str, low: tuple[int, int] = (2, 18), high: tuple[int, int] = (2, 22)) -> list[dict[str, str]]:
    match = re.match(r"^(\d+)\.(\d+)", version or "")
    if match and not low <= (int(match.group(1)), int(match.group(2))) < high:
        return [
            finding(
                "ansible_version",
                "warning",
                f"ansible-core {version} was not tried with this collection",
                f"use {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}",
            )
        ]
    return []


PLACES = ("dsv4_prefill", "dsv4_decode", "dsv4_router")


def placement_findings(groups: dict[str, list[str]]) -> list[dict[str, str]]:
    """A host serves a whole pair: it is in all three groups. Several hosts serve a pair each."""
    findings = [
        finding("no_host", "error", f"group {name} has no host", f"put a host into {name}") for name in PLACES if name in groups and not groups[name]
    ]
    hosts = sorted({host for name in ("dsv4", *PLACES) for host in groups.get(name) or []})
    for host in hosts:
        missing = [name for name in PLACES if groups.get(name) and host not in groups[name]]
        if missing:
            findings.append(
                finding(
                    "split_pair",
                    "error",
                    f"{host} is not in {' and '.join(missing)}: a pair whose parts run on several hosts is not supported",
                    "put it into all three groups, or take it out of dsv4: halves and router reach each other through the loopback interface",
                )
            )
    if len(hosts) > 1 and not findings:
        findings.append(
            finding(
                "several_hosts",
                "info",
                f"{len(hosts)} hosts: each serves a pair of its own, one host after the other",
                "the first that fails ends the run, the rest are left as they are",
            )
        )
    return findings


def inventory(given: dict[str, t.Any]) -> list[dict[str, str]]:
    """All findings of an inventory; those of the serving plan come with it."""
    plan = [finding(item["id"], item["severity"], f"{item['variable']}: {item['what']}", item["hint"]) for item in given.get("plan_findings") or []]
    return (
        core_findings(given.get("core_version", ""))
        + (placement_findings(given["groups"]) if given.get("groups") else [])
        + plan
        + driver_findings(given.get("driver") or {})
        + boolean_findings(given.get("booleans") or {})
        + variable_findings(given.get("variables") or {})
        + environment_findings(given.get("environments") or {}, bool(given.get("allow_cuda_compat")))
    )


# -- parsers for the host -------------------------------------------------------------------------------------------


def parse_acs(text: str) -> dict[str, t.Any]:
    """Request and completion redirection by bridge, from ``lspci -Dvvv``: True, False, or None where it may not be read.

    A bridge without the capability cannot redirect and is left out.
    """
    found: dict[str, t.Any] = {}
    current = None
    for line in text.splitlines():
        match = re.match(r"^((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\s", line)
        if match:
            current = gpu_info.bus_id(match.group(1))
        elif current and re.search(r"Capabilities: <access denied>", line):
            found[current] = None
        elif current:
            match = re.search(r"ACSCtl:.*\bReqRedir([+-]).*\bCmpltRedir([+-])", line)
            if match:
                found[current] = "+" in match.groups()
    return found


def acs_findings(acs: dict[str, t.Any], pci: list[dict[str, t.Any]], known: bool = True) -> list[dict[str, str]]:
    """Only bridges above a GPU matter: root ports and switch ports."""
    above = sorted({bridge for device in pci for bridge in device["bridges"]})
    if not above:
        return []
    if not known:
        return [
            finding(
                "acs_unknown", "warning", "ACS of the bridges above the GPUs could not be read", "install pciutils; lspci must run as root"
            )
        ]
    redirecting = [bridge for bridge in above if acs.get(bridge)]
    denied = [bridge for bridge in above if bridge in acs and acs[bridge] is None]
    findings = []
    if redirecting:
        findings.append(
            finding(
                "acs_redirect",
                "warning",
                f"ACS redirects peer traffic at {', '.join(redirecting)}: copies between GPUs go up through the IOMMU, are slow, or hang NCCL",
                "switch ACS off in the BIOS, or set nvidia_driver_disable_acs (cleared at each boot), or set sglang_dsv4_p2p to disabled",
            )
        )
    if denied:
        findings.append(
            finding(
                "acs_unknown",
                "warning",
                f"ACS of {', '.join(denied)} could not be read (access denied); it may be on",
                "lspci must run as root",
            )
        )
    return findings


def parse_nvcc(text: str) -> str | None:
    """Version of ``nvcc --version``."""
    match = re.search(r"release (\d+\.\d+)", text or "")
    return match.group(1) if match else None


def version_tuple(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def toolkit_facts(system: System, home: str = "/usr/local/cuda") -> dict[str, t.Any]:
    """The CUDA toolkit at ``home``: version, and where the link leads."""
    place = system.at(home)
    nvcc = os.path.join(place, "bin", "nvcc")
    facts: dict[str, t.Any] = {"home": home, "target": None, "version": None, "nvcc": None}
    if system.exists(place):
        real = system.real(place)
        facts["target"] = real
    if system.exists(nvcc):
        facts["nvcc"] = nvcc
    else:
        facts["nvcc"] = system.which("nvcc")
    if facts["nvcc"]:
        facts["version"] = parse_nvcc(system.run([facts["nvcc"], "--version"]).out)
    return facts


def toolkit_findings(facts: dict[str, t.Any], driver_cuda: str | None, managed: bool) -> list[dict[str, str]]:
    needed = ".".join(map(str, JIT_TOOLKIT))
    if not facts["nvcc"]:
        severity = "info" if managed else "warning"
        return [
            finding(
                "toolkit_missing",
                severity,
                f"no nvcc at {facts['home']} or on the search path",
                "the role nvidia_driver installs it"
                if managed
                else "set nvidia_driver_cuda_toolkit, or name a toolkit; kernels that are compiled at run time need one",
            )
        ]
    where = facts["home"] + (f" (a link to {facts['target']})" if facts["target"] and facts["target"] != facts["home"] else "")
    if facts["version"] is None:
        return [finding("toolkit_unknown", "warning", f"{facts['nvcc']} does not tell its version", "run it with --version")]
    if version_tuple(facts["version"]) < JIT_TOOLKIT:
        more = f", although the driver offers CUDA {driver_cuda}" if driver_cuda else ""
        return [
            finding(
                "toolkit_too_old",
                "error",
                f"toolkit {facts['version']} < {needed}, required for sm_120 JIT: {where}{more}",
                f"install CUDA toolkit {needed} or newer, and let {facts['home']} lead to it",
            )
        ]
    return []


def parse_listeners(text: str, six: bool = False) -> list[dict[str, t.Any]]:
    """Listening sockets of ``/proc/net/tcp`` or ``tcp6``."""
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) > 9 and words[3] == "0A":
            address, port = words[1].rsplit(":", 1)
            raw = bytes.fromhex(address)
            ordered = b"".join(struct.pack(">I", word) for word in struct.unpack(f"={len(raw) // 4}I", raw))
            found.append(
                {
                    "address": socket.inet_ntop(socket.AF_INET6 if six else socket.AF_INET, ordered),
                    "port": int(port, 16),
                    "inode": int(words[9]),
                }
            )
    return found


def listeners(system: System, real_proc: str = "/proc") -> list[dict[str, t.Any]]:
    """Who listens: address, port, and pid, command and unit where the process can be seen."""
    found = parse_listeners(system.read(f"{real_proc}/net/tcp") or "") + parse_listeners(
        system.read(f"{real_proc}/net/tcp6") or "", six=True
    )
    wanted = {entry["inode"]: entry for entry in found}
    for entry in found:
        entry.update(pid=None, command=None, unit=None)
    if not wanted:
        return found
    for pid in system.listed(real_proc):
        if not pid.isdigit():
            continue
        for descriptor in system.listed(f"{real_proc}/{pid}/fd"):
            try:
                match = re.match(r"socket:\[(\d+)\]", os.readlink(f"{real_proc}/{pid}/fd/{descriptor}"))
            except OSError:
                continue
            if match and int(match.group(1)) in wanted:
                entry = wanted[int(match.group(1))]
                entry.update(
                    pid=int(pid),
                    command=(system.read(f"{real_proc}/{pid}/comm") or "").strip(),
                    unit=gpu_info.unit_of(system.read(f"{real_proc}/{pid}/cgroup")),
                )
    return found


def port_findings(found: list[dict[str, t.Any]], planned: list[dict[str, t.Any]], units: list[str]) -> list[dict[str, str]]:
    """Planned ports that somebody else holds. Ours are free to be there."""
    ours = {name if name.endswith(".service") else f"{name}.service" for name in units}
    findings = []
    wanted: dict[int, str] = {}
    for entry in planned:
        wanted.setdefault(int(entry["port"]), str(entry.get("what") or "service"))
    for port, what in wanted.items():
        holders = [entry for entry in found if entry["port"] == port and entry["unit"] not in ours]
        for entry in holders[:1]:
            who = (
                f"process {entry['pid']} ({entry['command']}, {entry['unit'] or 'no unit'})"
                if entry["pid"]
                else "a process that cannot be seen from here"
            )
            findings.append(
                finding(
                    "port_in_use",
                    "error",
                    f"port {port} ({what}) is held by {who}",
                    "end that service or choose another port in dsv4_topology",
                )
            )
    return findings


def os_findings(text: str | None, machine: str) -> list[dict[str, str]]:
    fields = dict(re.findall(r'(?m)^(ID|VERSION_ID)="?([^"\n]*)"?$', text or ""))
    name, version = fields.get("ID", "unknown"), fields.get("VERSION_ID", "unknown")
    findings = []
    if version not in SUPPORTED.get(name, ()):
        findings.append(
            finding("os_unsupported", "error", f"{name} {version} is not supported", "use Ubuntu 24.04, Debian 12 or Debian 13")
        )
    if machine != "x86_64":
        findings.append(
            finding("arch_unsupported", "error", f"the machine is {machine}", "the locks and the driver's packages are for x86_64")
        )
    return findings


def kernel_findings(state: dict[str, t.Any], wanted_version: str, headers: dict[str, bool | None]) -> list[dict[str, str]]:
    """Can the driver be built for the kernel that will boot?"""
    findings = []
    version = wanted_version or state["target_version"] or ""
    target = state["target_kernel"] or ""
    for branch, mended, kernel in BUILD_LIMITS:
        too_old = mended is None or version_tuple(version) < version_tuple(mended)
        if version and driver.branch(version) == branch and too_old and version_tuple(target)[:2] >= kernel:
            findings.append(
                finding(
                    "kernel_too_new",
                    "error",
                    f"driver {version} does not build for kernel {target}",
                    f"pin {mended} or newer" if mended else "pin a newer branch, or boot an older kernel",
                )
            )
    for release, there in headers.items():
        if there is False:
            findings.append(
                finding(
                    "headers_missing",
                    "warning",
                    f"headers of kernel {release} are neither installed nor offered by the package index",
                    f"make linux-headers-{release} available (or boot the kernel of the distribution); without them DKMS builds nothing",
                )
            )
    if state["target_kernel_reason"] and "no kernel image" not in state["target_kernel_reason"]:
        findings.append(
            finding(
                "target_kernel",
                "warning",
                f"which kernel boots next is not certain: {state['target_kernel_reason']}",
                "set GRUB_DEFAULT=0, or pick the entry yourself",
            )
        )
    return findings


def headers_of(system: System, kernels: t.Iterable[str | None]) -> dict[str, bool | None]:
    """Are headers there or offered, by kernel? None: the package index cannot be asked."""
    found: dict[str, bool | None] = {}
    for release in dict.fromkeys(kernel for kernel in kernels if kernel):
        if system.exists(system.at(f"/lib/modules/{release}/build")) or system.exists(system.at(f"/usr/src/linux-headers-{release}")):
            found[release] = True
            continue
        if not system.which("apt-cache") or not [name for name in system.listed(system.at("/var/lib/apt/lists")) if "_" in name]:
            found[release] = None
            continue
        policy = driver.parse_policy(system.run(["apt-cache", "policy", f"linux-headers-{release}"]).out)
        found[release] = bool(policy.get(f"linux-headers-{release}", {}).get("candidate"))
    return found


def iommu_findings(state: dict[str, t.Any], gpus: int) -> list[dict[str, str]]:
    """The IOMMU as it works now, against what the next boot will ask."""
    if gpus < 2:
        return []
    iommu = state["iommu"]
    findings = []
    asked_next, asked_now = iommu["asked_configured"], iommu["asked_running"]
    if asked_next != asked_now and asked_next != "default":
        findings.append(
            finding(
                "iommu_reboot",
                "warning",
                f"iommu.configured={asked_next}, iommu.running={iommu['running'] if iommu['running'] != 'unknown' else asked_now}, reboot_required=true",
                "run update-grub when /boot/grub/grub.cfg does not have it yet, then reboot; only /proc/cmdline counts",
            )
        )
    if iommu["running"] == "translated" or (iommu["running"] == "unknown" and asked_now == "default"):
        findings.append(
            finding(
                "iommu_translated",
                "warning",
                "the IOMMU translates the GPUs' DMA"
                if iommu["running"] == "translated"
                else "whether the IOMMU translates the GPUs' DMA cannot be told",
                f"copies between GPUs may be slow or wrong; put {IOMMU_PROPOSAL} on the kernel command line (nvidia_driver_manage_cmdline does), "
                "or amd_iommu=off / intel_iommu=off",
            )
        )
    return findings


def disk_findings(spaces: list[dict[str, t.Any]]) -> list[dict[str, str]]:
    """``spaces``: path, need_gib, free_gib, device. Needs on one device add up."""
    findings = []
    by_device: dict[t.Any, list[dict[str, t.Any]]] = {}
    for space in spaces:
        if space["free_gib"] is None:
            findings.append(
                finding("disk_unknown", "warning", f"free space for {space['path']} cannot be read", "create the folder or its parent")
            )
        else:
            by_device.setdefault(space["device"], []).append(space)
    for entries in by_device.values():
        need, free = sum(entry["need_gib"] for entry in entries), entries[0]["free_gib"]
        if free < need:
            what = ", ".join(f"{entry['path']} ({entry['what']}) {entry['need_gib']} GiB" for entry in entries)
            findings.append(
                finding(
                    "disk_full",
                    "error",
                    f"{free:.0f} GiB are free, {need} GiB are needed: {what}",
                    "free some space, or move dsv4_root to a larger disk",
                )
            )
    return findings


def disk_space(paths: list[dict[str, t.Any]], staged: t.Callable[[str], bool] = os.path.exists) -> list[dict[str, t.Any]]:
    """Free space where each path is or will be. What is there already (``unless``) needs none."""
    spaces = []
    for entry in paths:
        if entry.get("unless") and staged(entry["unless"]):
            continue
        place = entry["path"]
        while place != "/" and not os.path.exists(place):
            place = os.path.dirname(place) or "/"
        try:
            free, device = shutil.disk_usage(place).free / GIB, os.stat(place).st_dev
        except OSError:
            free, device = None, None
        spaces.append(
            {"path": entry["path"], "what": entry.get("what", "data"), "need_gib": entry["need_gib"], "free_gib": free, "device": device}
        )
    return spaces


def memory_findings(meminfo: str | None, need_gib: float) -> list[dict[str, str]]:
    match = re.search(r"(?m)^MemTotal:\s+(\d+) kB", meminfo or "")
    if not match:
        return [finding("memory_unknown", "warning", "the size of the main memory cannot be read", "look at /proc/meminfo")]
    have = int(match.group(1)) / 1024 / 1024
    if have < need_gib:
        return [
            finding(
                "memory_small",
                "error",
                f"{have:.0f} GiB of main memory, {need_gib:g} GiB are needed",
                "loading goes through the page cache; less makes it crawl or fail (preflight_memory_gib)",
            )
        ]
    return []


def compat_findings(system: System) -> list[dict[str, str]]:
    """Does the loader find a cuda-compat libcuda before the driver's?"""
    path = system.which("ldconfig")
    out = system.run([path, "-p"]).out if path else ""
    first = next(
        (line.split("=>")[1].strip() for line in out.splitlines() if line.strip().startswith("libcuda.so.1") and "=>" in line), None
    )
    if first and compat_elements(os.path.dirname(first)):
        return [
            finding(
                "cuda_compat_ldconfig",
                "error",
                f"the loader takes {first} before the driver's libcuda (CUDA error 803)",
                "remove the compat folder from /etc/ld.so.conf.d, then run ldconfig",
            )
        ]
    return []


def time_findings(system: System) -> list[dict[str, str]]:
    path = system.which("timedatectl")
    if not path:
        return [finding("time_unknown", "info", "whether the clock is synchronized cannot be told", "install systemd-timesyncd or chrony")]
    answer = system.run([path, "show", "--property=NTPSynchronized", "--value"])
    if answer.out.strip() == "no":
        return [
            finding(
                "time_not_synchronized",
                "warning",
                "the clock is not synchronized",
                "start systemd-timesyncd or chrony; records and logs of several hosts must agree",
            )
        ]
    return []


def process_findings(gpus: list[dict[str, t.Any]], units: list[str]) -> list[dict[str, str]]:
    """Processes on the GPUs that are none of ours. They are named and left alone."""
    ours = {name if name.endswith(".service") else f"{name}.service" for name in units}
    seen: dict[int, dict[str, t.Any]] = {}
    for gpu in gpus:
        for process in gpu["processes"]:
            if process.get("unit") not in ours:
                entry = seen.setdefault(process["pid"], {**process, "gpus": []})
                entry["gpus"].append(gpu["index"])
    return [
        finding(
            "gpu_in_use",
            "error",
            f"process {pid} ({entry['name'] or 'unknown'}, {entry.get('unit') or 'no unit'}) uses GPUs {entry['gpus']} and is none of ours",
            f"let it end, or stop it by its pid ({pid}) after looking at it",
        )
        for pid, entry in sorted(seen.items())
    ]


def device_findings(pci: list[dict[str, t.Any]]) -> list[dict[str, str]]:
    """Cards that this collection was not made for, and drivers that must not have them."""
    findings = []
    other = sorted({device["device_id"] for device in pci} - set(KNOWN_DEVICES))
    if other:
        findings.append(
            finding(
                "gpu_other_model",
                "warning",
                f"PCI ids {', '.join(other)} are no RTX PRO 6000 Blackwell",
                "kernels and memory fractions are chosen for sm_120 with 96 GB",
            )
        )
    for name in ("nouveau", "vfio-pci"):
        bound = [gpu_info.place(device) for device in pci if device["driver"] == name]
        if bound:
            findings.append(
                finding(
                    f"gpu_bound_to_{name.replace('-', '_')}",
                    "warning" if name == "nouveau" else "error",
                    f"gpu_bound_to={name}: {', '.join(bound)}",
                    "the role nvidia_driver blacklists nouveau, rebuilds the initramfs and reboots once"
                    if name == "nouveau"
                    else "the card is reserved for a virtual machine; take it out of the vfio-pci ids",
                )
            )
    return findings


# What the role nvidia_driver mends is no error before it.
MENDED = {"driver_wrong_flavour", "driver_packages_not_configured", "driver_not_held", "driver_dkms"}
DRIVER_STATES = {
    "not_installed": ("info", "driver_not_installed"),
    "not_loaded": ("warning", "driver_not_loaded"),
    "nouveau": ("info", "driver_nouveau"),
    "reboot_required": ("warning", "driver_reboot_required"),
    "wrong_flavour": ("error", "driver_wrong_flavour"),
    "adapter_init_failed": ("error", "driver_adapter_init_failed"),
    "unknown": ("info", "driver_unknown"),
}


def state_findings(state: dict[str, t.Any], verdict: dict[str, t.Any], managed: bool) -> list[dict[str, str]]:
    """The driver: its state in one finding, then what is wrong with its packages."""
    findings = []
    if verdict["state"] in DRIVER_STATES:
        severity, ident = DRIVER_STATES[verdict["state"]]
        if not managed and severity in ("info", "warning"):
            severity = "error"
        findings.append(finding(ident, severity, str(verdict["reason"]), str(verdict["hint"] or "")))
    for item in state["findings"]:
        severity = "warning" if managed and item["id"] in MENDED and item["severity"] == "error" else item["severity"]
        if not any(known["id"] == item["id"] for known in findings):
            findings.append({**item, "severity": severity})
    for item in findings:
        if managed and item["id"] in MENDED and item["severity"] == "error":
            item["severity"] = "warning"
    return findings


def peer_pairs(groups: dict[str, list[int]]) -> list[tuple[int, int]]:
    """Pairs of GPUs that talk to each other: within an instance, both ways."""
    pairs = dict.fromkeys((a, b) for indexes in groups.values() for a in indexes for b in indexes if a != b)
    return list(pairs)


def p2p_findings(result: dict[str, t.Any]) -> list[dict[str, str]]:
    """Findings of the copy-and-compare test."""
    if not result["ran"]:
        return [
            finding(
                "p2p_not_tested",
                "info",
                f"copies between GPUs were not tested: {result['reason']}",
                "stop the units and run the play again; the test runs after the driver, while nothing uses the GPUs",
            )
        ]
    findings = []
    for status, severity, what, hint in (
        (
            "wrong_data",
            "error",
            "copies report success and the data is wrong",
            "a translating IOMMU or ACS is in the way: iommu=pt or off, ACS off; or set sglang_dsv4_p2p to disabled",
        ),
        ("timeout", "error", "a copy never ended", "reset the GPUs or reboot; then IOMMU and ACS off, or set sglang_dsv4_p2p to disabled"),
        ("error", "error", "a copy failed", "read the reason; set sglang_dsv4_p2p to disabled when it cannot be mended"),
        ("no_peer_access", "warning", "no peer access", "set sglang_dsv4_p2p to disabled, or look at IOMMU, ACS and the slots"),
    ):
        rows = [row for row in result["pairs"] if row["status"] == status]
        if rows:
            pairs = ", ".join(f"{row['from']} > {row['to']}" for row in rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
            findings.append(finding(f"p2p_{status}", severity, f"{what}: {pairs} ({rows[0]['reason']})", hint))
    return findings


def matrix_findings(p2p: dict[str, t.Any] | None, pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
    """What the driver itself says of the planned pairs."""
    matrix = (p2p or {}).get("read")
    if not matrix:
        return []
    bad = {(a, b): matrix[a][b] for a, b in pairs if a < len(matrix) and b < len(matrix) and matrix[a][b] not in ("ok", "self")}
    if not bad:
        return []
    shown = ", ".join(f"{a}>{b} {status}" for (a, b), status in list(bad.items())[:4])
    return [
        finding(
            "p2p_refused",
            "warning",
            f"the driver refuses peer access for {len(bad)} planned pairs: {shown}",
            "look at IOMMU, ACS and BAR sizes, or set sglang_dsv4_p2p to disabled",
        )
    ]


def bar_findings(gpus: list[dict[str, t.Any]]) -> list[dict[str, str]]:
    """GPUs whose memory does not fit through their window on the bus."""
    return [
        finding(
            "gpu_bar1_below_memory",
            "warning",
            f"BAR1 of the GPU at {gpu_info.place(gpu)} is {gpu['bar1_total_mib']} MiB, its memory {gpu['memory_total_mib']} MiB",
            "switch on Above 4G Decoding and Resizable BAR in the BIOS; peer copies need the whole memory in reach",
        )
        for gpu in gpus
        if gpu["bar1_total_mib"] and gpu["memory_total_mib"] and gpu["bar1_total_mib"] < gpu["memory_total_mib"]
    ]


def gpu_findings(facts: dict[str, t.Any], plan: dict[str, t.Any]) -> list[dict[str, str]]:
    """The GPUs against the plan. ``facts`` are those of gpu_info."""
    return facts["findings"] + matrix_findings(facts["p2p"], peer_pairs(plan.get("groups") or {})) + bar_findings(facts["gpus"])


def copy_between_peers(
    facts: dict[str, t.Any], groups: dict[str, list[int]], wanted: bool, limit: float, probe: t.Callable[..., dict[str, t.Any]] = p2p_probe.probe
) -> dict[str, t.Any]:
    """Run the copy-and-compare test where that is possible, and say why not where it is not."""

    def refused(reason: str) -> dict[str, t.Any]:
        return {"ran": False, "reason": reason, "pairs": []}

    gpus = {gpu["index"]: gpu for gpu in facts["gpus"]}
    pairs = [(a, b) for a, b in peer_pairs(groups) if a in gpus and b in gpus]
    if not wanted:
        return refused("switched off")
    if facts["driver"]["state"] != "ok" or facts["source"] == "lspci":
        return refused(f"the driver is not usable ({facts['driver']['state']})")
    if not pairs:
        return refused("no planned pair of GPUs is there")
    planned = [gpus[index] for index in sorted({index for pair in pairs for index in pair})]
    busy = [gpu for gpu in planned if gpu["processes"] or "processes" in gpu["unknown"] or (gpu["utilization_percent"] or 0) > 5]
    if busy:
        users = sorted({str(process.get("unit") or process["pid"]) for gpu in busy for process in gpu["processes"]})
        return refused(f"GPUs {[gpu['index'] for gpu in busy]} are in use" + (f" by {', '.join(users)}" if users else ""))
    return probe([(gpus[a]["bus_id"], gpus[b]["bus_id"]) for a, b in pairs], limit)


# -- everything -------------------------------------------------------------------------------------------------


def sort_and_ignore(findings: list[dict[str, str]], ignore: t.Iterable[str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Findings by severity, each once, and those that the inventory asked to ignore."""
    wanted = set(ignore)
    unique = list({(item["id"], item["what"]): item for item in findings}.values())
    ordered = sorted(unique, key=lambda item: (SEVERITIES.index(item["severity"]), item["id"]))
    return [item for item in ordered if item["id"] not in wanted], [item for item in ordered if item["id"] in wanted]


def table(findings: list[dict[str, str]], ignored: list[dict[str, str]], width: int = 150) -> list[str]:
    """One table for a terminal: severity, id, what, and below it how to mend."""
    import textwrap

    if not findings and not ignored:
        return ["no findings"]
    column = max(len(item["id"]) for item in [*findings, *ignored]) + 2
    lines = []
    for item in [*findings, *({**item, "severity": "ignored"} for item in ignored)]:
        head = f"{item['severity']:<9}{item['id']:<{column}}"
        body = textwrap.wrap(item["what"], max(40, width - len(head))) or [""]
        lines += [head + body[0], *(" " * len(head) + line for line in body[1:])]
        if item["severity"] != "ignored":
            lines += [" " * len(head) + line for line in textwrap.wrap("-> " + item["hint"], max(40, width - len(head)))]
    count = {severity: sum(1 for item in findings if item["severity"] == severity) for severity in SEVERITIES}
    lines.append(
        ", ".join(f"{number} {severity}{'s' if number != 1 else ''}" for severity, number in count.items())
        + (f", {len(ignored)} ignored" if ignored else "")
    )
    return lines


def answer(findings: list[dict[str, str]], ignore: t.Iterable[str], known: t.Iterable[dict[str, str]] = ()) -> dict[str, t.Any]:
    """What each of the modules returns of its findings. Those that were shown before (``known``) are not repeated."""
    shown = {(item["id"], item["what"]) for item in known}
    left, ignored = sort_and_ignore([item for item in findings if (item["id"], item["what"]) not in shown], ignore)
    return {
        "findings": left,
        "ignored": ignored,
        "ok": not any(item["severity"] == "error" for item in left),
        "table": table(left, ignored),
    }


def gather(system: System, given: dict[str, t.Any]) -> dict[str, t.Any]:
    """Facts of the GPUs for the options of a module."""
    nvml, reason = gpu_info.load_nvml(given["nvml_path"])
    return gpu_info.gather(system, nvml, plan=given["plan"], nvml_missing=reason)


def host(system: System, facts: dict[str, t.Any], given: dict[str, t.Any]) -> dict[str, t.Any]:
    """All findings of a host. ``facts`` are those of gpu_info; ``given`` are the module's options."""
    plan = given.get("plan") or {}
    units = given.get("units") or []
    state = driver.state(
        system,
        driver.Question(
            given.get("family") or list(driver.FAMILY),
            given.get("hold") or list(driver.FAMILY),
            given.get("boot") or "/boot",
            [],
            [],
            given.get("mok_certificate") or "",
            units,
            bool(facts["pci"]),
        ),
    )
    lspci = system.which("lspci")
    acs_answer = system.run([lspci, "-Dvvv"]) if lspci and any(device["bridges"] for device in facts["pci"]) else None
    acs = parse_acs(acs_answer.out) if acs_answer else {}
    toolkit = toolkit_facts(system, given.get("cuda_home") or "/usr/local/cuda")
    managed = bool(given.get("driver_managed"))
    headers = headers_of(system, [state["kernel"], state["target_kernel"]])
    findings = (
        os_findings(system.read(system.at("/etc/os-release")), given.get("machine") or os.uname().machine)
        + kernel_findings(state, given.get("driver_version") or "", headers)
        + device_findings(facts["pci"])
        + state_findings(state, facts["driver"], managed)
        + gpu_findings(facts, plan)
        + iommu_findings(state, len(facts["pci"]))
        + acs_findings(acs, facts["pci"], acs_answer is not None and acs_answer.code == 0)
        + process_findings(facts["gpus"], units)
        + memory_findings(system.read(system.proc("meminfo")), float(given.get("memory_gib") or 0))
        + disk_findings(disk_space(given.get("disk") or []))
        + port_findings(listeners(system), given.get("listeners") or [], units)
        + compat_findings(system)
        + toolkit_findings(toolkit, facts["driver"].get("cuda_version"), bool(given.get("toolkit_managed")))
        + time_findings(system)
    )
    return {
        "findings": findings,
        "facts": {
            "driver": {
                **facts["driver"],
                **{name: state[name] for name in ("target_kernel", "target_version", "secure_boot", "reboot_required", "reboot_reasons")},
            },
            "driver_cuda": facts["driver"].get("cuda_version"),
            "toolkit_cuda": toolkit["version"],
            "toolkit": toolkit,
            "iommu": state["iommu"],
            "acs": acs,
            "numa_nodes": gpu_info.numa_nodes(system),
            "headers": headers,
            "counts": facts["counts"],
            "cmdline_proposed": [IOMMU_PROPOSAL] if any(item["id"] == "iommu_translated" for item in findings) else [],
        },
    }
