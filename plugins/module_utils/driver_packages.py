# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The packages of the driver as one set: chosen in one version from one origin, installed in one go, held together.

`decide` is pure: from what is installed, held and offered it makes the plan. `Apt` asks and changes the host.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import tempfile
import time
import typing as t

from . import driver
from .gpu_info import unit_of
from .host_system import System

LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock")
BROKEN = ("half_installed", "unpacked", "half_configured", "triggers_awaited", "triggers_pending")


class Problem(Exception):
    """Why the packages cannot be brought to what is wanted; ``ident`` is stable, ``hint`` says what to do."""

    def __init__(self, ident: str, what: str, hint: str = "", **more: t.Any):
        super().__init__(what)
        self.ident, self.what, self.hint, self.more = ident, what, hint, more


class Wanted(t.NamedTuple):
    """What the role asks for."""

    names: list[str]  # packages that must be there
    family: list[str]  # patterns of the packages that carry the driver's version
    version: str = ""  # version of the driver; empty: keep the installed one, else the newest of the branch
    branch: int | None = None
    origin: str = ""  # Origin of the repository that may provide the family; empty: any
    exact: dict[str, str] = {}  # exact package versions, for a rollback
    absent: list[str] = []  # packages that must not be there
    hold: list[str] = []  # patterns of the installed packages to hold
    keep_holds: list[str] | None = None  # exact list of holds, for a rollback
    scope: list[str] = []  # patterns of all packages that this set may touch


class Plan(t.NamedTuple):
    version: str | None
    install: dict[str, str]  # name -> exact version
    remove: list[str]
    unhold: list[str]
    hold: list[str]
    broken: list[str]

    @property
    def changed(self) -> bool:
        return bool(self.install or self.remove or self.hold or self.unhold or self.broken)


def broken_packages(installed: t.Iterable[dict[str, str]], scope: list[str]) -> list[dict[str, str]]:
    """Packages of the set that dpkg left half way, by both letters of their state."""
    return [
        entry
        for entry in installed
        if (entry["state"] in BROKEN or entry["letters"].endswith("R")) and driver.in_family(entry["name"], scope)
    ]


def offered(policy: dict[str, dict[str, t.Any]], origins: dict[str, str], name: str, origin: str) -> list[str]:
    """Versions of a package that a repository of this origin offers, newest first."""
    entry = policy.get(name)
    if not entry:
        return []
    versions = []
    for version, sources in entry["versions"].items():
        remote = [source for source in sources if not source.startswith("/var/lib/dpkg/status")]
        if remote and (not origin or any(origins.get(source) == origin for source in remote)):
            versions.append(version)
    return sorted(versions, key=driver.version_key, reverse=True)


def choose_version(wanted: Wanted, installed: dict[str, str], policy: dict[str, dict[str, t.Any]], origins: dict[str, str]) -> str | None:
    """The driver's version: the pinned one, else the installed one of the branch, else the newest offered of the branch."""
    if wanted.version:
        return wanted.version
    if wanted.exact:
        return next((driver.upstream(version) for name, version in wanted.exact.items() if driver.in_family(name, wanted.family)), None)
    for name in wanted.names:
        if name in installed and driver.in_family(name, wanted.family):
            version = driver.upstream(installed[name])
            if wanted.branch is None or driver.branch(version) == wanted.branch:
                return version
    for name in wanted.names:
        if driver.in_family(name, wanted.family):
            for version in offered(policy, origins, name, wanted.origin):
                if wanted.branch is None or driver.branch(driver.upstream(version)) == wanted.branch:
                    return driver.upstream(version)
    return None


