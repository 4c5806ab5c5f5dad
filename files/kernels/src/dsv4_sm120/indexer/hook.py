# SPDX-License-Identifier: Apache-2.0
"""The indexer in the engine, alone and fused with top-k.

Fusing needs both halves' arguments at once, and the engine calls them one after the other inside forward_c4_indexer,
handing the logits straight to top-k. So while that function runs and its top-k will be the hooked one, the logits hook
launches nothing: it returns an empty buffer and keeps the arguments, and the top-k hook launches both. If anything else
had become of that buffer, the arguments would still be there at the end, and that is an error.
"""

from __future__ import annotations

import os
import threading

from .. import _lib, indexer, operation, topk
from ..operation import Operation, Site
from ..topk.hook import SITE as TOPK_SITE

TILELANG = "sglang.kernels.ops.attention.dsa.tilelang_kernel.tilelang_fp8_paged_mqa_logits"
TORCH = "sglang.srt.layers.attention.dsv4.indexer.fp8_paged_mqa_logits_torch_sm120"
FORWARD = "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin.forward_c4_indexer"


class _Scope(threading.local):
    """What forward_c4_indexer is doing in this thread."""

    fusing = False
    next_n = 1
    pending = None


_scope = _Scope()


def rows_per_request(forward_batch, rows: int | None = None) -> int:
    """Returns how many consecutive rows share a request and should share its keys: the draft tokens of a verify step if
    DSV4_SM120_SHARE_KEYS is 1, else 1. The result does not depend on it; on an H200 sharing was slower (NOTES.md)."""
    if os.environ.get("DSV4_SM120_SHARE_KEYS") != "1":
        return 1
    mode = getattr(forward_batch, "forward_mode", None)
    if mode is None or not mode.is_target_verify():
        return 1
    count = getattr(getattr(forward_batch, "spec_info", None), "draft_token_num", 1) or 1
    return int(count) if 1 <= int(count) <= indexer.MAX_NEXT else 1


def logits_around(
    original, q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, clean_logits=True
):
    """AROUND hook for the engine's two paged indexers; both take and give the same."""
    rows = q_fp8.shape[0]
    name = "indexer_topk" if _scope.fusing and operation.enabled("indexer_topk", rows) else "indexer"
    if operation.enabled(name, rows):
        next_n = _scope.next_n if q_fp8.shape[0] % _scope.next_n == 0 else 1
        reason = "clean logits are wanted" if clean_logits else None
        reason = reason or indexer.refusal(q_fp8, kvcache_fp8, weight, seq_lens, page_table, max_seq_len, next_n)
        if reason is None:
            try:
                logits = weight.new_empty((q_fp8.shape[0], max_seq_len))
                arguments = (q_fp8, kvcache_fp8, weight, seq_lens, page_table, logits)
                if name == "indexer_topk":
                    _scope.pending = (arguments, next_n)
                else:
                    indexer.launch(*arguments, None, next_n)
                return logits
            except _lib.KernelError as error:
                operation.failed(name, error)
        else:
            operation.fell_back(name, reason)
    return original(q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, clean_logits)


def finish(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices) -> bool:
    """Launches what the logits hook kept, if these are its logits; returns whether top-k is done with it.

    Where the two cannot be fused the logits are computed now and top-k is left to its own hook.
    """
    pending = _scope.pending
    if pending is None or pending[0][5] is not scores:
        return False
    _scope.pending = None
    arguments, next_n = pending
    rest = (out_page_indices, page_size, out_raw_indices)
    same = arguments[3] is seq_lens or arguments[3].data_ptr() == seq_lens.data_ptr()
    same = same and arguments[4].data_ptr() == page_tables.data_ptr()
    reason = None if same else "indexer and top-k were given different lengths or tables"
    reason = reason or indexer.fused_refusal(*arguments, *rest, next_n)
    if reason is None:
        indexer.fused_launch(*arguments, *rest, next_n)
        return True
    operation.fell_back("indexer_topk", reason)
    indexer.launch(*arguments, None, next_n)
    if topk.refusal(scores, seq_lens, page_tables, *rest) is None:
        topk.launch(scores, seq_lens, page_tables, *rest)
        return True
    return False


def forward_around(original, self, *args, **kwargs):
    """AROUND hook for forward_c4_indexer: opens and closes the scope in which the pair may be fused."""
    batch = kwargs.get("forward_batch", args[3] if len(args) > 3 else None)
    backend = getattr(self, "dsa_topk_backend", None)
    ours = backend is not None and not (backend.is_torch() or backend.is_flashinfer() or backend.should_use_topk_v2())
    before = (_scope.fusing, _scope.next_n)
    _scope.fusing, _scope.next_n = ours, rows_per_request(batch)
    try:
        result = original(self, *args, **kwargs)
        if _scope.pending is not None:
            raise RuntimeError("dsv4_sm120: the indexer's logits went somewhere else than to top-k")
        return result
    finally:
        _scope.pending = None
        _scope.fusing, _scope.next_n = before


LOGITS_SITES = (Site(TILELANG, logits_around, needs="tilelang"), Site(TORCH, logits_around))
FORWARD_SITE = Site(FORWARD, forward_around)
OPERATIONS = [
    Operation("indexer", ("indexer",), LOGITS_SITES),
    Operation("indexer_topk", ("indexer", "topk"), (*LOGITS_SITES, TOPK_SITE, FORWARD_SITE)),
]
