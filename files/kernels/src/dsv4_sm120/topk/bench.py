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


def measure(batch: int, kind, flush: timing.Flush, contestants, repeats: int) -> dict[str, float]:
    """Returns microseconds of each contestant for one cell; a contestant whose values are wrong gets NaN."""
    generator = torch.Generator("cuda").manual_seed(7)
    scores = torch.randn(batch, WIDTH, device="cuda", generator=generator)
    lengths = torch.tensor(lengths_of(batch, kind), dtype=torch.int32, device="cuda")
    pages = WIDTH // PAGE
    table = torch.randperm(batch * pages, device="cuda", generator=generator).view(batch, pages).int()
    past = torch.arange(WIDTH, device="cuda")[None] >= lengths[:, None]
    padded = scores.masked_fill(past, float("-inf"))
    flat = torch.full((batch * WIDTH,), float("-inf"), device="cuda")
    slot = (table.long()[..., None] * PAGE + torch.arange(PAGE, device="cuda")).view(batch, WIDTH)
    flat[slot.flatten()] = padded.flatten()
    best = torch.topk(padded, K, dim=1).values.sort(1).values

    def values(out: torch.Tensor) -> torch.Tensor:
        got = torch.where(out >= 0, flat[out.clamp(min=0).long()], torch.tensor(float("-inf"), device="cuda"))
        return got.sort(1).values

    graphs, wrong, outs = {}, [], []
    works = {"ours": lambda out: topk.launch(scores, lengths, table, out, PAGE)}
    for name, call in contestants.items():
        if call is not None:
            works[name] = lambda out, call=call: call(scores, lengths, table, out, PAGE)
    for name, work in works.items():
        out = torch.full((batch, K), -1, dtype=torch.int32, device="cuda")
        outs.append(out)  # the graph writes there at every replay
        graphs[name] = timing.capture(lambda work=work, out=out: work(out))
        graphs[name].replay()
        torch.cuda.synchronize()
        if not torch.equal(values(out), best):
            wrong.append(name)
    graphs["torch.topk"] = timing.capture(lambda: torch.topk(padded, K, dim=1, sorted=False))
    found = timing.medians(graphs, flush, repeats)
    return {name: float("nan") if name in wrong else value for name, value in found.items()}
