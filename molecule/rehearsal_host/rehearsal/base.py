# SPDX-License-Identifier: GPL-3.0-or-later
"""The Debian root that every rehearsal host starts from: built once by debootstrap, then only read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from .common import Problem, cache_root, cached_folder, die_with_parent, digest, say, write

SUITE = "trixie"
RECIPE = 3  # raise it when finish() or the way debootstrap is called changes
PACKAGES = (
    # what any server has, and what Ansible's modules for apt need on the target
    "systemd", "systemd-sysv", "dbus", "udev", "kmod", "procps", "iproute2", "nftables", "openssh-server", "sudo", "less",
    "python3", "python3-apt", "python3-debian", "python3-venv", "ca-certificates", "curl", "gnupg",
    # what a GPU host has besides
    "numactl", "libnuma1", "pciutils", "g++",
)
MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer", "e2scrub_all.timer")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def key() -> str:
    return f"{SUITE}-{digest(SUITE, RECIPE, PACKAGES, MASKED)}"


def folder() -> Path:
    return cache_root() / "base" / key()


def ensure(in_use: set[str]) -> Path:
    return cached_folder(cache_root() / "base", key(), f"Debian {SUITE} base (once)", _build, in_use=in_use)


def mirror() -> str | None:
    """The Debian mirror of this machine, if it is a Debian machine; otherwise debootstrap's own default is used."""
    if os.environ.get("REHEARSAL_MIRROR"):
        return os.environ["REHEARSAL_MIRROR"]
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for path in sources:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        for line in path.read_text(errors="replace").splitlines():
            found = re.match(r"(?:URIs:|deb\s+(?:\[[^]]*\]\s+)?)\s*(https?://\S+?/debian)/?(?:\s|$)", line.strip())
            if found:
                return found.group(1)
    return None


def apt_settings() -> str:
    """This machine's proxy, CA and date-check settings for apt, in apt.conf form."""
    wanted = ("Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::https::CaInfo", "Acquire::Check-Valid-Until", "Acquire::Check-Date")
    try:
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
    lines = [line for line in dump.splitlines() if line.split(" ", 1)[0] in wanted and not line.endswith(' "";')]
    return "".join(f"{line}\n" for line in lines)


def _build(work: Path) -> None:
    log = cache_root() / "logs" / "debootstrap.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # In a mount and a process namespace of its own: however it ends, no process goes on and nothing stays mounted below the folder.
    argv = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    argv += ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", "--components=main"]
    if KEYRING.is_file():
        argv.append(f"--keyring={KEYRING}")
    argv += [SUITE, str(work)]
    if mirror():
        argv.append(mirror())
    counts = {"Retrieving": 0, "Unpacking": 0, "Configuring": 0}
    shown = time.monotonic()
    with log.open("w") as out, subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent(signal.SIGKILL)) as process:
        for line in process.stdout:
            out.write(line)
            for verb in counts:
                counts[verb] += line.startswith(f"I: {verb}")
            if time.monotonic() - shown > 15:
                shown = time.monotonic()
                say("  debootstrap: " + ", ".join(f"{verb.lower()} {count}" for verb, count in counts.items() if count))
    if process.returncode:
        last = log.read_text().strip().splitlines()[-1:]
        raise Problem(f"debootstrap ended with {process.returncode} (log: {log}): {' '.join(last)}")
    _finish(work)


def _finish(root: Path) -> None:
    """Remove what must differ between hosts and what only costs room; make root's SSH login possible by key alone."""
    for pattern in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*_*", "etc/ssh/ssh_host_*", "var/log/*.log"):
        for path in root.glob(pattern):
            path.unlink()
    write(root / "etc/machine-id", "", 0o444)
    (root / "etc/hostname").unlink(missing_ok=True)
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    write(root / "etc/resolv.conf", "")
    for unit in MASKED:
        link = root / "etc/systemd/system" / unit
        link.symlink_to("/dev/null")
    write(root / "etc/ssh/sshd_config.d/10-rehearsal.conf", "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\n")
    write(root / "etc/locale.conf", "LANG=C.UTF-8\n")
    settings = apt_settings()
    if settings:
        write(root / "etc/apt/apt.conf.d/90machine", settings)
    write(root / "etc/apt/apt.conf.d/80rehearsal", 'APT::Install-Recommends "false";\nAcquire::Languages "none";\n')
