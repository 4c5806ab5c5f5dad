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
DPKG_STATES = {
    "n": "not_installed",
    "c": "config_files",
    "H": "half_installed",
    "U": "unpacked",
    "F": "half_configured",
    "W": "triggers_awaited",
    "t": "triggers_pending",
    "i": "installed",
}
# Packages that carry the driver's version, as the role nvidia_driver pins them (there with the branch's own names); ! takes names out again.
FAMILY = (
    "nvidia-*",
    "libnvidia-*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvoptix1",
    "libegl-nvidia0",
    "libgl1-nvidia-glvnd-glx",
    "libglx-nvidia0",
    "libgles-nvidia1",
    "libgles-nvidia2",
    "libxnvctrl0",
    "firmware-nvidia-gsp",
    "xserver-xorg-video-nvidia",
    "cuda-drivers",
    "!nvidia-container-runtime",
    "!nvidia-container-toolkit",
    "!nvidia-container-toolkit-base",
    "!libnvidia-container1",
    "!libnvidia-container-tools",
    "!libnvidia-container-dev",
    "!nvidia-docker2",
    "!nvidia-cuda-dev",
    "!nvidia-cuda-gdb",
    "!nvidia-cuda-toolkit",
    "!nvidia-cudnn",
    "!nvidia-fs",
    "!nvidia-fs-dkms",
    "!nvidia-gds",
    "!nvidia-prime",
    "!nvidia-common",
    "xserver-xorg-video-nvidia-*",
    "cuda-drivers-*",
)
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
    return {
        "filename": fields.get("filename"),
        "version": fields.get("version"),
        "license": licence,
        "flavour": flavour,
        "signer": fields.get("signer"),
    }


def parse_dpkg(text: str | None) -> list[dict[str, str]]:
    """Lines of ``dpkg -l`` or of ``dpkg-query -W -f '${db:Status-Abbrev}\\t${binary:Package}\\t${Version}\\n'``."""
    packages = []
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) < 2 or not re.match(r"^[uihrp][ncHUFWti]R?$", words[0]):
            continue
        packages.append(
            {
                "name": words[1].split(":")[0],
                "version": words[2] if len(words) > 2 else "",
                "wanted": words[0][0],
                "state": DPKG_STATES[words[0][1]],
                "letters": words[0],
            }
        )
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
    """Does a package fit one of the patterns (those of apt preferences)? A pattern with a leading ``!`` takes names out again."""
    fits = False
    for pattern in patterns:
        if pattern.startswith("!"):
            if fnmatch.fnmatchcase(name, pattern[1:]):
                return False
        elif not fits:
            fits = fnmatch.fnmatchcase(name, pattern)
    return fits


def carries_driver(version: str) -> bool:
    """Is this the version of a driver (580.95.05-1), not one of a helper that shares the vendor's prefix (20220217+1)?"""
    return bool(re.match(r"^\d{3}\.\d+(?:\.\d+)*$", upstream(version)))


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


def held_packages(packages: t.Iterable[dict[str, str]]) -> list[str]:
    """Names that dpkg was told to keep; asking apt for them would open its whole index."""
    return sorted(entry["name"] for entry in packages if entry["wanted"] == "h")


def bootable_kernels(system: System, boot: str = "/boot") -> list[str]:
    """Kernels with an image in the boot folder, newest first."""
    names = [
        name[len("vmlinuz-") :]
        for name in system.listed(system.at(boot))
        if name.startswith("vmlinuz-") and not name.endswith((".old", ".bak"))
    ]
    return sorted(names, key=version_key, reverse=True)


def target_kernel(system: System, boot: str = "/boot") -> tuple[str | None, str | None]:
    """The kernel of the next boot, and why that is not certain. GRUB's entry 0 is the newest."""
    kernels = bootable_kernels(system, boot)
    if not kernels:
        return running_kernel(system), f"no kernel image in {boot}; the running one is assumed"
    text = "\n".join(
        system.read(system.at(path)) or ""
        for path in ["/etc/default/grub", *(f"/etc/default/grub.d/{name}" for name in system.listed(system.at("/etc/default/grub.d")))]
    )
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
        # The variable itself: four bytes of attributes, then 0 or 1.
        value = system.read(system.sys("firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"))
        return {"\x00": "off", "\x01": "on"}.get((value or "")[-1:], "unknown")
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


