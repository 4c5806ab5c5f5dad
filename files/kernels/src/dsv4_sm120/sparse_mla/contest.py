# SPDX-License-Identifier: Apache-2.0
"""How sparse-MLA decode is proved and timed on the GPU where it is to serve."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from dsv4_sm120 import contestants, sparse_mla, timing
from dsv4_sm120.contests import Bout, Cell, Contest, Deployment
from dsv4_sm120.sparse_mla import reference

SCALE = 512**-0.5
WINDOW, SELECTED = 128, 512
# bf16 output alone is 1.66e-3 away from float64
TOLERANCE = 1.85e-3
# of a contestant: bf16 or fp8 probabilities are allowed
PEER_TOLERANCE = 2e-2
# tokens a pool of a timed case holds, more than an L2 does
POOL = 200_000
# tokens of context in a token of a layer's second cache, and its page
COMPRESSED = {"c4": (4, 64), "c128": (128, 2)}


def case(
    rows: int,
    heads: int,
    scopes: list[tuple[int, int, int]],
    lengths: list[list[int]] | None = None,
    holes: float = 0.1,
    pitch: int = 0,
    spread: int = 2,
    sink: bool = True,
    seed: int = 0,
    device: str = "cuda",
) -> dict:
    """Returns a random call over scopes of (page tokens, pages, index width).

    lengths: one list for each scope, random ones if None. holes: the share of -1 among the indices. pitch: bytes between pages
    beside their own. spread: how far exponents of the cache's scales lie apart.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    q = torch.randn(rows, heads, 512, device=device, generator=generator).to(torch.bfloat16)
    call = {"q": q, "attn_sink": torch.randn(heads, device=device, generator=generator) if sink else None}
    names = (("k_cache", "indices", "topk_length"), ("extra_k_cache", "extra_indices", "extra_topk_length"))
    for number, (tokens, pages, width) in enumerate(scopes):
        cache = reference.random_cache(pages, tokens, reference.page_bytes(tokens) + pitch, device, spread, generator)
        indices = torch.randint(0, pages * tokens, (rows, width), device=device, generator=generator).int()
        indices[torch.rand(rows, width, device=device, generator=generator) < holes] = -1
        length = torch.randint(0, width + 1, (rows,), device=device, generator=generator).int()
        if lengths is not None:
            length = torch.tensor(lengths[number], dtype=torch.int32, device=device)
        call.update(zip(names[number], (cache, indices, length)))
    return call


