# SPDX-License-Identifier: Apache-2.0
"""Times the indexer, and the indexer with top-k, against their peers; run through benchmarks/run.py."""

from __future__ import annotations

import torch

from dsv4_sm120 import indexer, timing, topk
from dsv4_sm120.indexer import reference
from dsv4_sm120.indexer.contest import PEER_TOLERANCE, beside_ours, case, ours
from dsv4_sm120.topk.bench import K, PAGE, WIDTH, lengths_of


def inputs(lengths: list[int], width: int, next_n: int = 1):
    """Returns (q, cache, weights, lengths, table, width) on the GPU; each request has its own pages, shuffled."""
    return case(lengths, width, next_n, poison=False)


def measure(batch: int, kind, flush: timing.Flush, contestants, repeats: int) -> dict[str, float]:
    """Returns microseconds of each contestant for one cell; a contestant whose logits are wrong gets NaN."""
    lengths = lengths_of(batch, kind)
    case = inputs(lengths, WIDTH)
    off = beside_ours(case)
    graphs = {"ours": timing.capture(lambda: ours(*case))}
    wrong = []
    for name, call in contestants.items():
        if call is None:
            continue
        try:
            if not off(call(*case)) <= (1e-2 if name == "torch" else PEER_TOLERANCE):
                wrong.append(name)
            graphs[name] = timing.capture(lambda call=call: call(*case))
        except Exception as error:  # noqa: BLE001 - a contestant that does not run is a line of the output
            print(f"{name} did not run at {batch} x {kind}: {error}")
    if kind == 1024:
        narrow = (*case[:4], case[4][:, : 1024 // PAGE].contiguous(), 1024)
        graphs["ours, 4k table"] = timing.capture(lambda: ours(*narrow))
    moved = sum(lengths) * 132
    source = torch.zeros(max(moved // 2, 16), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graphs["copy"] = timing.capture(lambda: target.copy_(source))
    found = timing.medians(graphs, flush, repeats)
    return {name: float("nan") if name in wrong else value for name, value in found.items()}


def errors(batch: int, kind, contestants) -> dict[str, str]:
    """Returns of each contestant, beside float64: the root mean square of its error over that of the logits, and how many of
    the K best tokens of a row are others."""
    lengths = lengths_of(batch, kind)
    case = inputs(lengths, WIDTH)
    *most, table, _width = [item.cpu() if isinstance(item, torch.Tensor) else item for item in case]
    longest = max(lengths)
    want = reference.paged_mqa_logits(*most, table[:, : -(-longest // PAGE)], longest)[0]
    valid = ~want.isnan()
    found = {}
    for name, call in {"ours": ours, **contestants}.items():
        if call is not None:
            got = call(*case)[:, :longest].cpu().double()
            off = float((got - want)[valid].norm() / want[valid].norm())
            best, chosen = (logits.masked_fill(~valid, float("-inf")).topk(K).indices for logits in (want, got))
            others = sum(K - int(torch.isin(mine, its).sum()) for mine, its in zip(chosen, best))
            found[name] = f"{off:.1e}; {others / batch:.1f}"
    return found


def measure_pair(batch: int, kind, flush: timing.Flush, indexers, topks, repeats: int) -> dict[str, float]:
    """Returns microseconds of the fused pair and of every separate pair of an indexer and a top-k."""
    case = inputs(lengths_of(batch, kind), WIDTH)
    q, cache, weights, lengths, table, width = case
    out = torch.empty(batch, K, dtype=torch.int32, device="cuda")

    def fused():
        logits = torch.empty(batch, width, device="cuda")
        indexer.fused_launch(q, cache, weights, lengths, table, logits, out, PAGE)

    graphs = {"fused": timing.capture(fused)}
    mine = {"ours": lambda *a: ours(*a), **{n: c for n, c in indexers.items() if c is not None and n != "torch"}}
    select = {"ours": lambda s, l, t, o, p: topk.launch(s, l, t, o, p), **{n: c for n, c in topks.items() if c}}
    for first, logits_of in mine.items():
        for second, choose in select.items():
            graphs[f"{first} + {second}"] = timing.capture(
                lambda logits_of=logits_of, choose=choose: choose(logits_of(*case), lengths, table, out, PAGE)
            )
    return timing.medians(graphs, flush, repeats)


def measure_next(requests: int, length: int, next_n: int, flush: timing.Flush, repeats: int) -> dict[str, float]:
    """Returns microseconds of a verify step: rows of one request sharing keys, and the same rows each on its own."""
    lengths = [length - next_n + 1 + i for _ in range(requests) for i in range(next_n)]
    case = inputs(lengths, WIDTH, next_n)
    graphs = {
        "shared": timing.capture(lambda: ours(*case, next_n=next_n)),
        "each row": timing.capture(lambda: ours(*case)),
    }
    return timing.medians(graphs, flush, repeats)