def verdict(
    facts: dict[str, t.Any],
    failures: list[str],
    bound_to: list[str | None],
    gpus_visible: int | None,
    gpus_on_bus: int,
    init_failures: list[str],
) -> dict[str, t.Any]:
    """``state`` of the driver in one word, with the reason and what to do. The first that fits is the cause."""
    loaded, installed = facts.get("loaded_version"), facts.get("installed_version")

    def say(state: str, reason: str | None, hint: str | None = None) -> dict[str, t.Any]:
        return {"state": state, "reason": reason, "hint": hint}

    nouveau = [name for name in bound_to if name == "nouveau"]
    if nouveau:
        return say(
            "nouveau", f"{len(nouveau)} of {gpus_on_bus} GPUs are bound to nouveau", "blacklist nouveau, rebuild the initramfs, reboot once"
        )
    if mismatch(failures) or (loaded and installed and loaded != installed):
        return say(
            "reboot_required",
            f"module {loaded or 'unknown'} is loaded, {installed or 'another version'} is installed",
            "reboot the host; nothing has to be installed again",
        )
    if loaded is None:
        if installed is None:
            return say(
                "not_installed", "no nvidia module is loaded or built for the running kernel", "install the driver (role nvidia_driver)"
            )
        return say(
            "not_loaded",
            f"module {installed} is built for the running kernel but not loaded",
            "reboot, or read the kernel log for why it was refused",
        )
    if gpus_on_bus and facts.get("loaded_flavour") == "proprietary":
        return say(
            "wrong_flavour", "open kernel module required on Blackwell; found proprietary", "install the -open packages of the same branch"
        )
    if gpus_on_bus and (gpus_visible == 0 or init_failures):
        where = ", ".join(init_failures) or "all"
        return say(
            "adapter_init_failed",
            f"the module is loaded, but could not start the GPUs at {where}",
            "check the module's licence (modinfo -F license nvidia must not say NVIDIA) and, in the BIOS, Above 4G Decoding and Resizable BAR",
        )
    if gpus_visible is None:
        return say("unknown", "; ".join(failures) or "neither NVML nor nvidia-smi answered", "install nvidia-ml-py or nvidia-utils")
    return say("ok", None)


# -- the state that the role acts on ------------------------------------------------------------------------------

PROPRIETARY = re.compile(
    r"^(?:nvidia-dkms|nvidia-kernel-dkms|nvidia-(?:dkms|kernel-source|driver|headless|headless-no-dkms)-\d+(?:-server)?"
    r"|linux-modules-nvidia-\d+(?:-server)?-(?!open)\S+)$"
)


class Question(t.NamedTuple):
    """What the role wants to know about a host."""

    family: list[str]
    hold: list[str] = []
    boot: str = "/boot"
    cmdline: list[str] = []  # arguments that the next boot must have
    cmdline_absent: list[str] = []
    mok_certificate: str = ""
    units: list[str] = []
    gpus: bool = True  # are there NVIDIA GPUs on the bus?


def finding(ident: str, severity: str, what: str, hint: str) -> dict[str, str]:
    return {"id": ident, "severity": severity, "what": what, "hint": hint}


def grub_files(system: System) -> list[str | None]:
    folder = "/etc/default/grub.d"
    paths = ["/etc/default/grub", *(f"{folder}/{name}" for name in system.listed(system.at(folder)) if name.endswith(".cfg"))]
    return [system.read(system.at(path)) for path in paths]


def grub_config_words(system: System, kernel: str | None, boot: str = "/boot") -> list[str] | None:
    """Arguments that grub.cfg gives to a kernel, None when there is no such file or entry."""
    text = system.read(system.at(f"{boot}/grub/grub.cfg"))
    for line in (text or "").splitlines():
        match = re.match(r"^\s*linux\s+\S*vmlinuz-(\S+)\s*(.*)$", line)
        if match and match.group(1) == kernel:
            return cmdline_words(match.group(2))
    return None