def expected(call: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and LSE of a call in float64, row by row for the sake of memory."""
    outs = []
    for row in range(call["q"].shape[0]):
        at = slice(row, row + 1)
        scopes = [(call["k_cache"], call["indices"][at], call["topk_length"][at])]
        if "extra_k_cache" in call:
            scopes.append((call["extra_k_cache"], call["extra_indices"][at], call["extra_topk_length"][at]))
        outs.append(reference.attention(call["q"][at], scopes, call["attn_sink"], SCALE))
    return torch.cat([out for out, _lse in outs]), torch.cat([lse for _out, lse in outs])


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Returns how far an output is off as a whole, relative to what it should be."""
    want = want.double()
    return float((out.double().view_as(want) - want).norm() / want.norm().clamp(min=1e-30))


def fault(found: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> str | None:
    """Returns in what output and LSE differ from float64's beyond rounding, None when in nothing."""
    (out, lse), (want_out, want_lse) = found, want
    empty = want_lse == float("-inf")
    if out.isnan().any():
        return "NaN in the output"
    if not torch.equal(lse == float("-inf"), empty) or (out[empty] != 0).any():
        return "rows without a token are not 0 and -inf"
    if (off := error(out, want_out)) >= TOLERANCE:
        return f"output off by {off:.3g}"
    # float32 itself, where scores are in the thousands
    past = ((lse.double() - want_lse).abs() - (want_lse.abs() * 2e-6).clamp(min=1e-3))[~empty]
    return f"LSE off by {float(past.max()):.3g} more than allowed" if past.numel() and past.max() >= 0 else None


def difference(call: dict, want: tuple[torch.Tensor, torch.Tensor] | None = None) -> str | None:
    """Returns what the kernel computes otherwise than float64, None when nothing."""
    return fault(sparse_mla.sparse_mla_decode(**call), want or expected(call))


SCOPES = {
    "swa": [(256, 40, 128)],
    "c4": [(256, 40, 128), (64, 300, 512)],
    "c4 with 64-token window pages": [(64, 160, 128), (64, 300, 512)],
    "c128": [(256, 40, 128), (2, 9000, 512)],
    "c128 long": [(256, 40, 128), (2, 9000, 4096)],
}


def holes() -> str | None:
    """Slots of NaN behind -1 and behind the length must not be seen (hazards 3 and 4)."""
    call = case(4, 16, SCOPES["c4"], holes=0.4, lengths=[[128, 0, 7, 64], [512, 0, 100, 1]])
    want = expected(call)
    for cache, indices, length in (("k_cache", "indices", "topk_length"), ("extra_k_cache", "extra_indices", "extra_topk_length")):
        listed, counts = call[indices], call[length]
        used = torch.arange(listed.shape[1], device="cuda") < counts[:, None]
        live = set(listed[used & (listed >= 0)].tolist())
        tokens = call[cache].shape[1]
        dead = [slot for slot in range(call[cache].shape[0] * tokens) if slot not in live]
        rows, scales = reference.sections(call[cache])
        slots = torch.tensor(dead, device="cuda")
        rows[slots // tokens, slots % tokens] = 0xFF
        scales[slots // tokens, slots % tokens] = 0xFF
    return difference(call, want)


def replays(turns: int, every: int) -> str | None:
    """Replays a step of two layers, captured at length 1, at changing lengths; says which replay is wrong, if any.

    The second layer finds the plan that the first one made. Each `every` replays both are held against float64 and against a
    call outside of the graph (hazards 10 and 11).
    """
    call = case(6, 16, SCOPES["c128 long"], holes=0.02)
    call["topk_length"].fill_(1), call["extra_topk_length"].fill_(1)
    layers = []

    def step():
        layers[:] = sparse_mla.sparse_mla_decode(**call), sparse_mla.sparse_mla_decode(**call)

    graph = timing.capture(step)
    generator = torch.Generator(device="cuda").manual_seed(1)
    most = torch.tensor([4097, 2, 600, 4097, 33, 4097], device="cuda")
    for turn in range(turns):
        draw = torch.rand(6, device="cuda", generator=generator)
        call["extra_topk_length"].copy_((draw * most).int())
        call["topk_length"].copy_((draw * 129).int())
        graph.replay()
        if turn % every == 0:
            first, again = layers
            if not torch.equal(first[0], again[0]) or not torch.equal(first[1], again[1]):
                return f"replay {turn}: two layers of one step differ"
            if found := fault(first, expected(call)):
                return f"replay {turn}: {found}"
            eager = sparse_mla.sparse_mla_decode(**call)
            if not torch.equal(eager[0], first[0]) or not torch.equal(eager[1], first[1]):
                return f"replay {turn}: a call outside of the graph differs"
    return None


def padded_heads() -> str | None:
    """NaN in heads that only fill up a tile must stay there (hazard 26)."""
    call = case(3, 64, SCOPES["c4"])
    want = sparse_mla.sparse_mla_decode(**call)[0]
    call["q"] = call["q"].clone()
    call["q"][:, 13:] = float("nan")
    out = sparse_mla.sparse_mla_decode(**call)[0]
    if not torch.equal(out[:, :13], want[:, :13]):
        return "NaN of padded heads reaches real ones"
    return None if out[:, 13:].isnan().all() else "NaN of a query does not come out"


def checks() -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Hazards by the numbers of NOTES.md, over heads, rows and kinds of layer."""
    for name, scopes in SCOPES.items():
        for rows, heads in ((1, 16), (3, 8), (16, 64), (65, 32)):
            yield f"{name}, {rows} rows, {heads} heads", lambda r=rows, h=heads, s=scopes: difference(case(r, h, s, seed=r + h))
    empty = [[0, 0, 5], [0, 512, 0]]
    yield "h02 h05 empty rows", lambda: difference(case(3, 16, SCOPES["c4"], lengths=empty))
    yield "h03 h04 NaN behind -1 and behind the length", holes
    yield "h12 page pitch", lambda: difference(case(4, 16, SCOPES["c4"], pitch=576 * 3 + 16))
    yield "h10 h11 graph replays at changing lengths", lambda: replays(200, 20)
    yield "h26 padded heads", padded_heads


def cells(deployment: Deployment) -> list[Cell]:
    """Returns the shapes of a deployment's attention calls: window alone, with 512 selected tokens, with all of c128."""
    found = []
    for heads in deployment.heads:
        for rows in deployment.rows:
            found.append(Cell("swa", rows, deployment.context_length, heads))
            found.append(Cell("c4", rows, deployment.context_length, heads))
            lengths = [n for n in deployment.contexts() if rows > 1 or n is not None]
            found += [Cell("c128", rows, length, heads) for length in lengths]
    return found


@functools.cache
def _pool(page: int) -> torch.Tensor:
    """A pool that is shared by the cells of one process."""
    generator = torch.Generator(device="cuda").manual_seed(page)
    return reference.random_cache(-(-POOL // page), page, device="cuda", generator=generator)


def timed_call(cell: Cell, deployment: Deployment, seed: int = 0) -> dict:
    """Returns one layer's call: a window of neighbours, other tokens spread over the pool."""
    rows = cell.rows
    generator = torch.Generator(device="cuda").manual_seed(rows + seed)
    start = torch.randint(0, POOL // 256 - 1, (rows, 1), device="cuda", generator=generator) * 256
    call = {
        "q": torch.randn(rows, cell.heads, 512, device="cuda", generator=generator).bfloat16(),
        "k_cache": _pool(256),
        "indices": (start + torch.arange(WINDOW, device="cuda")).int(),
        "topk_length": torch.full((rows,), WINDOW, device="cuda", dtype=torch.int32),
        "attn_sink": torch.randn(cell.heads, device="cuda", generator=generator),
    }
    if cell.variant == "swa":
        return call
    ratio, page = COMPRESSED[cell.variant]
    most = deployment.context_length // ratio
    width = SELECTED if cell.variant == "c4" else -(-most // 64) * 64
    if cell.length is None:
        lengths = [max(1, most >> (2 * (i % 4))) for i in range(rows)]
    else:
        lengths = [min(width, cell.length // ratio)] * rows
    indices = torch.full((rows, width), -1, device="cuda", dtype=torch.int32)
    for row, length in enumerate(lengths):
        indices[row, :length] = torch.randperm(POOL, device="cuda", generator=generator)[:length].int()
    call |= {"extra_k_cache": _pool(page), "extra_indices": indices}
    call["extra_topk_length"] = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    return call


def engine_call(call: dict) -> dict:
    """Returns the same call in the engine's words."""
    words = {
        "q": call["q"].unsqueeze(1),
        "k_cache": call["k_cache"].view(torch.float8_e4m3fn),
        "head_dim_v": 512,
        "softmax_scale": SCALE,
        "indices": call["indices"].unsqueeze(1),
        "topk_length": call["topk_length"],
        "attn_sink": call["attn_sink"],
        "extra_k_cache": None,
        "extra_indices_in_kvcache": None,
        "extra_topk_length": None,
    }
    if "extra_k_cache" in call:
        words["extra_k_cache"] = call["extra_k_cache"].view(torch.float8_e4m3fn)
        words["extra_indices_in_kvcache"] = call["extra_indices"].unsqueeze(1)
        words["extra_topk_length"] = call["extra_topk_length"]
    return words


def bout(cell: Cell, deployment: Deployment) -> Bout:
    """Returns the contestants over one layer's call, each compared with float64."""
    call = timed_call(cell, deployment)
    words = engine_call(call)
    want, _lse = expected(call)

    def judge(name: str, result: tuple) -> str | None:
        off = error(result[0], want)
        return None if off < (TOLERANCE if name == "ours" else PEER_TOLERANCE) else f"output off by {off:.2g}"

    works = {"ours": lambda: sparse_mla.flash_mla_with_kvcache_sm120(**words)}
    for name, peer in (("engine", contestants.attention_engine()), ("flashmla", contestants.attention_flashmla())):
        if peer is not None:
            works[name] = lambda peer=peer: peer(**words)
    return Bout(works, judge)


CONTESTS = [Contest("sparse_mla", checks, cells, bout, {"sm_120a": ("engine",), "sm_90": ("flashmla",)})]
