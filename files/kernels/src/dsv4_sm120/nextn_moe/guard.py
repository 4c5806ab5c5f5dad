# SPDX-License-Identifier: Apache-2.0
"""Counts the draft's rows and those with a NaN, and ends the process when the draft is useless.

A draft that computes NaN harms no answer, since the target checks every token, so nobody would notice but by its speed. On
the device a row counts as bad when anything in it is NaN; rows of padding and of graph capture are left out (their tokens go
to page 0 of the KV cache, which the engine keeps for them). The counts are copied into pinned memory by the stream that computed them;
inside a CUDA graph the counting and the copy are part of it. Nothing waits for the device: a thread reads the memory once a
second. It logs the first NaN, and when they have grown tenfold; when more than half of at least WINDOW rows are bad, the draft
is the wrong one for its weights, not unlucky, and the process ends as the engine's own schedulers do after an exception.
One bad row among good ones does not: it costs one rejected draft, and ending the service for it would cost every request.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

WINDOW = 32
PAGE = 256  # tokens; DeepSeek-V4's page size, which the engine allows no other for
SECONDS = 1.0
EXIT_STATUS = 70
logger = logging.getLogger("dsv4_sm120")


class Judge:
    """What the counts mean; pure arithmetic."""

    def __init__(self) -> None:
        self.said = 0
        self.before = (0, 0)

    def look(self, rows: int, bad: int) -> tuple[str | None, bool]:
        """Takes the counts since the start; returns what to log, if anything, and whether the process has to end."""
        fresh, fresh_bad = rows - self.before[0], bad - self.before[1]
        if fresh >= WINDOW:
            self.before = (rows, bad)
            if 2 * fresh_bad > fresh:
                return f"the draft computes NaN in {fresh_bad} of its last {fresh} rows", True
        if bad and bad >= 10 * self.said:
            self.said = bad
            return f"NaN in {bad} of {rows} rows of the draft so far", False
        return None, False


class Counter:
    """[rows, bad rows] of one device and their copy in host memory."""

    def __init__(self, device) -> None:
        import torch

        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.host = torch.zeros(2, dtype=torch.int64, pin_memory=self.counts.is_cuda)

    def count(self, values, slots) -> None:
        """Counts the rows of a tensor; slots: where each row's token lies in the KV cache, None when all rows are real."""
        from .count import count

        count(values, slots, self.counts, PAGE)
        self.host.copy_(self.counts, non_blocking=True)

    def read(self) -> tuple[int, int]:
        """Returns the counts as far as the device has come."""
        rows, bad = self.host.tolist()
        return rows, bad


_counters: dict[object, Counter] = {}


def observe(values, slots) -> None:
    """Counts the rows of what a draft computed: its logits, or the states that they are made of.

    slots: where the tokens of the batch lie in the KV cache. With a row for each request it has several tokens a row, equally
    many where requests are padded (the graphs), and any number where they are not (a prefill).
    """
    if values is None or not values.shape[0]:
        return
    if slots is not None:
        each, rest = divmod(slots.shape[0], values.shape[0])
        slots = slots[::each] if each and not rest else None
    counter = _counters.get(values.device)
    if counter is None:
        if values.is_cuda and _capturing():
            # its memory would be the graph's, and each replay would begin with zeros
            raise RuntimeError("dsv4_sm120: nextn_moe: the draft's first call is a graph capture; it should have run before")
        counter = _counters[values.device] = Counter(values.device)
        threading.Thread(target=watch, args=(counter.read, end), name="dsv4-draft-guard", daemon=True).start()
    counter.count(values, slots)


def _capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


def watch(read: Callable[[], tuple[int, int]], finish: Callable[[], None], pause: Callable[[float], None] = time.sleep) -> None:
    """Reads the counts for ever, logs what is to be said, and finishes."""
    judge = Judge()
    while True:
        pause(SECONDS)
        line, over = judge.look(*read())
        if line:
            logger.log(logging.CRITICAL if over else logging.ERROR, "dsv4_sm120: nextn_moe: %s%s", line, "; ending" if over else "")
        if over:
            finish()
            return


def end() -> None:
    """Ends this process and its server, as a scheduler of the engine does that met an exception."""
    sys.stderr.flush()
    if multiprocessing.parent_process() is not None:
        os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(EXIT_STATUS)