def active_units(system: System, units: list[str]) -> list[str]:
    """Those of the units that run or are starting."""
    path = system.which("systemctl")
    if not path or not units:
        return []
    lines = system.run([path, "is-active", *units]).out.split()
    return [unit for unit, state in zip(units, lines) if state in ("active", "activating", "reloading")]


def run_installer(system: System, packages: list[dict[str, str]]) -> bool:
    """Was the driver put there by the .run installer, past the package manager?"""
    log = system.exists(system.at("/var/log/nvidia-installer.log"))
    uninstaller = system.exists(system.at("/usr/bin/nvidia-uninstall"))
    packaged = any(re.match(r"^(?:nvidia-(?:dkms|utils|driver|kernel)|libnvidia-compute|libcuda1)", entry["name"]) for entry in packages)
    return (log or uninstaller) and not packaged


def state(system: System, question: Question) -> dict[str, t.Any]:
    """The driver of a host: what is there, what the next boot would have, and whether a boot is due."""
    facts = module_facts(system)
    packages = installed_packages(system)
    family = [entry for entry in packages if in_family(entry["name"], question.family)]
    held = held_packages(packages)
    target, target_reason = target_kernel(system, question.boot)
    at_target = modinfo(system, target)
    dkms, dkms_reason = dkms_entries(system)
    words = cmdline_words(system.read(system.proc("cmdline")))
    configured = grub_words(grub_files(system))
    boot = secure_boot(system)
    result = {
        **facts,
        "target_kernel": target,
        "target_kernel_reason": target_reason,
        "target_version": at_target["version"],
        "target_flavour": at_target["flavour"],
        "target_signer": at_target["signer"],
        "kernels": bootable_kernels(system, question.boot),
        "dkms": dkms,
        "dkms_reason": dkms_reason,
        "packages": {entry["name"]: entry["version"] for entry in family},
        "package_states": {entry["name"]: entry["state"] for entry in family},
        "held": [name for name in held if in_family(name, question.hold)],
        "not_held": [entry["name"] for entry in packages if in_family(entry["name"], question.hold) and entry["name"] not in held],
        "secure_boot": boot,
        "key_enrolled": key_enrolled(system, question.mok_certificate) if boot == "on" else None,
        "cmdline": words,
        "cmdline_configured": configured,
        "cmdline_grub": grub_config_words(system, target, question.boot),
        "iommu": {"running": iommu_groups(system), "asked_running": iommu_mode(words), "asked_configured": iommu_mode(configured)},
        "run_installer": run_installer(system, packages),
        "active_units": active_units(system, question.units),
        "boot_id": (system.read(system.proc("sys/kernel/random/boot_id")) or "").strip() or None,
    }
    result["reboot_reasons"] = reboot_reasons(result, question)
    result["reboot_required"] = bool(result["reboot_reasons"])
    result["findings"] = driver_findings(result, question, [entry for entry in family if entry["state"] != "installed"])
    return result


def reboot_reasons(facts: dict[str, t.Any], question: Question) -> list[str]:
    """Why the host has to boot, from its state alone: an interrupted run finds the same reasons again."""
    reasons = []
    installed = facts["target_version"]
    if installed and facts["nouveau_loaded"]:
        reasons.append("nouveau is loaded")
    if installed and facts["loaded_version"] != installed and question.gpus:
        reasons.append(f"module {installed} is installed, {facts['loaded_version'] or 'none'} is loaded")
    elif installed and facts["loaded_flavour"] and facts["target_flavour"] and facts["loaded_flavour"] != facts["target_flavour"]:
        reasons.append(f"the {facts['target_flavour']} module is installed, the {facts['loaded_flavour']} one is loaded")
    if facts["kernel"] and facts["target_kernel"] and facts["kernel"] != facts["target_kernel"] and not facts["target_kernel_reason"]:
        reasons.append(f"kernel {facts['target_kernel']} boots by default, {facts['kernel']} is running")
    missing = [word for word in question.cmdline if word not in facts["cmdline"]]
    if missing:
        reasons.append(f"the running command line lacks {' '.join(missing)}")
    left = [word for word in question.cmdline_absent if word in facts["cmdline"]]
    if left:
        reasons.append(f"the running command line still has {' '.join(left)}")
    return reasons