def satisfied(wanted: Wanted, packages: list[dict[str, str]]) -> bool:
    """Is everything installed as wanted, so that apt's index need not be opened? Holds are not looked at."""
    present = {entry["name"]: entry["version"] for entry in packages if entry["state"] in ("installed", *BROKEN)}
    if wanted.exact:
        return all(present.get(name) == version for name, version in wanted.exact.items())
    version = choose_version(wanted, present, {}, {})
    for name in wanted.names:
        if name not in present or (driver.in_family(name, wanted.family) and driver.upstream(present[name]) != version):
            return False
    return all(
        driver.upstream(have) == version and not (driver.PROPRIETARY.match(name) and any("open" in other for other in wanted.names))
        for name, have in present.items()
        if driver.in_family(name, wanted.family) and driver.carries_driver(have) and name not in wanted.names
    )


def decide(
    wanted: Wanted,
    packages: list[dict[str, str]],
    held: list[str],
    policy: dict[str, dict[str, t.Any]],
    origins: dict[str, str],
    complete: bool = True,
    names: t.Callable[[], list[str]] = list,
) -> Plan:
    """What has to be done. Raises Problem when something wanted is not offered.

    ``complete`` is False when the package index cannot be trusted to be whole (check mode on a bare host): a package
    outside of the family may then be planned without a version. ``names`` gives all package names, for the message.
    """
    present = {entry["name"]: entry["version"] for entry in packages if entry["state"] in ("installed", *BROKEN)}
    version = choose_version(wanted, present, policy, origins)
    install: dict[str, str] = {}
    remove: list[str] = []
    if wanted.exact:
        install = {name: exact for name, exact in wanted.exact.items() if present.get(name) != exact}
        for name, exact in install.items():
            if exact not in (policy.get(name) or {"versions": {}})["versions"] and complete:
                raise Problem(
                    "package_version_not_offered",
                    f"{name}={exact} is not offered any more",
                    "add the repository that has it, or copy the package into the local repository",
                )
        remove = [name for name in present if driver.in_family(name, wanted.scope) and name not in wanted.exact]
    else:
        for name in wanted.names:
            family = driver.in_family(name, wanted.family)
            if name in present and (not family or driver.upstream(present[name]) == version):
                continue
            fitting = [
                v for v in offered(policy, origins, name, wanted.origin if family else "") if not family or driver.upstream(v) == version
            ]
            if fitting:
                install[name] = fitting[0]
            elif not family and not complete:
                install[name] = ""
            else:
                raise not_offered(name, version if family else None, wanted, policy, origins, names())
        # The rest of the installed set moves along, so that no sibling keeps another version.
        for name, have in present.items():
            if (
                name in install
                or name in wanted.names
                or version is None
                or not (driver.in_family(name, wanted.family) and driver.carries_driver(have))
            ):
                continue
            if driver.PROPRIETARY.match(name) and any("open" in other for other in wanted.names):
                remove.append(name)  # it conflicts with the open flavour of the same branch
                continue
            if driver.upstream(have) == version:
                continue
            fitting = [v for v in offered(policy, origins, name, wanted.origin) if driver.upstream(v) == version]
            if fitting:
                install[name] = fitting[0]
            else:
                remove.append(name)
    remove += [name for name in wanted.absent if name in present and name not in remove]
    after = (set(present) | set(install)) - set(remove)
    if wanted.keep_holds is not None:
        goal = {name for name in wanted.keep_holds if name in after}
        ours = {name for name in held if driver.in_family(name, wanted.scope)}
    else:
        goal = {name for name in after if driver.in_family(name, wanted.hold)}
        ours = set()
    unhold = sorted((ours - goal) | {name for name in held if name in install or name in remove})
    hold = sorted(name for name in goal if name not in held or name in unhold)
    broken = [entry["name"] for entry in broken_packages(packages, wanted.scope or wanted.family)]
    return Plan(version, install, sorted(remove), unhold, hold, broken)


