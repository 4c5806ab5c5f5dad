# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What of the NVIDIA driver is loaded, installed, built and pinned on a host, and what that adds up to.

Parsers for what the tools print come first, then the facts of a host, then verdicts. A verdict never says more than
the facts do: what could not be read is "unknown".
"""

from __future__ import annotations

import fnmatch
import os
import re
import typing as t

from .host_system import System

OPEN_LICENSES = ("Dual MIT/GPL", "MIT/GPL", "GPL")
# Letters of dpkg: what is wanted, what is there, and an error flag.
DPKG_STATES = {"n": "not_installed", "c": "config_files", "H": "half_installed", "U": "unpacked", "F": "half_configured",
               "W": "triggers_awaited", "t": "triggers_pending", "i": "installed"}
VERSION = re.compile(r"\d+(?:\.\d+)+")


# -- parsers ----------------------------------------------------------------------------------------------------


def parse_nvrm(text: str | None) -> dict[str, str | None]:
    """``/proc/driver/nvidia/version``; both spellings, of the open and of the proprietary module."""
    for line in (text or "").splitlines():
        if not line.startswith("NVRM version:"):
            continue
        match = re.search(r"Open Kernel Module for \S+\s+(\d+(?:\.\d+)+)", line)
        if match:
            return {"version": match.group(1), "flavour": "open"}
        match = re.search(r"Kernel Module\s+(\d+(?:\.\d+)+)", line)
        if match:
            return {"version": match.group(1), "flavour": "proprietary"}
        match = VERSION.search(line)
        return {"version": match.group(0) if match else None, "flavour": None}
    return {"version": None, "flavour": None}


def parse_modinfo(text: str | None) -> dict[str, str | None]:
    """``modinfo nvidia``: file, version, flavour by licence, and who signed it."""
    fields: dict[str, str] = {}
    for line in (text or "").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() and name.strip() not in fields:
            fields[name.strip()] = value.strip()
    licence = fields.get("license")
    flavour = None if licence is None else "open" if licence in OPEN_LICENSES else "proprietary" if licence == "NVIDIA" else None
    return {"filename": fields.get("filename"), "version": fields.get("version"), "license": licence, "flavour": flavour, "signer": fields.get("signer")}


def parse_dpkg(text: str | None) -> list[dict[str, str]]:
    """Lines of ``dpkg -l`` or of ``dpkg-query -W -f '${db:Status-Abbrev}\\t${binary:Package}\\t${Version}\\n'``."""
    packages = []
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) < 2 or not re.match(r"^[uihrp][ncHUFWti]R?$", words[0]):
            continue
        packages.append({
            "name": words[1].split(":")[0], "version": words[2] if len(words) > 2 else "",
            "wanted": words[0][0], "state": DPKG_STATES[words[0][1]], "letters": words[0],
        })
    return packages


def parse_dkms(text: str | None) -> list[dict[str, str | None]]:
    """``dkms status``: of each module version, for which kernel and how far (added, built, installed)."""
    found = []
    for line in (text or "").splitlines():
        match = re.match(r"^([^/,\s]+)[/,]\s*([^,:\s]+)(?:,\s*([^,:\s]+))?(?:,\s*([^,:\s]+))?\s*:\s*(\S+)", line)
        if match:
            module, version, kernel, arch, state = match.groups()
            found.append({"module": module, "version": version, "kernel": kernel, "arch": arch, "state": state})
    return found


def parse_secure_boot(code: int, output: str) -> str:
    """Secure Boot from ``mokutil --sb-state``: on, off, unsupported or unknown."""
    if re.search(r"SecureBoot enabled", output):
        return "on"
    if re.search(r"SecureBoot disabled", output):
        return "off"
    if re.search(r"EFI variables are not supported|doesn't support Secure Boot", output):
        return "unsupported"
    return "unsupported" if code == 127 else "unknown"


def parse_policy(text: str | None) -> dict[str, dict[str, t.Any]]:
    """``apt-cache policy NAME...``: installed, candidate, and per version the origins that offer it."""
    packages: dict[str, dict[str, t.Any]] = {}
    current: dict[str, t.Any] = {}
    version = None
    for line in (text or "").splitlines():
        match = re.match(r"^(\S[^:]*(?::\w+)?):$", line)
        if match:
            current = packages.setdefault(match.group(1), {"installed": None, "candidate": None, "versions": {}})
            version = None
            continue
        match = re.match(r"^\s+(Installed|Candidate):\s+(.*)$", line)
        if match:
            value = None if match.group(2) == "(none)" else match.group(2)
            current[match.group(1).lower()] = value
            continue
        match = re.match(r"^ (?:\*\*\*|   ) (\S+) (-?\d+)(?: \(phased \d+%\))?$", line)
        if match and current:
            version = match.group(1)
            current["versions"].setdefault(version, [])
            continue
        match = re.match(r"^\s+(-?\d+)\s+(\S+)(?:\s+(.*))?$", line)
        if match and version:
            current["versions"][version].append(match.group(2) + (" " + match.group(3).split(" ")[0] if match.group(3) else ""))
    return packages


def parse_policy_releases(text: str | None) -> dict[str, str]:
    """``apt-cache policy`` without names: the Origin (o=) of each source line, by the line's first two words."""
    origins, source = {}, None
    for line in (text or "").splitlines():
        match = re.match(r"^\s*-?\d+\s+(\S+)(?:\s+(\S+))?", line)
        if match and "/" in match.group(1):
            source = match.group(1) + (" " + match.group(2) if match.group(2) else "")
            continue
        match = re.match(r"^\s+release\s+(.*)$", line)
        if match and source:
            fields = dict(part.split("=", 1) for part in match.group(1).split(",") if "=" in part)
            origins[source] = fields.get("o", "")
    return origins


