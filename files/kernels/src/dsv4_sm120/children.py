# SPDX-License-Identifier: Apache-2.0
"""Runs GPU work in processes of its own: an illegal access ends one of them, not the program that looks on.

A child says what it does on standard output, one JSON object a line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

TAIL_LINES = 4
NO_TIME = "no time left"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a child ended: None when it went well, or why not."""

    fault: str | None
    timed_out: bool = False


def _kill(process: subprocess.Popen) -> None:
    """Kills the child with everything that it started: compilers run beside it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(module: str, arguments: list[str], seconds: float, said: Callable[[dict], None], silence: float = math.inf) -> Ended:
    """Runs `python -m dsv4_sm120.<module> ARGUMENTS` for at most so many seconds; said gets each object that it prints.

    A child that says nothing for `silence` seconds is ended too. Lines that are no JSON object (libraries print as well) are
    passed on to standard error.
    """
    if seconds <= 0:
        return Ended(NO_TIME, timed_out=True)
    command = [sys.executable, "-B", "-m", f"{__package__}.{module}", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    lines: queue.Queue[tuple[str, str] | None] = queue.Queue()

    def read(name: str) -> None:
        for line in getattr(process, name):
            lines.put((name, line.rstrip("\n")))
        lines.put(None)

    threads = [threading.Thread(target=read, args=(name,), daemon=True) for name in ("stdout", "stderr")]
    for thread in threads:
        thread.start()
    tail: list[str] = []
    open_streams, deadline = len(threads), time.monotonic() + seconds
    quiet_until = time.monotonic() + silence
    try:
        while open_streams:
            try:
                item = lines.get(timeout=max(0.0, min(deadline, quiet_until) - time.monotonic()))
            except queue.Empty:
                if time.monotonic() < deadline:
                    return Ended(f"said nothing for {silence:.0f} s", timed_out=True)
                return Ended(f"took longer than {seconds:.0f} s", timed_out=True)
            if item is None:
                open_streams -= 1
                continue
            name, line = item
            document = _object(line) if name == "stdout" else None
            if document is not None:
                quiet_until = time.monotonic() + silence
                said(document)
            elif line.strip():
                print(line, file=sys.stderr, flush=True)
                tail = [*tail[-TAIL_LINES + 1 :], line.strip()]
        code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Ended(f"took longer than {seconds:.0f} s", timed_out=True)
    finally:
        _kill(process)
    if code == 0:
        return Ended(None)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return Ended(f"{how}: {tail[-1]}" if tail else how)


def end_with_us() -> None:
    """Turns a time limit from outside, a lost connection and Ctrl-C into an orderly end of this program, which kills its
    children: else they would keep the GPU."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)


def _object(line: str) -> dict | None:
    if not line.startswith("{"):
        return None
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def words(error: Exception) -> str:
    """Returns an exception in a line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def tell(**document) -> None:
    """Says something to the parent."""
    print(json.dumps(document), flush=True)