def dkms_problem(facts: dict[str, t.Any]) -> str | None:
    """Why the target kernel has no usable module, None when it has."""
    target = facts["target_kernel"]
    if facts["target_version"] and facts["target_flavour"] == "proprietary":
        return f"the module for kernel {target} is proprietary; Blackwell needs the open one"
    entries = [entry for entry in facts["dkms"] if entry["kernel"] in (target, None)]
    if any(entry["state"] == "installed" and entry["kernel"] == target for entry in entries):
        return None
    if facts["target_version"]:
        return None  # a module that did not come by DKMS (the distribution's signed ones)
    if entries:
        said = sorted({f"{entry['module']}/{entry['version']}: {entry['state']}" for entry in entries})
        return f"dkms says {', '.join(said)} for kernel {target}, not installed"
    return f"no module for kernel {target}"


def driver_findings(facts: dict[str, t.Any], question: Question, half: list[dict[str, str]]) -> list[dict[str, str]]:
    findings = []
    closed = sorted(name for name in facts["packages"] if PROPRIETARY.match(name) and not name.startswith("nvidia-driver"))
    if closed or "proprietary" in (facts["loaded_flavour"], facts["target_flavour"]):
        findings.append(
            finding(
                "driver_wrong_flavour",
                "error",
                "open kernel module required on Blackwell; found proprietary" + (f" ({', '.join(closed)})" if closed else ""),
                "the role nvidia_driver replaces it by the open one; nothing can be served before",
            )
        )
    if facts["run_installer"]:
        findings.append(
            finding(
                "driver_run_installer",
                "error",
                "driver was installed with the .run installer; remove it first",
                "stop the GPU users, run `nvidia-uninstall`, then run this again; package manager and .run installer do not mix",
            )
        )
    if half:
        findings.append(
            finding(
                "driver_packages_not_configured",
                "error",
                "driver packages are not configured: "
                + ", ".join(f"{entry['name']} ({entry['letters']}, {entry['state']})" for entry in half),
                "the role nvidia_driver lets dpkg finish them once; read the DKMS build log when that fails",
            )
        )
    if facts["packages"] and facts["not_held"]:
        findings.append(
            finding(
                "driver_not_held",
                "warning",
                "not held, an upgrade may move them: " + ", ".join(sorted(facts["not_held"])),
                "run the role nvidia_driver; it holds the whole set",
            )
        )
    if facts["packages"]:
        problem = dkms_problem(facts)
        if problem:
            findings.append(
                finding(
                    "driver_dkms",
                    "error",
                    problem,
                    f"install linux-headers-{facts['target_kernel']} and run `dkms autoinstall -k {facts['target_kernel']}`; "
                    "do not reboot before dkms says installed",
                )
            )
    if facts["secure_boot"] == "unknown":
        findings.append(
            finding(
                "secure_boot_unknown",
                "warning",
                "whether Secure Boot is on cannot be told",
                "install mokutil, or look into the firmware's settings",
            )
        )
    if facts["secure_boot"] == "on" and facts["key_enrolled"] is not True:
        findings.append(
            finding(
                "secure_boot_key",
                "error" if question.mok_certificate or not facts["loaded_version"] else "warning",
                "Secure Boot is on and no enrolled key; enrol at console or disable",
                mok_steps(question.mok_certificate),
            )
        )
    return findings


def mok_steps(certificate: str) -> str:
    """What an operator does to have the module accepted under Secure Boot."""
    path = certificate or "/var/lib/dsv4/mok/MOK.der"
    make = (
        ""
        if certificate
        else (
            f"make a key: `mkdir -p -m 0700 {os.path.dirname(path)} && openssl req -new -x509 -newkey rsa:2048 -nodes -days 3650 "
            f"-subj '/CN=dsv4 module signing/' -outform DER -keyout {os.path.dirname(path)}/MOK.priv -out {path}`; "
            f"set nvidia_driver_mok_certificate to {path} and nvidia_driver_mok_key to {os.path.dirname(path)}/MOK.priv; "
        )
    )
    enrol = f"run `mokutil --import {path}` and give a one-time password; reboot with a console attached and choose Enroll MOK"
    return f"{make}{enrol}; or switch Secure Boot off in the firmware"
