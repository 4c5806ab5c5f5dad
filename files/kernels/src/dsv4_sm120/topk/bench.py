# SPDX-License-Identifier: Apache-2.0
"""Times top-k against its peers; run through benchmarks/run.py."""

from __future__ import annotations

import torch

from dsv4_sm120 import timing, topk
from dsv4_sm120.topk import contest
from dsv4_sm120.topk.contest import K, PAGE

WIDTH = 131072


def lengths_of(batch: int, kind) -> list[int]:
    """Returns a batch of lengths, all the same or "mixed"."""
    return contest.lengths_of(batch, None if kind == "mixed" else kind, WIDTH)


def measure(batch: int, kind, flush: timing.Flush, contestants, repeats: int, alike: int = 1) -> dict[str, float]:
    """Returns microseconds of each contestant for one cell; a contestant whose values are wrong gets NaN."""
    scores, lengths, table, padded, fault = contest.arena(lengths_of(batch, kind), WIDTH, alike)
    calls = {"ours": topk.launch} | {name: call for name, call in contestants.items() if call is not None}
    works = {name: contest.selecting(batch, lambda out, call=call: call(scores, lengths, table, out, PAGE)) for name, call in calls.items()}
    graphs, wrong = {}, []
    for name, work in works.items():
        graphs[name] = timing.capture(work)
        out = work()  # the tensor that every replay writes
        out.fill_(-1)
        graphs[name].replay()
        if fault(out):
            wrong.append(name)
    graphs["torch.topk"] = timing.capture(lambda: torch.topk(padded, K, dim=1, sorted=False))
    found = timing.medians(graphs, flush, repeats)
    return {name: float("nan") if name in wrong else value for name, value in found.items()}
