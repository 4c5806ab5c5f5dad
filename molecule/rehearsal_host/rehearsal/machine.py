# SPDX-License-Identifier: GPL-3.0-or-later
"""One rehearsal host: its overlay, its supervisor process, its boot, its end.

The supervisor is a detached process of ours. It mounts the overlay in a mount namespace of its own (so nothing stays mounted
when it ends), runs systemd-nspawn and starts it again when the guest asks for a reboot. It is known to everybody on the machine by
a holder file under /run, which names its clone, its cache, its processes and its start.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from . import base
from .common import CLONE, HERE, Problem, ca_bundle, cache_root, die_with_parent, locked, run, same_tree, say, step, tree_digest, write
from .wheelhouse import engine_lock

RUN = Path("/run/blackwell-dsv4")
REBOOT = 133  # exit code of systemd-nspawn when the guest asked for a reboot
NVML = HERE / "nvml"  # the stand-in kernel with its commands, and the description of the GPUs
KERNEL_COMMANDS = ("update-initramfs", "update-grub", "lspci", "setpci", "mokutil", "modprobe", "modinfo", "dmesg")
GUEST_FILES = {
    NVML / "kernel": "usr/lib/rehearsal/kernel",
    NVML / "gpus.json": "etc/rehearsal/gpus.json",
    NVML / "rehearsal-kernel.service": "etc/systemd/system/rehearsal-kernel.service",
}
SHARES = ("wheels", "apt", "model")
CLONE_NEWNS = 0x00020000


class Process:
    """A process by pid and start time: a pid alone may be somebody else's by now."""

    def __init__(self, pid: int, start: int | None = None):
        self.pid = pid
        self.start = self._start() if start is None else start

    def _start(self) -> int:
        try:
            return int(Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
        except (OSError, IndexError):
            return -1

    def alive(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            return False
        return state not in "ZX" and self._start() == self.start

    def signal(self, number: int) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


def bases_in_use() -> set[str]:
    """The bases below running hosts, whoever holds them."""
    bases = set()
    for path in RUN.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            bases.add(json.loads(path.read_text())["base"])
    return bases


class Machine:
    def __init__(self) -> None:
        self.name = os.environ.get("REHEARSAL_NAME") or "rehearsal"
        self.port = int(os.environ.get("REHEARSAL_SSH_PORT") or 2222)
        if not self.name.isascii() or not self.name.replace("-", "").isalnum():
            raise Problem(f"REHEARSAL_NAME={self.name}: use letters, digits and dashes")
        self.home = cache_root() / "hosts" / self.name
        self.keys = cache_root() / "ssh"
        self.ssh_config = self.keys / f"{self.name}.config"
        self.holder_file = RUN / f"{self.name}.json"
        self.lock = RUN / f"{self.name}.lock"

    # -- who holds it ------------------------------------------------------------------------------------------------

    def holder(self) -> dict | None:
        """The holder file's content when its supervisor or its nspawn still runs."""
        try:
            held = json.loads(self.holder_file.read_text())
        except (OSError, ValueError):
            return None
        return held if any(process.alive() for process in self._processes(held)) else None

    @staticmethod
    def _processes(held: dict) -> list[Process]:
        return [Process(**held[what]) for what in ("supervisor", "nspawn") if held.get(what)]

    @staticmethod
    def describe(held: dict) -> str:
        return f"clone {held['clone']}, supervisor pid {held['supervisor']['pid']}, port {held['port']}, since {held['since']}"

    # -- up ----------------------------------------------------------------------------------------------------------

    def up(self, shares: dict[str, Path], take_over: bool = False, fresh: bool = False) -> bool:
        """Bring the host up; returns whether it had to be booted. The shares' folders are what the guest sees under /srv/rehearsal."""
        with locked(self.lock, f"the host {self.name}"):
            held = self.holder()
            self._make_key()
            if held and self._keep(held, take_over, fresh):
                self._share(shares)
                self._wait_for_ssh()
                return False
            self._remove(held)
            self._prepare(shares)
            self._boot()
        return True

    def _keep(self, held: dict, take_over: bool, fresh: bool) -> bool:
        """Whether the running host is ours to go on with; a Problem when it is somebody else's."""
        if held["clone"] == str(CLONE) and held["cache"] == str(cache_root()):
            if fresh:
                say("--fresh: the running host is thrown away")
                return False
            if held["base"] != base.key():
                say("the base has changed since this host was booted: booting a new one")
                return False
            if held["guest"] != tree_digest(*GUEST_FILES):
                say("note: the stand-in kernel or its GPUs have changed since this host was booted (`host.py up --fresh` boots a new one)")
            return True
        if not Path(held["clone"]).is_dir():
            say(f"taking over a host whose clone is gone ({self.describe(held)})")
        elif take_over:
            say(f"taking over the host of another clone ({self.describe(held)})")
        else:
            raise Problem(
                f"another clone holds the host {self.name} ({self.describe(held)}): run `make rehearse-down` there, or `host.py up --take-over` here")
        return False

    def _prepare(self, shares: dict[str, Path]) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                raise Problem(f"port {self.port} on 127.0.0.1 is in use by another program: set REHEARSAL_SSH_PORT to a free one") from None
        for part in ("upper", "work", "root", "share"):
            (self.home / part).mkdir(parents=True, exist_ok=True)
        self._share(shares)
        self._write_guest()

    def _share(self, shares: dict[str, Path]) -> None:
        for share in SHARES:
            same_tree(shares[share], self.home / "share" / share)
        write(self.home / "engine.txt", engine_lock(shares["wheels"]))

    def _make_key(self) -> None:
        self.keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("id_ed25519", "host_ed25519"):
            if not (self.keys / name).is_file():
                run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"rehearsal-{name}", "-f", str(self.keys / name)])
        public = " ".join((self.keys / "host_ed25519.pub").read_text().split()[:2])
        known = self.keys / "known_hosts"
        lines = {f"[127.0.0.1]:{self.port} {public}"}
        lines.update(known.read_text().splitlines() if known.is_file() else ())
        write(known, "".join(f"{line}\n" for line in sorted(lines)))
        settings = {
            "HostName": "127.0.0.1", "Port": self.port, "User": "root", "IdentityFile": self.keys / "id_ed25519", "IdentitiesOnly": "yes",
            "UserKnownHostsFile": known, "GlobalKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "yes", "BatchMode": "yes", "ConnectTimeout": 5,
        }
        write(self.ssh_config, f"Host {self.name}\n" + "".join(f"    {name} {value}\n" for name, value in settings.items()))

    def _put(self, name: str, content: str | bytes, mode: int = 0o644) -> None:
        """A file in the overlay's upper folder; its parent folders keep the mode that the base gives them."""
        self._parents(name)
        write(self.home / "upper" / name, content, mode)

    def _parents(self, name: str) -> None:
        for parent in reversed(Path(name).parents[:-1]):
            folder, lower = self.home / "upper" / parent, base.folder() / parent
            if not folder.is_dir():
                folder.mkdir(mode=0o755)
                if lower.is_dir():
                    shutil.copystat(lower, folder)

    def _link(self, name: str, target: str) -> None:
        self._parents(name)
        link = self.home / "upper" / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    def _write_guest(self) -> None:
        for source, name in GUEST_FILES.items():
            self._put(name, source.read_bytes(), 0o755 if source.stat().st_mode & 0o100 else 0o644)
        self._link("etc/systemd/system/sysinit.target.wants/rehearsal-kernel.service", "/etc/systemd/system/rehearsal-kernel.service")
        for command in KERNEL_COMMANDS:  # before the real ones in PATH; dkms comes with its package
            self._link(f"usr/local/sbin/{command}", "/usr/lib/rehearsal/kernel")
        self._put("etc/hostname", f"{self.name}\n")
        self._put("etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n::1 localhost ip6-localhost\n")
        self._put("etc/ssh/sshd_config.d/20-port.conf", f"ListenAddress 127.0.0.1:{self.port}\nHostKey /etc/ssh/ssh_host_ed25519_key\n")
        self._put("etc/ssh/ssh_host_ed25519_key", (self.keys / "host_ed25519").read_bytes(), 0o600)
        self._put("root/.ssh/authorized_keys", (self.keys / "id_ed25519.pub").read_bytes(), 0o600)
        (self.home / "upper/root/.ssh").chmod(0o700)
        self._parents("var/log/journal/x")
        bundle = ca_bundle()
        if bundle:
            self._put("srv/rehearsal/ca.crt", bundle.read_bytes())
        for share in SHARES:
            self._parents(f"srv/rehearsal/{share}/x")

    def _boot(self) -> None:
        with step(f"boot {self.name}"):
            (self.home / "supervisor.log").unlink(missing_ok=True)
            with (self.home / "supervisor.log").open("w") as log:
                subprocess.Popen(
                    [sys.executable, str(HERE / "host.py"), "_supervise"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, cwd="/")
            self._wait_for_ssh()

    def _wait_for_ssh(self, seconds: float = 120) -> None:
        """Until the guest's systemd says that it has finished starting."""
        end = time.monotonic() + seconds
        seen_alive = False
        while True:
            alive = self.holder() is not None
            if seen_alive and not alive:
                raise Problem(f"the host ended while booting, see {self.home}/supervisor.log: {self._last_words()}")
            seen_alive = seen_alive or alive
            answer = self.ssh(["systemctl", "is-system-running", "--wait"], capture_output=True, text=True, timeout=60)
            state = (answer.stdout or "").strip()
            if state in ("running", "degraded"):
                break
            if time.monotonic() > end:
                raise Problem(f"the host did not answer by SSH on port {self.port} within {seconds:.0f} s "
                              f"({state or (answer.stderr or '').strip()[-200:]}); see `host.py logs`, or `host.py up --fresh`")
            time.sleep(0.3)
        if state == "degraded":
            failed = self.ssh(["systemctl", "list-units", "--failed", "--plain", "--no-legend"], capture_output=True, text=True, timeout=60)
            say("the host is degraded, failed units: " + ", ".join(line.split()[0] for line in failed.stdout.splitlines()))

    def _last_words(self) -> str:
        try:
            return " | ".join((self.home / "supervisor.log").read_text().strip().splitlines()[-3:])
        except OSError:
            return "no log"

    # -- supervisor --------------------------------------------------------------------------------------------------

    def supervise(self) -> int:
        """Runs as the detached process until the guest powers off or somebody ends us."""
        held = {
            "name": self.name, "clone": str(CLONE), "cache": str(cache_root()), "port": self.port, "base": base.key(), "guest": tree_digest(*GUEST_FILES),
            "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "supervisor": vars(Process(os.getpid())), "nspawn": None,
        }
        write(self.holder_file, json.dumps(held))
        self._join_cgroup()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare of the mount namespace")
        run(["mount", "--make-rprivate", "/"])
        root = self._mount()
        process: subprocess.Popen | None = None
        ending = False

        def end(_number, _frame) -> None:
            nonlocal ending
            ending = True
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)  # nspawn passes it on as an orderly power-off

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        while not ending:
            self._log(f"booting {root}")
            process = subprocess.Popen(
                self._nspawn(root), stdin=subprocess.DEVNULL, cwd="/", env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                preexec_fn=die_with_parent(signal.SIGTERM))
            held["nspawn"] = vars(Process(process.pid))
            write(self.holder_file, json.dumps(held))
            code = process.wait()
            self._log(f"systemd-nspawn ended with {code}")
            if code != REBOOT:
                break
        self.holder_file.unlink(missing_ok=True)
        return 0

    @staticmethod
    def _log(text: str) -> None:
        print(f"{datetime.datetime.now().isoformat(timespec='seconds')} {text}", flush=True)

    def _cgroups(self) -> list[Path]:
        """Our own group in each hierarchy that systemd-nspawn uses: with --keep-unit two hosts would share one otherwise."""
        tops = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup")]
        return [top / f"rehearsal-{self.name}" for top in tops if (top / "cgroup.procs").is_file()]

    def _join_cgroup(self) -> None:
        for group in self._cgroups():
            group.mkdir(exist_ok=True)
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def _mount(self) -> Path:
        root = self.home / "root"
        options = f"lowerdir={base.folder()},upperdir={self.home}/upper,workdir={self.home}/work"
        done = subprocess.run(["mount", "-t", "overlay", "rehearsal", "-o", options, str(root)], check=False)
        if done.returncode == 0:
            return root
        self._log("no overlay on this file system: copying the base")
        run(["cp", "-a", "--reflink=auto", f"{base.folder()}/.", str(root)])
        run(["cp", "-a", f"{self.home}/upper/.", str(root)])
        return root

    def _nspawn(self, root: Path) -> list[str]:
        argv = [
            "systemd-nspawn", "--quiet", f"--directory={root}", f"--machine={self.name}", "--boot", "--register=no", "--keep-unit",
            "--console=pipe", "--link-journal=no", "--timezone=off", "--resolv-conf=copy-host",
            "--rlimit=RLIMIT_MEMLOCK=infinity", "--rlimit=RLIMIT_NOFILE=1048576",
        ]
        return argv + [f"--bind-ro={self.home}/share/{share}:/srv/rehearsal/{share}" for share in SHARES]

    # -- down --------------------------------------------------------------------------------------------------------

    def down(self, take_over: bool = False) -> bool:
        """Stop and remove the host; returns whether one was running."""
        with locked(self.lock, f"the host {self.name}"):
            held = self.holder()
            if held and held["clone"] != str(CLONE) and Path(held["clone"]).is_dir() and not take_over:
                raise Problem(f"another clone holds the host {self.name} ({self.describe(held)}): run `make rehearse-down` there, "
                              "or `host.py down --take-over` here")
            self._remove(held)
        return held is not None

    def _remove(self, held: dict | None) -> None:
        if held:
            with step(f"stop {self.name} (supervisor pid {held['supervisor']['pid']})"):
                processes = self._processes(held)
                processes[0].signal(signal.SIGTERM)
                if not all(process.wait(30) for process in processes):
                    say("it did not power off within 30 s: killing it")
                    for process in reversed(processes):
                        process.signal(signal.SIGKILL)
                    for process in processes:
                        process.wait(10)
        self.holder_file.unlink(missing_ok=True)
        for group in self._cgroups():
            self._empty_cgroup(group)
        homes = {self.home, Path(held["cache"]) / "hosts" / self.name if held else self.home}
        for home in homes:
            if os.path.ismount(home / "root"):
                run(["umount", str(home / "root")])
            for part in ("upper", "work", "root", "share"):
                shutil.rmtree(home / part, ignore_errors=True)

    @staticmethod
    def _empty_cgroup(group: Path) -> None:
        """Remove the group; what still runs in it was started by the guest and lost its systemd, so it ends with it."""
        if not group.is_dir():
            return
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if (group / "cgroup.kill").is_file() and "populated 1" in (group / "cgroup.events").read_text():
                (group / "cgroup.kill").write_text("1")
            try:
                for folder, _names, _files in os.walk(group, topdown=False):
                    os.rmdir(folder)
                return
            except OSError:
                time.sleep(0.1)

    # -- talking to it -----------------------------------------------------------------------------------------------

    def ssh_argv(self) -> list[str]:
        return ["ssh", "-F", str(self.ssh_config), self.name]

    def ssh(self, argv: list[str], **options) -> subprocess.CompletedProcess:
        try:
            return subprocess.run([*self.ssh_argv(), *argv], check=False, **options)
        except subprocess.TimeoutExpired as late:
            return subprocess.CompletedProcess(late.cmd, 255, "", "no answer in time")

    def status(self) -> dict:
        held = self.holder()
        state = {"name": self.name, "running": held is not None, "holder": held, "ssh": " ".join(self.ssh_argv()), "system": None, "failed_units": []}
        if held and held["port"] == self.port:
            answer = self.ssh(["systemctl", "is-system-running;", "systemctl", "list-units", "--failed", "--plain", "--no-legend"],
                              capture_output=True, text=True, timeout=20)
            lines = (answer.stdout or "").splitlines()
            state["system"] = lines[0] if lines else "unreachable"
            state["failed_units"] = [line.split()[0] for line in lines[1:] if line.strip()]
        return state
