# SPDX-License-Identifier: Apache-2.0
"""What top-k must give, written for clearness: a stable sort on the CPU."""

from __future__ import annotations

import torch


def topk_transform_paged(
    scores: torch.Tensor, seq_lens: torch.Tensor, page_tables: torch.Tensor, k: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (slots, raw), both [rows, k] int32 on the CPU; arguments as the kernel's launcher takes them.

    The k largest of a row's first seq_lens scores, ties to the lower index, written in ascending index order, -1 after.
    """
    rows = scores.shape[0]
    slots = torch.full((rows, k), -1, dtype=torch.int32)
    raw = torch.full((rows, k), -1, dtype=torch.int32)
    for row in range(rows):
        length = max(0, int(seq_lens[row]))
        # adding zero makes -0 and +0 one value; the sort is stable, so equal scores stay in index order
        values = scores[row, :length].cpu().double() + 0.0
        chosen = torch.sort(values, descending=True, stable=True).indices[:k].sort().values
        table = page_tables[row].cpu().long()
        raw[row, : chosen.numel()] = chosen.int()
        slots[row, : chosen.numel()] = (table[chosen // page_size] * page_size + chosen % page_size).int()
    return slots, raw
