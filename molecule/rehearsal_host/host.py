#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Boot, stop and look into the rehearsal host: a Debian root with real systemd, apt and SSH under systemd-nspawn.

The commands `up` and `down` need root. Caches lie in ${XDG_CACHE_HOME:-~/.cache}/blackwell-dsv4. REHEARSAL_NAME and REHEARSAL_SSH_PORT
name a second host for development; REHEARSAL_MIRROR names a Debian mirror.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from rehearsal import base, machine, model, repository, wheelhouse  # noqa: E402
from rehearsal.common import Problem, fail, say  # noqa: E402

PROGRAMS = {
    "debootstrap": "debootstrap", "systemd-nspawn": "systemd-container", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
    "gcc": "gcc", "dpkg-deb": "dpkg", "gpg": "gnupg", "mount": "mount", "unshare": "util-linux",
}
FILES = {"/usr/include/stdio.h": "libc6-dev", str(base.KEYRING): "debian-archive-keyring"}


def needs() -> None:
    """One line that says everything that is missing."""
    if os.geteuid() != 0:
        raise Problem("the rehearsal host needs root: run `sudo make rehearse` (debootstrap, mounts and systemd-nspawn are root's)")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)] + [name for name in FILES if not Path(name).exists()]
    if missing:
        packages = sorted({{**PROGRAMS, **FILES}[name] for name in missing})
        raise Problem(f"missing {', '.join(missing)}: run `apt-get install --no-install-recommends {' '.join(packages)}`")
    os.environ["PATH"] = path


def shares() -> dict[str, Path]:
    """Build, or find in the cache, everything that the host is made of; the parts do not wait for each other."""
    with ThreadPoolExecutor() as pool:
        jobs = {"base": pool.submit(base.ensure, machine.bases_in_use()), "apt": pool.submit(repository.ensure), "wheels": pool.submit(wheelhouse.ensure),
                "model": pool.submit(model.ensure)}
        built = {name: job.result() for name, job in jobs.items()}
    del built["base"]
    return built


def up(arguments: argparse.Namespace) -> int:
    needs()
    began = time.monotonic()
    host = machine.Machine()
    booted = host.up(shares(), arguments.take_over, arguments.fresh)
    say(f"{host.name} is {'up' if booted else 'up already'} after {time.monotonic() - began:.1f} s (a shell on it: molecule/rehearsal_host/host.py shell)")
    return 0


def check(_arguments: argparse.Namespace) -> int:
    needs()
    return 0


def down(arguments: argparse.Namespace) -> int:
    needs()
    host = machine.Machine()
    say(f"{host.name} is down" if host.down(arguments.take_over) else f"{host.name} was not running")
    return 0


def status(arguments: argparse.Namespace) -> int:
    state = machine.Machine().status()
    if arguments.json:
        print(json.dumps(state, indent=2))
    elif state["running"]:
        say(f"{state['name']} is {state['system']} ({machine.Machine.describe(state['holder'])})")
        for unit in state["failed_units"]:
            say(f"failed unit: {unit}")
    else:
        say(f"{state['name']} is not running")
    return 0 if state["running"] else 3


def shell(arguments: argparse.Namespace) -> int:
    argv = machine.Machine().ssh_argv()
    if sys.stdin.isatty() and not arguments.command:
        argv.insert(1, "-t")
    os.execvp(argv[0], [*argv, *arguments.command])


def logs(arguments: argparse.Namespace) -> int:
    host = machine.Machine()
    log = host.home / "supervisor.log"
    if log.is_file():
        print(f"== {log}\n{log.read_text()}")
    journal = [*(["-u", arguments.unit] if arguments.unit else []), *(["-f"] if arguments.follow else ["--no-pager", "-n", str(arguments.lines)])]
    if host.holder():
        return host.ssh(["journalctl", *journal]).returncode
    folder = host.home / "upper/var/log/journal"
    if not folder.is_dir():
        return fail(f"{host.name} is not running and left no journal")
    os.execvp("journalctl", ["journalctl", f"--directory={folder}", *journal])


def supervise(_arguments: argparse.Namespace) -> int:
    return machine.Machine().supervise()


def main() -> int:
    parser = argparse.ArgumentParser(prog="host.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command_name", required=True, metavar="{up,down,check,status,shell,logs}")
    one = commands.add_parser("up", help="build what is missing, boot the host, wait until its systemd has started everything")
    one.add_argument("--take-over", action="store_true", help="throw away the host that another clone holds")
    one.add_argument("--fresh", action="store_true", help="throw away this clone's running host and boot a new one")
    one.set_defaults(call=up)
    commands.add_parser("check", help="say in one line what is missing to boot a host").set_defaults(call=check)
    one = commands.add_parser("down", help="stop the host and remove its disk; the caches stay")
    one.add_argument("--take-over", action="store_true", help="also when another clone holds it")
    one.set_defaults(call=down)
    one = commands.add_parser("status", help="say whether it runs, who holds it and which units failed (exit code 3: not running)")
    one.add_argument("--json", action="store_true")
    one.set_defaults(call=status)
    one = commands.add_parser("shell", help="a shell on the host, or one command")
    one.add_argument("command", nargs=argparse.REMAINDER)
    one.set_defaults(call=shell)
    one = commands.add_parser("logs", help="the supervisor's log and the guest's journal")
    one.add_argument("unit", nargs="?")
    one.add_argument("-f", "--follow", action="store_true")
    one.add_argument("-n", "--lines", type=int, default=100)
    one.set_defaults(call=logs)
    commands.add_parser("_supervise").set_defaults(call=supervise)
    arguments = parser.parse_args()
    try:
        return arguments.call(arguments)
    except Problem as problem:
        return fail(str(problem))
    except KeyboardInterrupt:
        return fail("interrupted; what was half-built is not used, and `host.py up` goes on")


if __name__ == "__main__":
    sys.exit(main())
