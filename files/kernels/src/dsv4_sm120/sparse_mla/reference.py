# SPDX-License-Identifier: Apache-2.0
"""What the kernel has to compute, in float64; the cache's bytes; and the split plan in plain Python."""

from __future__ import annotations

import torch

NOPE = 448
ROPE = 64
GROUP = 64
GROUPS = NOPE // GROUP
ROW_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = 8
TOKEN_BYTES = ROW_BYTES + SCALE_BYTES


def page_bytes(tokens: int) -> int:
    """Returns the pitch of a dense pool's page: rows, then scales, padded to a multiple of 576."""
    return -(-tokens * TOKEN_BYTES // ROW_BYTES) * ROW_BYTES


def empty_cache(pages: int, tokens: int, pitch: int | None = None, fill: int = 0xFF, device="cpu") -> torch.Tensor:
    """Returns the engine's view [pages, tokens, 1, 584] uint8 of a pool whose every byte is `fill` (0xFF: NaN everywhere)."""
    pitch = page_bytes(tokens) if pitch is None else pitch
    raw = torch.full((pages * pitch,), fill, dtype=torch.uint8, device=device)
    return raw.as_strided((pages, tokens, 1, TOKEN_BYTES), (pitch, TOKEN_BYTES, TOKEN_BYTES, 1))


def sections(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns writable views of a cache's bytes: rows [pages, tokens, 576] and scales [pages, tokens, 8]."""
    pages, tokens = cache.shape[:2]
    pitch, start = cache.stride(0), cache.storage_offset()
    bytes_ = cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
    rows = bytes_.as_strided((pages, tokens, ROW_BYTES), (pitch, ROW_BYTES, 1), start)
    scales = bytes_.as_strided((pages, tokens, SCALE_BYTES), (pitch, SCALE_BYTES, 1), start + tokens * ROW_BYTES)
    return rows, scales


def write(cache: torch.Tensor, slots: torch.Tensor, nope: torch.Tensor, scales: torch.Tensor, rope: torch.Tensor) -> None:
    """Writes tokens: slots [n] int64, nope [n, 448] e4m3 codes (uint8), scales [n, 7] ue8m0 (uint8), rope [n, 64] bf16.

    The scale section's eighth byte is left as it was, as the engine leaves it.
    """
    rows, exponents = sections(cache)
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    rows[page, offset, :NOPE] = nope
    rows[page, offset, NOPE:] = rope.contiguous().view(torch.uint8).view(-1, 2 * ROPE)
    exponents[page, offset, :GROUPS] = scales


def quantise(latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantises latents [n, 512] as the engine does: per 64 values the smallest power of two that fits e4m3.

    Returns nope codes [n, 448] uint8, scales [n, 7] uint8, rope [n, 64] bf16.
    """
    nope = latent[:, :NOPE].double().view(-1, GROUPS, GROUP)
    largest = nope.abs().amax(-1).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(largest / 448.0))
    codes = (nope / torch.exp2(exponent).unsqueeze(-1)).float().to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.view(-1, NOPE), (exponent + 127).to(torch.uint8), latent[:, NOPE:].to(torch.bfloat16)


def random_cache(pages: int, tokens: int, pitch: int | None = None, device="cpu", spread: int = 2, generator=None) -> torch.Tensor:
    """Returns a pool of random tokens, exponents within `spread` of 2^-2; unused bytes are 0xFF, among them each token's
    eighth scale byte."""
    cache = empty_cache(pages, tokens, pitch, device=device)
    rows, scales = sections(cache)
    shape = (pages, tokens)
    nope = torch.randn(*shape, NOPE, device=device, generator=generator)
    rows[..., :NOPE] = nope.to(torch.float8_e4m3fn).view(torch.uint8)
    rope = torch.randn(*shape, ROPE, device=device, generator=generator).to(torch.bfloat16)
    rows[..., NOPE:] = rope.view(torch.uint8)
    exponents = torch.randint(126 - spread, 127 + spread, (*shape, GROUPS), device=device, generator=generator)
    scales[..., :GROUPS] = exponents.to(torch.uint8)
    return cache


def gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the dequantised latents [..., 512] float64 of token numbers `slots` (any shape, none negative)."""
    rows, scales = sections(cache)
    page, offset = slots.long() // cache.shape[1], slots.long() % cache.shape[1]
    data, exponents = rows[page, offset], scales[page, offset][..., :GROUPS]
    nope = data[..., :NOPE].contiguous().view(torch.float8_e4m3fn).double()
    scale = torch.exp2(exponents.double() - 127)
    # ue8m0 has no infinity: 255 is NaN
    scale = torch.where(exponents == 255, torch.full_like(scale, float("nan")), scale)
    nope = nope.view(*nope.shape[:-1], GROUPS, GROUP) * scale.unsqueeze(-1)
    rope = data[..., NOPE:].contiguous().view(torch.bfloat16).double()
    return torch.cat([nope.flatten(-2), rope], -1)


def attention(
    q: torch.Tensor,
    scopes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    sink: torch.Tensor | None = None,
    scale: float = 512**-0.5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [rows, heads, 512] and lse [rows, heads], float64, for q [rows, heads, 512] and (cache, indices, lengths)s.

    indices [rows, width] (negative: skipped), lengths [rows] or None. One softmax over all scopes; the sink adds exp(sink)
    to its sum and nothing to lse; a row without a valid token gives 0 and -inf.
    """
    keys, masks = [], []
    for cache, indices, lengths in scopes:
        indices = indices.reshape(q.shape[0], -1)
        valid = indices >= 0
        if lengths is not None:
            valid &= torch.arange(indices.shape[1], device=q.device) < lengths.reshape(-1, 1)
        found = gather(cache, indices.clamp(min=0))
        # what a masked entry points at must not matter, be it NaN
        keys.append(torch.where(valid.unsqueeze(-1), found, torch.zeros_like(found)))
        masks.append(valid)
    k, valid = torch.cat(keys, 1), torch.cat(masks, 1)
    scores = torch.einsum("bhd,btd->bht", q.double(), k) * scale
    scores = scores.masked_fill(~valid.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double()[: q.shape[1]].expand_as(lse))
    weights = torch.exp(scores - total.unsqueeze(-1)).masked_fill(~valid.unsqueeze(1), 0.0)
    return torch.einsum("bht,btd->bhd", weights, k), lse


def split_query(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits queries [..., 448] bf16 into two e4m3 parts with a power-of-two scale per block of 32, as the block-scaled form does.

    Returns upper and lower parts [..., 7, 4, 2, 8] and exponents [..., 7, 1, 2, 1]: q = (upper + lower / 16) * 2^exponent. The last
    four dimensions are the group, a quarter of its dimensions, the block, and 8 neighbouring dimensions: a block takes 8 of every 16.
    """
    blocks = q.float().view(*q.shape[:-1], GROUPS, 4, 2, 8)
    mantissa, exponent = torch.frexp(blocks.abs().amax((-3, -1), keepdim=True))
    # the smallest power of two that brings the largest to 448 = 0.875 * 2^9 or below
    exponent = torch.where(mantissa == 0, torch.full_like(exponent, -120), exponent - 9 + (mantissa > 0.875).int()).clamp(min=-120)
    scaled = torch.ldexp(blocks, -exponent)
    upper = scaled.to(torch.float8_e4m3fn)
    lower = ((scaled - upper.float()) * 16).to(torch.float8_e4m3fn)
    return upper, lower, exponent


def plan(tiles: list[int], budget: int, least: int) -> list[tuple[int, int, int, int, int, int]]:
    """Returns what the plan kernel writes for rows of `tiles` tiles: (row, begin, end, part, parts, first slot) a unit.

    Every row has at least one unit, there are at most `budget` (>= rows), and none is longer than the smallest size with
    which that holds, or than `least`.
    """
    size = max([1, *tiles])
    size = next(c for c in range(min(least, size), size + 1) if sum(max(1, -(-n // c)) for n in tiles) <= budget)
    units, slots = [], 0
    for row, n in enumerate(tiles):
        parts = max(1, -(-n // size))
        for part in range(parts):
            units.append((row, n * part // parts, n * (part + 1) // parts, part, parts, slots))
        slots += parts if parts > 1 else 0
    return units
