# SPDX-License-Identifier: Apache-2.0
"""What the indexer must give, in float64 on the CPU."""

from __future__ import annotations

import torch

# Of the sum of magnitudes: fp32 sums of 128 exact products and 64 terms.
FP32 = 1e-6
# Of a head's term: half a unit in the last place of fp16, to which the sm_90 code rounds it.
FP16 = 2.0**-11


def paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (logits, magnitudes, terms), all [rows, max_seq_len] float64, NaN past a row's length.

    Arguments as the launcher takes them. The scales of what rounding can do to a logit: magnitudes is the same sum over
    absolute values of all products, terms over those of the heads' terms.
    """
    rows = q.shape[0]
    logits = torch.full((rows, max_seq_len), float("nan"), dtype=torch.float64)
    magnitudes, terms = logits.clone(), logits.clone()
    for row in range(rows):
        length = max(0, int(seq_lens[row]))
        if not length:
            continue
        used = page_table[row, : -(-length // 64)].to(kv_cache.device).long()
        pages = kv_cache[used].reshape(used.numel(), 64 * 132).cpu()
        keys = pages[:, : 64 * 128].contiguous().view(torch.float8_e4m3fn).double().view(-1, 128)[:length]
        scales = pages[:, 64 * 128 :].contiguous().view(torch.float32).double().view(-1)[:length]
        heads = q[row, 0].cpu().double()
        products = keys @ heads.T
        weight = weights[row].cpu().double()
        logits[row, :length] = (products.relu() * weight).sum(1) * scales
        terms[row, :length] = (products.relu() * weight.abs()).sum(1) * scales.abs()
        magnitudes[row, :length] = ((keys.abs() @ heads.abs().T) * weight.abs()).sum(1) * scales.abs()
    return logits, magnitudes, terms


def allowance(magnitudes: torch.Tensor, terms: torch.Tensor, major: int) -> torch.Tensor:
    """Returns how far each logit may be off in the code for GPUs of compute capability `major`."""
    return FP32 * magnitudes + (FP16 * terms if major < 12 else 0)