def cmdline_words(text: str | None) -> list[str]:
    """Arguments of a kernel command line; quotes keep blanks together."""
    return re.findall(r'(?:[^\s"]|"[^"]*")+', text or "")


def grub_words(files: t.Iterable[str | None]) -> list[str]:
    """Arguments that GRUB's defaults would give to the next boot; later files may extend earlier ones."""
    values: dict[str, str] = {}
    for text in files:
        for line in (text or "").splitlines():
            match = re.match(r"""^\s*(GRUB_CMDLINE_LINUX(?:_DEFAULT)?)=(["']?)(.*?)\2\s*(?:#.*)?$""", line)
            if match:
                values[match.group(1)] = re.sub(r"\$\{?(\w+)\}?", lambda m: values.get(m.group(1), ""), match.group(3))
    return cmdline_words(values.get("GRUB_CMDLINE_LINUX", "") + " " + values.get("GRUB_CMDLINE_LINUX_DEFAULT", ""))


def iommu_mode(words: t.Iterable[str]) -> str:
    """What a command line asks of the IOMMU: off, pt or default. Only whole arguments count."""
    given = list(words)
    for word in reversed(given):
        if word in ("iommu=off", "amd_iommu=off", "intel_iommu=off"):
            return "off"
        if word in ("iommu=pt", "iommu.passthrough=1"):
            return "pt"
    return "default"


def version_key(text: str) -> list[tuple[int, t.Any]]:
    """Sort key that puts kernel releases and driver versions in their order."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.findall(r"\d+|[a-zA-Z]+", text)]


def upstream(version: str) -> str:
    """Version of the driver in a package version: without epoch and package revision."""
    return version.split(":", 1)[-1].split("-", 1)[0].split("+", 1)[0].split("~", 1)[0]


def branch(version: str | None) -> int | None:
    match = re.match(r"^(\d+)", version or "")
    return int(match.group(1)) if match else None


def in_family(name: str, patterns: t.Iterable[str]) -> bool:
    """Does a package belong to the driver? Patterns are those of apt preferences."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# -- facts of a host --------------------------------------------------------------------------------------------


def running_kernel(system: System) -> str | None:
    return (system.read(system.proc("sys/kernel/osrelease")) or "").strip() or None


def module_facts(system: System) -> dict[str, t.Any]:
    """The module: loaded now, and on disk for the running kernel."""
    loaded = parse_nvrm(system.read(system.proc("driver/nvidia/version")))
    modules = [line.split()[0] for line in (system.read(system.proc("modules")) or "").splitlines() if line.strip()]
    if loaded["version"] is None:
        version = (system.read(system.sys("module/nvidia/version")) or "").strip()
        loaded["version"] = version or None
    kernel = running_kernel(system)
    return {
        "loaded_version": loaded["version"],
        "loaded_flavour": loaded["flavour"],
        "nouveau_loaded": "nouveau" in modules,
        "modules": [name for name in modules if name == "nouveau" or name.startswith("nvidia")],
        "kernel": kernel,
        **{f"installed_{name}": value for name, value in modinfo(system, kernel).items() if name in ("version", "flavour", "signer")},
    }


def modinfo(system: System, kernel: str | None) -> dict[str, str | None]:
    path = system.which("modinfo")
    if not path or not kernel:
        return parse_modinfo(None)
    return parse_modinfo(system.run([path, "-k", kernel, "nvidia"]).out)


def installed_packages(system: System) -> list[dict[str, str]]:
    path = system.which("dpkg-query")
    if not path:
        return []
    answer = system.run([path, "-W", "-f", "${db:Status-Abbrev}\t${binary:Package}\t${Version}\n"])
    return [entry for entry in parse_dpkg(answer.out) if entry["state"] not in ("not_installed", "config_files")]


def held_packages(system: System) -> list[str]:
    path = system.which("apt-mark")
    return [line.split(":")[0] for line in system.run([path, "showhold"]).out.split()] if path else []


def bootable_kernels(system: System, boot: str = "/boot") -> list[str]:
    """Kernels with an image in the boot folder, newest first."""
    names = [name[len("vmlinuz-"):] for name in system.listed(system.at(boot)) if name.startswith("vmlinuz-") and not name.endswith((".old", ".bak"))]
    return sorted(names, key=version_key, reverse=True)


