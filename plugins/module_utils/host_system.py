# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The little that the host modules need of a host, so that tests can put a recorded one in its place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import typing as t

from ansible_collections.blackwell.dsv4.plugins.module_utils import child_process

# Options of the modules, documented in doc_fragments/host.py.
PROC = {"proc_root": {"type": "path", "default": "/proc"}}
SYS = {"sys_root": {"type": "path", "default": "/sys"}}
BOOT = {"boot": {"type": "path", "default": "/boot"}}
NVML = {"nvml_path": {"type": "path"}}

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Result(t.NamedTuple):
    """What a command gave. ``code`` is 127 when it is not there, 124 when it ran out of time."""

    code: int
    out: str
    err: str


class System:
    """Reads files below given roots and runs commands with a time limit; nothing here raises."""

    def __init__(
        self, proc_root: str = "/proc", sys_root: str = "/sys", root: str = "/", timeout: float = 20.0, search_path: str = SEARCH_PATH
    ):
        self.proc_root = proc_root.rstrip("/") or "/"
        self.sys_root = sys_root.rstrip("/") or "/"
        self.root = root
        self.timeout = timeout
        self.search_path = search_path

    def at(self, path: str) -> str:
        """``path`` below the root of this system."""
        return path if self.root == "/" else os.path.join(self.root, path.lstrip("/"))

    def proc(self, path: str) -> str:
        return os.path.join(self.proc_root, path)

    def sys(self, path: str) -> str:
        return os.path.join(self.sys_root, path)

    def read(self, path: str) -> str | None:
        """Text of a file, or None when it cannot be read."""
        try:
            with open(path, encoding="utf-8", errors="replace") as source:
                return source.read()
        except OSError:
            return None

    def listed(self, path: str) -> list[str]:
        """Names in a folder, sorted; none when there is no such folder."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def real(self, path: str) -> str:
        return os.path.realpath(path)

    def which(self, name: str) -> str | None:
        return shutil.which(name, path=self.search_path)

    def run(self, argv: list[str], timeout: float | None = None) -> Result:
        """Run a command in the C locale and take what it says. It never waits longer than the limit."""
        environment = {**os.environ, "LC_ALL": "C", "PATH": self.search_path, "DEBIAN_FRONTEND": "noninteractive"}
        limit = self.timeout if timeout is None else timeout
        try:
            child = child_process.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        except OSError as error:
            return Result(127, "", str(error))
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child_process.end(child, signals=(signal.SIGKILL,), patience=2.0)
            return Result(124, "", f"{argv[0]} gave no answer within {limit:g} s")
        return Result(child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