def not_offered(
    name: str, version: str | None, wanted: Wanted, policy: dict[str, dict[str, t.Any]], origins: dict[str, str], names: list[str]
) -> Problem:
    exact = f" in version {version}" if version else ""
    versions = offered(policy, origins, name, "")
    if versions:
        return Problem(
            "package_not_offered",
            f"package {name} is not offered{exact} by configured repositories; offered: {', '.join(versions)}",
            "pin one of these versions (nvidia_driver_version) or configure the repository that has the wanted one",
            offered=versions,
        )
    stem = re.sub(r"-?\d.*$", "", name)
    similar = sorted(other for other in names if other.startswith(stem))[:12]
    return Problem(
        "package_not_offered",
        f"package {name} not offered by configured repositories; offered: {', '.join(similar) or 'nothing of that name'}",
        "mend nvidia_driver_branch or nvidia_driver_packages, or configure the repository that has it",
        offered=similar,
    )


def explain_failure(text: str, policy: dict[str, dict[str, t.Any]]) -> Problem:
    """apt's own failure in a sentence. Forty lines of dependencies become the origins that were mixed."""
    if re.search(r"held broken packages|unmet dependencies|is not going to be installed", text):
        wanted = sorted(set(re.findall(r"(?m)^\s*(\S+) : Depends:", text)) | set(re.findall(r"Depends: (\S+)", text)))
        seen: list[str] = []
        for name in wanted:
            for version, sources in (policy.get(name) or {"versions": {}})["versions"].items():
                for source in sources:
                    if not source.startswith("/var/lib/dpkg/status"):
                        seen.append(f"{name} {version} from {source}")
        hint = "one origin must give the whole set: keep one of these repositories for the driver (nvidia_driver_repo_origin, nvidia_driver_other_origins)"
        return Problem(
            "packages_conflict",
            "apt cannot combine the driver's packages; offered are " + ("; ".join(dict.fromkeys(seen)) or "no candidates"),
            hint,
            apt=text[-2000:],
        )
    if re.search(r"Could not get lock|lock-frontend", text):
        return Problem("apt_locked", "another process holds apt's lock", "wait for it to end and run again", apt=text[-2000:])
    match = re.search(r"installed (\S+) package post-installation script subprocess returned error exit status (\d+)", text)
    if match:
        return Problem(
            "driver_packages_not_configured",
            f"the installation script of {match.group(1)} ended with {match.group(2)}",
            "",
            apt=text[-2000:],
        )
    last = [line for line in text.strip().splitlines() if line.startswith("E:")] or text.strip().splitlines()[-1:]
    return Problem("apt_failed", "; ".join(last) or "apt failed without a word", "", apt=text[-2000:])


def half_way(
    packages: list[dict[str, str]], dkms: list[dict[str, t.Any]], loaded: str | None, make_log: str | None, kernels: list[str]
) -> Problem:
    """Packages that stayed half way: names, the kernel that failed, and whether the host still works."""
    built = {entry["kernel"] for entry in dkms if entry["state"] == "installed"}
    failed = [kernel for kernel in kernels if kernel not in built]
    what = "driver packages are not configured: " + ", ".join(
        f"{entry['name']} ({entry['letters']}, {entry['state']})" for entry in packages
    )
    if failed:
        what += f"; no module for kernel {', '.join(failed)}"
    if loaded:
        what += f"; module {loaded} is loaded and goes on working until the next boot"
    return Problem(
        "driver_packages_not_configured",
        what,
        f"do not reboot; read {make_log or '/var/lib/dkms/nvidia/<version>/build/make.log'}, then set nvidia_driver_version to a driver that builds for "
        "that kernel and run again; or go back with the role's rollback.yml",
        packages=[entry["name"] for entry in packages],
        kernels=failed,
        make_log=make_log,
    )


# -- asking and changing the host ---------------------------------------------------------------------------------