def target_kernel(system: System, boot: str = "/boot") -> tuple[str | None, str | None]:
    """The kernel of the next boot, and why that is not certain. GRUB's entry 0 is the newest."""
    kernels = bootable_kernels(system, boot)
    if not kernels:
        return running_kernel(system), f"no kernel image in {boot}; the running one is assumed"
    text = "\n".join(system.read(system.at(path)) or "" for path in
                     ["/etc/default/grub", *(f"/etc/default/grub.d/{name}" for name in system.listed(system.at("/etc/default/grub.d")))])
    found = re.findall(r"""(?m)^\s*GRUB_DEFAULT=["']?(.*?)["']?\s*$""", text)
    default = found[-1] if found else "0"
    if default == "saved":
        saved = re.search(r"(?m)^saved_entry=(.*)$", system.read(system.at(f"{boot}/grub/grubenv")) or "")
        default = saved.group(1) if saved else "0"
    if default == "0":
        return kernels[0], None
    named = [kernel for kernel in kernels if re.search(rf"(?:^|\s|-){re.escape(kernel)}(?:-advanced|\s|$|')", default)]
    if named:
        return named[0], None
    return kernels[0], f"GRUB_DEFAULT is {default!r}; the newest kernel is assumed"


def dkms_entries(system: System) -> tuple[list[dict[str, str | None]], str | None]:
    path = system.which("dkms")
    if not path:
        return [], "dkms is not installed"
    answer = system.run([path, "status"])
    if answer.code:
        return [], answer.err.strip() or f"dkms: exit code {answer.code}"
    return [entry for entry in parse_dkms(answer.out) if (entry["module"] or "").startswith("nvidia")], None


def secure_boot(system: System) -> str:
    """on, off, unsupported (legacy boot, or no way to ask on a host without EFI) or unknown."""
    if not system.exists(system.sys("firmware/efi")):
        return "unsupported"
    path = system.which("mokutil")
    if not path:
        return "unknown"
    answer = system.run([path, "--sb-state"])
    return parse_secure_boot(answer.code, answer.out + answer.err)


def key_enrolled(system: System, certificate: str) -> bool | None:
    """Does the firmware accept this certificate? None: it cannot be told."""
    path = system.which("mokutil")
    if not path or not certificate or not system.exists(system.at(certificate)):
        return None
    answer = system.run([path, "--test-key", certificate])
    said = answer.out + answer.err
    if "already enrolled" in said:
        return True
    return False if "not enrolled" in said else None


def iommu_groups(system: System) -> str:
    """How the kernel maps DMA of the devices: off, pt, translated or unknown; by effect, not by flag."""
    if not system.exists(system.sys("kernel")) and not system.exists(system.sys("class")):
        return "unknown"
    groups = system.listed(system.sys("kernel/iommu_groups"))
    if not groups:
        return "off"
    kinds = {(system.read(system.sys(f"kernel/iommu_groups/{group}/type")) or "").strip() for group in groups}
    kinds.discard("")
    if not kinds:
        return "unknown"
    return "pt" if kinds == {"identity"} else "translated"


def mismatch(failures: t.Iterable[str]) -> bool:
    """Did NVML or nvidia-smi complain that library and module differ?"""
    return any(re.search(r"(?i)version mismatch", reason) for reason in failures)


def verdict(facts: dict[str, t.Any], failures: list[str], bound_to: list[str | None], gpus_visible: int | None, gpus_on_bus: int,
            init_failures: list[str]) -> dict[str, t.Any]:
    """``state`` of the driver in one word, with the reason and what to do. The first that fits is the cause."""
    loaded, installed = facts.get("loaded_version"), facts.get("installed_version")

    def say(state: str, reason: str | None, hint: str | None = None) -> dict[str, t.Any]:
        return {"state": state, "reason": reason, "hint": hint}

    nouveau = [name for name in bound_to if name == "nouveau"]
    if nouveau:
        return say("nouveau", f"{len(nouveau)} of {gpus_on_bus} GPUs are bound to nouveau", "blacklist nouveau, rebuild the initramfs, reboot once")
    if mismatch(failures) or (loaded and installed and loaded != installed):
        return say("reboot_required", f"module {loaded or 'unknown'} is loaded, {installed or 'another version'} is installed",
                   "reboot the host; nothing has to be installed again")
    if loaded is None:
        if installed is None:
            return say("not_installed", "no nvidia module is loaded or built for the running kernel", "install the driver (role nvidia_driver)")
        return say("not_loaded", f"module {installed} is built for the running kernel but not loaded", "reboot, or read the kernel log for why it was refused")
    if gpus_on_bus and facts.get("loaded_flavour") == "proprietary":
        return say("wrong_flavour", "open kernel module required on Blackwell; found proprietary", "install the -open packages of the same branch")
    if gpus_on_bus and (gpus_visible == 0 or init_failures):
        where = ", ".join(init_failures) or "all"
        return say("adapter_init_failed", f"the module is loaded, but could not start the GPUs at {where}",
                   "check the module's licence (modinfo -F license nvidia must not say NVIDIA) and, in the BIOS, Above 4G Decoding and Resizable BAR")
    if gpus_visible is None:
        return say("unknown", "; ".join(failures) or "neither NVML nor nvidia-smi answered", "install nvidia-ml-py or nvidia-utils")
    return say("ok", None)
