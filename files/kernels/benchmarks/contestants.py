# SPDX-License-Identifier: Apache-2.0
"""What the indexer is timed against beside the contests' own: two that no deployment would run.

A loader returns None, with its reason in `absent`, when a contestant is missing.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from dsv4_sm120.contestants import absent

__all__ = ["absent", "indexer_torch", "indexer_triton"]


def indexer_triton():
    """Returns the Triton version of our indexer: fn(q, cache, weights, lengths, table, width) -> logits."""
    try:
        import triton_indexer
    except Exception as error:  # noqa: BLE001
        absent["triton"] = str(error).splitlines()[0][:120]
        return None
    return triton_indexer.logits


def indexer_torch(q, cache, weights, lengths, table, width):
    """The O(max context) computation of SGLang's torch fallback, written out: gathers every page of the table."""
    rows, pages = q.shape[0], -(-width // 64)
    gathered = cache.view(cache.shape[0], -1)[table[:, :pages].clamp(min=0)]
    keys = gathered[..., :8192].contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16).view(rows, pages * 64, 128)
    scales = gathered[..., 8192:].contiguous().view(torch.float32).view(rows, pages * 64)
    scores = functional.relu(torch.bmm(keys, q[:, 0].to(torch.bfloat16).transpose(1, 2)))
    scores = (scores * weights.unsqueeze(1)).sum(2) * scales
    logits = scores.new_full((rows, width), float("-inf"))
    logits[:, : pages * 64] = scores[:, :width]
    past = torch.arange(width, device=q.device)[None] >= lengths[:, None]
    return logits.masked_fill_(past, float("-inf"))