def lock_holder(path: str) -> int | None:
    """Pid of the process that holds a lock file, None when it is free. Needs no lock itself."""
    try:
        with open(path, "rb") as lock:
            question = struct.pack("hh4xqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = struct.unpack("hh4xqqi4x", fcntl.fcntl(lock, fcntl.F_GETLK, question))
    except OSError:
        return None
    return answer[4] if answer[0] != fcntl.F_UNLCK else None


def holder_words(held: dict[str, t.Any]) -> str:
    unit = f", {held['unit']}" if held["unit"] else ""
    return f"{held['path']} is held by process {held['pid']} ({held['command']}{unit})"


class Apt:
    """apt and dpkg of a host. ``extra`` is a source that may not be configured yet; it is read into a folder of its own."""

    def __init__(self, system: System, lock_timeout: float = 600, extra: str = "", key: str = "", apt_timeout: float = 3600):
        self.system = system
        self.lock_timeout = lock_timeout
        self.extra, self.key = extra, key
        self.apt_timeout = apt_timeout
        self.options: list[str] = []
        self.folder: str | None = None

    # reading

    def packages(self) -> list[dict[str, str]]:
        return driver.installed_packages(self.system)

    def held(self) -> list[str]:
        return driver.held_packages(self.packages())

    def policy(self, names: t.Iterable[str]) -> dict[str, dict[str, t.Any]]:
        wanted = sorted(set(names))
        if not wanted:
            return {}
        return driver.parse_policy(self.system.run(["apt-cache", *self.options, "policy", *wanted], timeout=120).out)

    def origins(self) -> dict[str, str]:
        return driver.parse_policy_releases(self.system.run(["apt-cache", *self.options, "policy"], timeout=120).out)

    def names(self) -> list[str]:
        return self.system.run(["apt-cache", *self.options, "pkgnames", "nvidia"], timeout=120).out.split()

    def look_ahead(self) -> str | None:
        """Read ``extra`` into a folder of our own beside the host's index; nothing on the host changes. Returns why not."""
        if not self.extra:
            return "no repository is given"
        self.folder = tempfile.mkdtemp(prefix="driver-packages-")
        lists, parts = os.path.join(self.folder, "lists"), os.path.join(self.folder, "parts")
        os.makedirs(os.path.join(lists, "partial"))
        os.makedirs(os.path.join(self.folder, "cache", "archives", "partial"))
        os.makedirs(parts)
        for name in self.system.listed("/var/lib/apt/lists"):
            if os.path.isfile(f"/var/lib/apt/lists/{name}") and name != "lock":
                os.symlink(f"/var/lib/apt/lists/{name}", os.path.join(lists, name))
        text = self.extra
        if self.key:
            key = os.path.join(self.folder, "key.asc")
            with open(key, "w", encoding="utf-8") as out:
                out.write(self.key)
            text = re.sub(r"(?m)^Signed-By:.*$", f"Signed-By: {key}", text)
        for folder in (self.folder, lists, parts):
            os.chmod(folder, 0o755)
        with open(os.path.join(parts, "ours.sources"), "w", encoding="utf-8") as out:
            out.write(text)
        for name in self.system.listed("/etc/apt/sources.list.d"):
            if name.endswith((".list", ".sources")):
                os.symlink(f"/etc/apt/sources.list.d/{name}", os.path.join(parts, "host-" + name))
        own = [
            "-o",
            f"Dir::State::Lists={lists}",
            "-o",
            f"Dir::Cache={self.folder}/cache",
            "-o",
            "Dir::Etc::Preferences=/dev/null",
            "-o",
            f"Dir::Etc::PreferencesParts={self.folder}/none",
        ]
        only = os.path.join(self.folder, "only")
        os.makedirs(only)
        shutil.copy(os.path.join(parts, "ours.sources"), only)
        answer = self.system.run(
            [
                "apt-get",
                *own,
                "-o",
                f"Dir::Etc::SourceParts={only}",
                "-o",
                "Dir::Etc::SourceList=/dev/null",
                "-o",
                "APT::Get::List-Cleanup=false",
                "-o",
                "APT::Sandbox::User=root",
                "-qq",
                "update",
            ],
            timeout=300,
        )
        self.options = [*own, "-o", f"Dir::Etc::SourceParts={parts}"]
        said = (answer.err + answer.out).strip()
        return (
            None
            if answer.code == 0 and not re.search(r"(?m)^[EW]: ", said)
            else (said.splitlines() or [f"apt-get update: exit code {answer.code}"])[0]
        )

    def forget(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder, self.options = None, []

    # changing

    def lock_held(self) -> dict[str, t.Any] | None:
        """Who holds a lock of apt or dpkg: path, pid, command and unit; None when nobody does."""
        for path in LOCKS:
            pid = lock_holder(self.system.at(path))
            if pid:
                command = (self.system.read(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip() or "unknown command"
                return {"path": path, "pid": pid, "command": command, "unit": unit_of(self.system.read(f"/proc/{pid}/cgroup"))}
        return None

    def wait_for_locks(self, sleep: t.Callable[[float], None] = time.sleep, clock: t.Callable[[], float] = time.monotonic) -> float:
        """Wait until nobody holds a lock of apt or dpkg. Ends nobody. Returns the seconds waited."""
        began = clock()
        while True:
            held = self.lock_held()
            if not held:
                return clock() - began
            if clock() - began >= self.lock_timeout:
                raise Problem(
                    "apt_locked",
                    f"{holder_words(held)} for longer than {self.lock_timeout:g} s",
                    "let it end and run again, or raise nvidia_driver_apt_lock_timeout; a dpkg that is killed leaves packages half configured",
                    pid=held["pid"],
                    command=held["command"],
                    unit=held["unit"],
                )
            sleep(min(2.0, max(0.1, self.lock_timeout / 20)))

    def update(self) -> None:
        self.wait_for_locks()
        answer = self.system.run(
            ["apt-get", "-o", f"DPkg::Lock::Timeout={int(self.lock_timeout)}", "-q", "update"], timeout=self.apt_timeout
        )
        if answer.code:
            last = [line for line in (answer.err + answer.out).splitlines() if line.startswith("E:")]
            raise Problem(
                "apt_update_failed",
                "; ".join(last) or f"apt-get update ended with {answer.code}",
                "check the repository's address, key and network",
            )

    def configure(self) -> str:
        """Let dpkg finish what it began. Returns what it said."""
        self.wait_for_locks()
        answer = self.system.run(["dpkg", "--force-confold", "--configure", "-a"], timeout=self.apt_timeout)
        return answer.out + answer.err

    def mark(self, how: str, names: list[str]) -> None:
        if names:
            answer = self.system.run(["apt-mark", how, *names], timeout=120)
            if answer.code:
                raise Problem("apt_mark_failed", f"apt-mark {how}: {answer.err.strip()}")

    def apply(self, plan: Plan) -> str:
        """Install and remove in one go. Raises Problem with apt's failure in a sentence."""
        if not plan.install and not plan.remove:
            return ""
        self.wait_for_locks()
        arguments = [f"{name}={version}" if version else name for name, version in sorted(plan.install.items())] + [
            f"{name}-" for name in plan.remove
        ]
        answer = self.system.run(
            [
                "apt-get",
                "-q",
                "-y",
                "--no-install-recommends",
                "--allow-downgrades",
                "--allow-change-held-packages",
                "-o",
                f"DPkg::Lock::Timeout={int(self.lock_timeout)}",
                "-o",
                "Dpkg::Options::=--force-confdef",
                "-o",
                "Dpkg::Options::=--force-confold",
                "-o",
                "APT::Get::Remove=true",
                "install",
                *arguments,
            ],
            timeout=self.apt_timeout,
        )
        if answer.code:
            text = answer.out + answer.err
            raise explain_failure(
                text,
                self.policy(
                    set(re.findall(r"(?m)^\s*(\S+) : Depends:", text)) | set(re.findall(r"Depends: (\S+)", text)) | set(plan.install)
                ),
            )
        return answer.out
