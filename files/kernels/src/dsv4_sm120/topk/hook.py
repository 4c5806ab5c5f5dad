# SPDX-License-Identifier: Apache-2.0
"""Top-k in the engine, alone or as the second half of the fused pair."""

from __future__ import annotations

from .. import _lib, operation, topk
from ..operation import Operation, Site

TARGET = "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged"


def around(original, scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices=None):
    """AROUND hook for the engine's topk_transform_paged."""
    from ..indexer import hook as indexer_hook

    if indexer_hook.finish(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices):
        return None
    if operation.enabled("topk", scores.shape[0]):
        reason = topk.refusal(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)
        if reason is None:
            try:
                topk.launch(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)
                return None
            except _lib.KernelError as error:
                operation.failed("topk", error)
        else:
            operation.fell_back("topk", reason)
    return original(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


SITE = Site(TARGET, around)
OPERATIONS = [Operation("topk", ("topk",), (SITE,))]
