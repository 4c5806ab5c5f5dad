# SPDX-License-Identifier: Apache-2.0
"""How the indexer, alone and fused with top-k, is proved and timed on the GPU where it is to serve."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from dsv4_sm120 import _torch, contestants, indexer, topk
from dsv4_sm120.contests import Bout, Cell, Contest, Deployment
from dsv4_sm120.indexer import reference
from dsv4_sm120.topk import contest as topk_contest
from dsv4_sm120.topk import reference as topk_reference

K, PAGE, RATIO = topk_contest.K, topk_contest.PAGE, topk_contest.RATIO
# of a contestant's logits as a whole, beside ours
PEER_TOLERANCE = 1e-3
POISON = 0x7F  # NaN as e4m3, and as fp32 when repeated


def case(lengths: list[int], width: int, next_n: int = 1, pitch: int = indexer.PAGE_BYTES, poison: bool = True):
    """Returns (q, cache, weights, lengths, table, width) on the GPU.

    Each request of next_n rows has its own pages, shuffled over the pool; with poison the pool is NaN wherever no token lies
    and the table's padding is -1.
    """
    generator = torch.Generator("cuda").manual_seed(11 + len(lengths))
    rows, requests = len(lengths), len(lengths) // next_n
    longest = [max(0, *lengths[i * next_n : (i + 1) * next_n]) if next_n > 1 else max(0, lengths[i]) for i in range(requests)]
    needed = [-(-n // PAGE) for n in longest]
    pool = max(1, sum(needed))
    flat = torch.full((pool, pitch), POISON, dtype=torch.uint8, device="cuda")
    for start in range(0, pool, 8192):
        part = flat[start : start + 8192]
        keys = torch.randn(part.shape[0], PAGE * indexer.DIM, device="cuda", generator=generator)
        part[:, : PAGE * indexer.DIM] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(part.shape[0], PAGE, device="cuda", generator=generator) + 0.5
        part[:, PAGE * indexer.DIM : indexer.PAGE_BYTES] = scales.view(torch.uint8)
    order = torch.randperm(pool, device="cuda", generator=generator).int()
    table = torch.full((rows, -(-width // PAGE)), -1 if poison else 0, dtype=torch.int32, device="cuda")
    first = 0
    for request in range(requests):
        mine = order[first : first + needed[request]]
        first += needed[request]
        for row in range(request * next_n, (request + 1) * next_n):
            used = -(-max(0, lengths[row]) // PAGE) if poison else len(mine)
            table[row, :used] = mine[:used]
        if poison and longest[request] % PAGE:
            last, tokens = int(mine[-1]), longest[request] % PAGE
            flat[last, tokens * indexer.DIM : PAGE * indexer.DIM] = POISON
            flat[last, PAGE * indexer.DIM + tokens * 4 : indexer.PAGE_BYTES] = POISON
    q = torch.randn(rows, 1, indexer.HEADS, indexer.DIM, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, indexer.HEADS, device="cuda", generator=generator)
    cache = torch.as_strided(flat, (pool, PAGE, 1, indexer.DIM + 4), (pitch, indexer.DIM + 4, indexer.DIM + 4, 1))
    return q, cache, weights, torch.tensor(lengths, dtype=torch.int32, device="cuda"), table, width


def ours(q, cache, weights, lengths, table, width, next_n=1):
    """The indexer alone, its logits allocated as the engine's callers do."""
    logits = torch.empty(q.shape[0], width, device="cuda")
    indexer.launch(q, cache, weights, lengths, table, logits, None, next_n)
    return logits


def difference(made: tuple, next_n: int = 1) -> str | None:
    """Returns where the kernel's logits are not the reference's, None when they are."""
    q, cache, weights, lengths, table, width = made
    if reason := indexer.refusal(q, cache, weights, lengths, table, width, next_n):
        return f"refused: {reason}"
    logits = torch.full((q.shape[0], width), float("nan"), device="cuda")
    indexer.launch(q, cache, weights, lengths, table, logits, None, next_n)
    torch.cuda.synchronize()
    found = logits.cpu()
    # copied once, not by row
    want, *scales = reference.paged_mqa_logits(*(item.cpu() if isinstance(item, torch.Tensor) else item for item in made))
    allowed = reference.allowance(*scales, torch.cuda.get_device_capability(q.device)[0])
    for row in range(q.shape[0]):
        length = max(0, int(lengths[row]))
        error = (found[row, :length].double() - want[row, :length]).abs()
        if not (error <= allowed[row, :length]).all():
            return f"row {row} of length {length}: off by up to {error.nan_to_num(nan=float('inf')).max():.3g}"
        if not found[row, length:].isnan().all():
            return f"row {row} of length {length}: written past its end"
    return None


