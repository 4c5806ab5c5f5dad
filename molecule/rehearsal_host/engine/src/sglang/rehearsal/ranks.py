# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The processes of the schedulers and of the detokenizer: real ones, with their real names, that do nothing.

They are forked before anything big is loaded. As in SGLang they end with the
server (unless the fault `orphans` is set), and a scheduler that fails sends its
parent SIGQUIT.
"""
from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import setproctitle

from sglang.rehearsal import devices

PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    name: str
    pid: int
    entry: Path | None = None
    gone: bool = False


@dataclass
class Ranks:
    children: list[Child] = field(default_factory=list)
    orphans: bool = False

    def start(self, args: dict, gpus: list[devices.Gpu]) -> None:
        count = args["tp_size"] * args["pp_size"]
        for rank in range(count):
            self._fork("sglang::scheduler_TP%d" % rank, rank, args)
        self._fork("sglang::detokenizer", None, args)
        if not gpus:
            return
        for child, gpu in zip(self.children, gpus):
            child.entry = devices.register(child.pid, gpu, args["mem_fraction_static"], child.name)
            if child.entry is None:
                print("rehearsal: cannot write %s: the GPUs will look idle" % devices.processes_path(), file=sys.stderr, flush=True)

    def schedulers(self) -> list[Child]:
        return [child for child in self.children if child.name.startswith("sglang::scheduler")]

    def _fork(self, name: str, rank: int | None, args: dict) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.children.append(Child(name, pid))
            return
        try:
            self._run(name, rank, args)
        finally:
            os._exit(1)

    def _run(self, name: str, rank: int | None, args: dict) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if self.orphans else signal.SIG_DFL)
        if not self.orphans:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        setproctitle.setproctitle(name)
        sockets = []
        if rank is not None:
            try:
                sockets = listeners(rank, args)
            except OSError as error:
                print(
                    "[%s TP%d] Scheduler hit an exception: torch.distributed.DistNetworkError: The server socket has failed "
                    "to listen on any local network address. port: %s, useIpv6: false, code: -%d, name: EADDRINUSE, "
                    "message: %s" % (time.strftime("%F %T"), rank, args["nccl_port"], error.errno or 0, os.strerror(error.errno or 0)),
                    file=sys.stderr, flush=True,
                )
                os.kill(os.getppid(), signal.SIGQUIT)
                os._exit(1)
        while True:
            signal.pause()
            del sockets[8:]  # keeps the sockets referenced

    def dead(self) -> Child | None:
        """A child that ended by itself since the last call."""
        for child in self.children:
            if child.gone:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.gone = True
                self._forget(child)
                child.name += " exit code %d" % os.waitstatus_to_exitcode(status)
                return child
        return None

    def kill_schedulers(self) -> None:
        for child in self.schedulers():
            if not child.gone:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                child.gone = True
                self._forget(child)

    def stop(self) -> None:
        if self.orphans:
            return
        for child in self.children:
            if not child.gone:
                os.kill(child.pid, signal.SIGKILL)
        for child in self.children:
            if not child.gone:
                os.waitpid(child.pid, 0)
                child.gone = True
            self._forget(child)

    @staticmethod
    def _forget(child: Child) -> None:
        if child.entry is not None:
            child.entry.unlink(missing_ok=True)
            child.entry = None


def listeners(rank: int, args: dict) -> list[socket.socket]:
    """The sockets of a scheduler that an operator sees: the rendezvous (every address, rank 0) and Mooncake's RPC port (every address, each rank)."""
    found = []
    if rank == 0 and args["nccl_port"]:
        found.append(_listen(args["nccl_port"]))
    if args["disaggregation_mode"] in ("prefill", "decode") and args["disaggregation_transfer_backend"] == "mooncake":
        low = int(os.environ.get("MC_MIN_RPC_PORT", "15000"))
        high = int(os.environ.get("MC_MAX_RPC_PORT", "17000"))
        start = low + os.getpid() % max(1, high - low)
        for port in [*range(start, high), *range(low, start)]:
            try:
                found.append(_listen(port))
                break
            except OSError:
                continue
    return found


def _listen(port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", port))
    server.listen(16)
    return server
