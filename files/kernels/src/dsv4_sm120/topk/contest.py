# SPDX-License-Identifier: Apache-2.0
"""How top-k is proved and timed on the GPU where it is to serve."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from dsv4_sm120 import contestants, timing, topk
from dsv4_sm120.contests import Bout, Cell, Contest, Deployment
from dsv4_sm120.topk import reference

K, PAGE = 512, 64
# tokens of context in a score
RATIO = 4


def lengths_of(batch: int, kind: int | None, width: int) -> list[int]:
    """Returns a batch of lengths: all `kind`, or for None log-uniform ones that hold the longest and a short row."""
    if kind is not None:
        return [kind] * batch
    rng = random.Random(batch)
    drawn = [int(2 ** rng.uniform(8, width.bit_length() - 1)) for dummy in range(batch)]
    drawn[-1] = min(1024, width)
    drawn[0] = width
    return drawn


def cells(deployment: Deployment) -> list[Cell]:
    """Returns the shapes of a deployment's top-k and indexer calls."""
    return [
        Cell("all", rows, length)
        for rows in deployment.rows
        for length in deployment.contexts()
        if rows > 1 or length is not None
    ]


def case(lengths: list[int], width: int, scores: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Returns scores, lengths and page table; NaN past each length, -1 in the table's padding."""
    rows = len(lengths)
    generator = torch.Generator().manual_seed(rows * 131 + width)
    scores = torch.randn(rows, width, generator=generator) if scores is None else scores.clone()
    pages = -(-width // PAGE)
    table = torch.randperm(rows * pages, generator=generator).view(rows, pages).int()
    for row, length in enumerate(lengths):
        scores[row, max(0, length) :] = float("nan")
        table[row, -(-max(0, length) // PAGE) :] = -1
    return scores.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda"), table.cuda()


def means_of_neighbours(rows: int, width: int, alike: int, generator: torch.Generator) -> torch.Tensor:
    """Returns random scores [rows, width] on the generator's device, each the mean of `alike` that it shares with its
    neighbours."""
    sums = torch.randn(rows, width + alike, device=generator.device, generator=generator).double().cumsum(1)
    return ((sums[:, alike:] - sums[:, :-alike]) / alike).float()


def difference(made: tuple[torch.Tensor, ...], k: int = K) -> str | None:
    """Returns what the kernel gave otherwise than the reference, None when nothing."""
    scores, lengths, table = made
    slots = torch.full((scores.shape[0], k), -7, dtype=torch.int32, device="cuda")
    raw = torch.full_like(slots, -7)
    topk.topk_transform_paged(scores, lengths, table, slots, PAGE, raw)
    torch.cuda.synchronize()
    want_slots, want_raw = reference.topk_transform_paged(scores, lengths, table, k, PAGE)
    for row in range(scores.shape[0]):
        if not torch.equal(raw[row].cpu(), want_raw[row]) or not torch.equal(slots[row].cpu(), want_slots[row]):
            wrong = int((raw[row].cpu() != want_raw[row]).sum())
            return f"row {row} of length {int(lengths[row])}: {wrong} of {k} selected tokens differ"
    return None


def replays(step: Callable[[], object], scores: torch.Tensor, live: torch.Tensor, table: torch.Tensor, raw: torch.Tensor) -> str | None:
    """Captures a step that selects from scores into raw, replays it at changing lengths written to live, and says which replay
    is wrong, if any (hazards 10 and 11)."""
    rng = random.Random(3)
    rows, width = scores.shape
    graph = timing.capture(step)
    for turn in range(200):
        lengths = [rng.choice([0, 1, 512, 513, 16_385, rng.randint(1, width)]) for dummy in range(rows)]
        live.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        if turn % 20 == 0:
            torch.cuda.synchronize()
            if not torch.equal(raw.cpu(), reference.topk_transform_paged(scores, live, table, K, PAGE)[1]):
                return f"replay {turn} at lengths {lengths} differs"
    return None


def _replays() -> str | None:
    rows, width = 4, 131_072
    scores, _lengths, table = case([width] * rows, width)
    live = torch.ones(rows, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, K, dtype=torch.int32, device="cuda")
    raw = torch.empty_like(out)
    return replays(lambda: topk.topk_transform_paged(scores, live, table, out, PAGE, raw), scores, live, table, raw)


def _ties() -> str | None:
    generator = torch.Generator().manual_seed(1)
    signed = torch.where(torch.rand(2, 131_072, generator=generator) < 0.5, torch.tensor(-0.0), torch.tensor(0.0))
    few = torch.randint(0, 2, (2, 131_072), generator=generator).float()
    near = 1.0 + torch.rand(2, 131_072, generator=generator) * 1e-3
    lonely = torch.full((2, 131_072), float("-inf"))
    lonely[:, ::600] = 1.0
    for scores in (signed, few, near, lonely, means_of_neighbours(2, 131_072, 64, generator)):
        for length in (5000, 16_384, 131_072):
            if fault := difference(case([length, length - 3], 131_072, scores)):
                return fault
    return None


def _same_bits() -> str | None:
    scores, lengths, table = case([131_072 - 7 * i for i in range(16)], 131_072)
    outs = [torch.empty(16, K, dtype=torch.int32, device="cuda") for dummy in range(20)]
    for out in outs:
        topk.topk_transform_paged(scores, lengths, table, out, PAGE)
    torch.cuda.synchronize()
    return None if all(torch.equal(outs[0], out) for out in outs) else "two runs differ"


def checks() -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Hazards by the numbers of NOTES.md, and shapes at every edge of the kernel's paths."""
    yield "h07 empty and negative lengths", lambda: difference(case([0, -1, 1], 4096))
    yield "h08 h09 junk past the length, padded table", lambda: difference(case([600, 16_385, 70_000], 131_072))
    for length in (1, 511, 512, 513, 4097, 16_384):
        yield f"h19 length {length}", lambda length=length: difference(case([length], 16_384))
    for length in (16_385, 20_480, 100_003, 131_072):
        yield f"h19 length {length}", lambda length=length: difference(case([length, length // 2], 131_072))
    yield "h20 ties", _ties
    for k in (1, 1024, 2048):
        yield f"k {k}", lambda k=k: difference(case([300, 20_000], 131_072), k)
    yield "64 rows", lambda: difference(case(lengths_of(64, None, 40_000), 40_000))
    yield "1025 rows", lambda: difference(case([(i * 37) % 2049 for i in range(1025)], 2048))
    yield "h10 h11 graph replays at changing lengths", _replays
    yield "the same bits at every run", _same_bits


def selectors() -> dict[str, Callable | None]:
    """Returns the engine's and other top-k kernels: fn(scores, lengths, table, out, page), None where one is missing."""
    return {"v1": contestants.topk_v1(), "v2": contestants.topk_v2(), "flashinfer": contestants.topk_flashinfer()}


def arena(lengths: list[int], width: int, alike: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Callable]:
    """Returns (scores, lengths, table, padded, fault) for contestants: random scores, each the mean of `alike` that it shares
    with its neighbours, a whole page table since peers may read padding, the scores with -inf past each length, and what
    tells whether selected slots hold torch.topk's values."""
    rows, pages = len(lengths), -(-width // PAGE)
    generator = torch.Generator("cuda").manual_seed(7)
    scores = means_of_neighbours(rows, width, alike, generator) if alike > 1 else torch.randn(rows, width, device="cuda", generator=generator)
    actual = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    table = torch.randperm(rows * pages, device="cuda", generator=generator).view(rows, pages).int()
    past = torch.arange(width, device="cuda")[None] >= actual[:, None]
    padded = scores.masked_fill(past, float("-inf"))
    slot = (table.long()[..., None] * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)[:, :width]
    flat = torch.full((rows * pages * PAGE,), float("-inf"), device="cuda")
    flat[slot.flatten()] = padded.flatten()
    best = torch.topk(padded, K, dim=1).values.sort(1).values

    def fault(out: torch.Tensor) -> str | None:
        got = torch.where(out >= 0, flat[out.clamp(min=0).long()], torch.tensor(float("-inf"), device="cuda"))
        return None if torch.equal(got.sort(1).values, best) else "other values than torch.topk"

    return scores, actual, table, padded, fault


def selecting(rows: int, call: Callable[[torch.Tensor], object]) -> Callable[[], torch.Tensor]:
    """Returns work that selects into a tensor of its own, which it returns: a captured graph writes there at every replay."""
    out = torch.full((rows, K), -1, dtype=torch.int32, device="cuda")

    def once() -> torch.Tensor:
        call(out)
        return out

    return once


def bout(cell: Cell, deployment: Deployment) -> Bout:
    """Returns the contestants over one cell's scores; a result's values are compared with torch.topk's."""
    width = deployment.context_length // RATIO
    drawn = lengths_of(cell.rows, cell.length and cell.length // RATIO, width)
    scores, lengths, table, _padded, fault = arena(drawn, width)
    calls = {"ours": topk.launch} | {name: call for name, call in selectors().items() if call is not None}
    works = {
        name: selecting(cell.rows, lambda out, call=call: call(scores, lengths, table, out, PAGE)) for name, call in calls.items()
    }
    return Bout(works, lambda _name, out: fault(out))


# what the engine runs by itself, by architecture
TOPK = {"sm_120a": "v1", "sm_90": "v2"}
CONTESTS = [Contest("topk", checks, cells, bout, {arch: (name,) for arch, name in TOPK.items()})]