def fused_difference(made: tuple, next_n: int = 1) -> str | None:
    """Returns where the fused pair selects otherwise than a sort of the indexer's own logits."""
    q, cache, weights, lengths, table, width = made
    logits = torch.full((q.shape[0], width), float("nan"), device="cuda")
    indexer.launch(q, cache, weights, lengths, table, logits, None, next_n)
    want_slots, want_raw = topk_reference.topk_transform_paged(logits, lengths, table, K, PAGE)
    slots = torch.full((q.shape[0], K), -7, dtype=torch.int32, device="cuda")
    raw = torch.full_like(slots, -7)
    logits.fill_(float("nan"))
    if reason := indexer.fused_refusal(q, cache, weights, lengths, table, logits, slots, PAGE, raw, next_n):
        return f"refused: {reason}"
    indexer.fused_launch(q, cache, weights, lengths, table, logits, slots, PAGE, raw, next_n)
    torch.cuda.synchronize()
    if not torch.equal(raw.cpu(), want_raw) or not torch.equal(slots.cpu(), want_slots):
        return f"{int((raw.cpu() != want_raw).sum())} of {raw.numel()} selected tokens differ"
    return None


def _far_pages() -> str | None:
    """Pages beyond 4 GiB (hazard 13), where the GPU has the room."""
    pages = 5 * 2**30 // indexer.PAGE_BYTES
    if torch.cuda.mem_get_info()[0] < 7 * 2**30:
        return None
    q, cache, weights, lengths, table, width = case([300], 512)
    near = ours(q, cache, weights, lengths, table, width)[0, :300]
    pool = torch.empty((pages, indexer.PAGE_BYTES), dtype=torch.uint8, device="cuda")
    for number, page in enumerate((pages - 1, 0, pages // 2, pages - 2, 2**31 // indexer.PAGE_BYTES + 1)):
        pool[page] = cache.reshape(cache.shape[0], -1)[int(table[0, number])]
        table[0, number] = page
    far = ours(q, pool.view(pages, PAGE, 1, indexer.DIM + 4), weights, lengths, table, width)[0, :300]
    return None if torch.equal(near, far) else "pages beyond 4 GiB are read wrongly"


def checks() -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Hazards by the numbers of NOTES.md, and lengths at every edge."""
    for length in (1, 15, 16, 17, 63, 64, 65, 129, 1000, 5000):
        yield f"h19 length {length}", lambda length=length: difference(case([length], 8192))
    yield "h06 h07 empty rows", lambda: difference(case([0, 0, 1, 0, 700, 1], 1024))
    yield "h08 h09 h14 NaN around every token", lambda: difference(case([1, 63, 65, 130, 4000], 8192))
    for pitch in (indexer.PAGE_BYTES + 16, 1_002_240):
        yield f"h12 page pitch {pitch}", lambda pitch=pitch: difference(case([200, 130], 512, pitch=pitch))
    yield "h13 pages beyond 4 GiB", _far_pages
    yield "64 rows", lambda: difference(case([random.Random(i).randint(0, 3000) for i in range(64)], 16_384))
    yield "700 rows", lambda: difference(case([(i * 7) % 201 for i in range(700)], 512))
    yield "four rows a request", lambda: difference(case([base + i for base in (500, 0, 63) for i in range(4)], 1024, 4), 4)


def _fused_replays() -> str | None:
    rows, width = 3, 40_000
    q, cache, weights, lengths, table, _width = made = case([width] * rows, width)
    live = torch.ones_like(lengths)
    logits = torch.empty(rows, width, device="cuda")
    slots = torch.empty(rows, K, dtype=torch.int32, device="cuda")
    raw = torch.empty_like(slots)

    def step() -> None:
        indexer.fused_launch(q, cache, weights, live, table, logits, slots, PAGE, raw)

    return topk_contest.replays(step, ours(*made), live, table, raw)


def fused_checks() -> Iterator[tuple[str, Callable[[], str | None]]]:
    """The pair against a sort of the indexer's own logits, which its own checks hold against the reference."""
    for lengths in ([1024], [0, 1, 512, 513, 511], [16_384, 16_385, 16_400, 20_000], [131_071, 3, 40_000], [131_072]):
        yield f"lengths {lengths}", lambda lengths=lengths: fused_difference(case(lengths, 131_072))
    yield "a narrow table", lambda: fused_difference(case([3000, 4096, 100], 4096))
    yield "four rows a request", lambda: fused_difference(
        case([base + i for base in (600, 17_000, 510) for i in range(4)], 131_072, 4), 4
    )
    yield "h10 h11 graph replays at changing lengths", _fused_replays


def scorers(rows: int) -> dict[str, Callable | None]:
    """Returns the engine's and other indexers: fn(q, cache, weights, lengths, table, width) -> logits, None if missing."""
    return {"tilelang": contestants.indexer_tilelang(rows), "deepgemm": contestants.indexer_deepgemm()}


def timed_case(cell: Cell, deployment: Deployment) -> tuple:
    """Returns the inputs of a cell, without poison: peers may read padding."""
    width = deployment.context_length // RATIO
    return case(topk_contest.lengths_of(cell.rows, cell.length and cell.length // RATIO, width), width, poison=False)


def beside_ours(made: tuple) -> Callable[[torch.Tensor], float]:
    """Returns what gives a contestant's relative error beside ours, over the valid entries."""
    expected = ours(*made)
    valid = torch.arange(made[5], device="cuda")[None] < made[3][:, None]
    scale = expected[valid].norm()
    return lambda got: float((got[:, : made[5]] - expected)[valid].norm() / scale)


def bout(cell: Cell, deployment: Deployment) -> Bout:
    """Returns the indexers over one cell; a contestant's logits are compared with ours, which the self-test proved."""
    made = timed_case(cell, deployment)
    off = beside_ours(made)

    def fault(_name: str, got: torch.Tensor) -> str | None:
        error = off(got)
        return None if error <= PEER_TOLERANCE else f"logits off by {error:.2g}"

    works = {"ours": lambda: ours(*made)}
    works |= {name: lambda call=call: call(*made) for name, call in scorers(cell.rows).items() if call is not None}
    return Bout(works, fault)


def fused_bout(cell: Cell, deployment: Deployment) -> Bout:
    """Returns the fused pair and every pair of separate kernels that could run in its place."""
    made = timed_case(cell, deployment)
    _q, _cache, _weights, lengths, table, width = made
    expected = ours(*made)
    past = torch.arange(width, device="cuda")[None] >= lengths[:, None]
    expected.masked_fill_(past, float("-inf"))
    best = torch.topk(expected, K, dim=1).values.sort(1).values
    # which token a slot belongs to: the inverse of each row's page table
    place = torch.full((int(table.max()) + 1,), 0, dtype=torch.int64, device="cuda")

    def fault(_name: str, out: torch.Tensor) -> str | None:
        worst = 0.0
        for row in range(cell.rows):
            used = -(-int(lengths[row]) // PAGE)
            place[table[row, :used].long()] = torch.arange(used, device="cuda")
            slots = out[row][out[row] >= 0].long()
            tokens = place[slots // PAGE] * PAGE + slots % PAGE
            if tokens.numel() != min(K, int(lengths[row])):
                return f"row {row}: {tokens.numel()} tokens selected"
            got, want = expected[row][tokens].sort().values, best[row, -tokens.numel() :]
            worst = max(worst, float((got - want).norm() / want.norm()))
        return None if worst <= PEER_TOLERANCE else f"selected scores off by {worst:.2g}"

    def fused(out: torch.Tensor) -> None:
        logits = torch.empty(cell.rows, width, device="cuda")
        indexer.fused_launch(*made[:5], logits, out, PAGE)

    works = {"ours": topk_contest.selecting(cell.rows, fused)}
    arch = _torch.capability(0)
    stock_indexer, stock_topk = INDEXER[arch], topk_contest.TOPK[arch]
    scorer, selector = scorers(cell.rows).get(stock_indexer), topk_contest.selectors().get(stock_topk)
    firsts = {"ours": ours} | ({stock_indexer: scorer} if scorer else {})
    seconds = {"ours": topk.launch} | ({stock_topk: selector} if selector else {})
    for first, score in firsts.items():
        for second, choose in seconds.items():
            works[f"{first} + {second}"] = topk_contest.selecting(
                cell.rows, lambda out, score=score, choose=choose: choose(score(*made), lengths, table, out, PAGE)
            )
    return Bout(works, fault)


# what the engine runs by itself, by architecture
INDEXER = {"sm_120a": "tilelang", "sm_90": "deepgemm"}
# the engine's own pair first, then the pairs that may serve in its place when one half of it is ours
PAIRS = {
    arch: tuple(f"{first} + {second}" for first in (INDEXER[arch], "ours") for second in (topk_contest.TOPK[arch], "ours"))
    for arch in INDEXER
}
CONTESTS = [
    Contest("indexer", checks, topk_contest.cells, bout, {arch: (name,) for arch, name in INDEXER.items()}),
    Contest("indexer_topk", fused_checks, topk_contest.cells, fused_bout, PAIRS),
]
