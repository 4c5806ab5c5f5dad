# SPDX-License-Identifier: Apache-2.0
"""The indexer in Triton, a contestant: split-K over pages with early exit at the actual length.

Timed, and not what the plugin uses: src/dsv4_sm120/indexer/NOTES.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS, DIM, PAGE = 64, 128, 64


@triton.jit
def _logits(
    q_ptr, k_ptr, scale_ptr, weight_ptr, length_ptr, table_ptr, out_ptr,
    pitch, scale_pitch, table_stride, out_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(length_ptr + row)
    pages = tl.cdiv(length, PAGE)
    share = tl.cdiv(pages, tl.num_programs(1))
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, pages)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    tokens = tl.arange(0, PAGE)
    # heads as columns: keys are the left operand
    q = tl.load(q_ptr + row.to(tl.int64) * HEADS * DIM + heads[None, :] * DIM + dims[:, None])
    weight = tl.load(weight_ptr + row * HEADS + heads)
    for number in range(first, last):
        page = tl.load(table_ptr + row.to(tl.int64) * table_stride + number).to(tl.int64)
        keys = tl.load(k_ptr + page * pitch + tokens[:, None] * DIM + dims[None, :])
        scale = tl.load(scale_ptr + page * scale_pitch + tokens)
        products = tl.dot(keys, q, out_dtype=tl.float32)
        logit = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1) * scale
        index = number * PAGE + tokens
        tl.store(out_ptr + row.to(tl.int64) * out_stride + index, logit, mask=index < length)


def logits(q, cache, weights, lengths, table, width, splits=None):
    """Returns logits [rows, width] fp32, unwritten past each length; arguments as dsv4_sm120.indexer takes them."""
    rows = q.shape[0]
    out = torch.empty((rows, width), dtype=torch.float32, device=q.device)
    pitch = cache.stride(0)
    flat = torch.as_strided(cache, (cache.shape[0], pitch), (pitch, 1))
    keys = flat.view(torch.float8_e4m3fn)
    scales = flat.view(torch.float32)[:, PAGE * DIM // 4 :]
    # two waves of programs on the largest target
    splits = splits or max(1, min(-(-width // PAGE), 376 // rows))
    grid = (rows, splits)
    _logits[grid](
        q,
        keys,
        scales,
        weights,
        lengths,
        table,
        out,
        pitch,
        pitch // 4,
        table.stride(0),
        out.stride(0),
        HEADS,
        DIM,
        PAGE,
    )
    return out
