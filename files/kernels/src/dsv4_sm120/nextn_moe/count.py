# SPDX-License-Identifier: Apache-2.0
"""Counts rows that hold a NaN, in one launch. Imports Triton, so it is imported at the first call."""

from __future__ import annotations

import triton
import triton.language as tl

# few loads wait for one another, and none of their registers spills (NOTES.md)
BLOCK = 16384
WARPS = 32


@triton.jit
def _count_kernel(values, slots, counts, columns, pitch, step, PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    real = True
    if PADDED:
        real = tl.load(slots + row * step) >= PAGE
    if real:
        bad = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(values + row * pitch + column, mask=column < columns, other=0.0).to(tl.float32)
            bad |= (value != value).to(tl.int32)  # NaN alone; pylint: disable=comparison-with-itself
        tl.atomic_add(counts, 1)
        tl.atomic_add(counts + 1, tl.max(bad, 0).to(tl.int64))


def count(values, slots, counts, page: int) -> None:
    """Adds to counts (int64: rows, rows with a NaN) what the rows of values hold; those with a slot below page are left out.

    slots is None when every row counts. A block reads a row: logits have just been written and lie in L2.
    """
    values = values.flatten(1)
    if values.stride(1) != 1:
        values = values.contiguous()
    _count_kernel[(values.shape[0],)](
        values,
        counts if slots is None else slots,
        counts,
        values.shape[1],
        values.stride(0),
        0 if slots is None else slots.stride(0),
        PADDED=slots is not None,
        PAGE=page,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
