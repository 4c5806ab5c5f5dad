# SPDX-License-Identifier: Apache-2.0
"""Indexer logits over the paged fp8 cache, alone or with the top-k behind them; see kernel.cu and NOTES.md."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from .. import _lib, topk

if TYPE_CHECKING:
    import torch

HEADS = 64
DIM = 128
PAGE = 64
PAGE_BYTES = PAGE * (DIM + 4)
MAX_REQUESTS = 1024
MAX_NEXT = 8
_POINTER = ctypes.c_void_p
_LONG = ctypes.c_longlong
_INT = ctypes.c_int
_ARGUMENTS = [_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _INT, _POINTER, _LONG]
_ARGUMENTS += [_POINTER, _LONG, _INT, _INT, _INT, _INT, _POINTER]


def refusal(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_seq_len: int,
    next_n: int = 1,
) -> str | None:
    """Returns why these arguments cannot go through this kernel, or None when they can. Reads no device memory."""
    import torch

    from .. import _torch

    device = q.device
    if kv_cache.dtype != torch.uint8 or kv_cache.device != device:
        return f"the cache is {kv_cache.dtype} on {kv_cache.device}"
    if kv_cache.dim() != 4 or tuple(kv_cache.shape[1:]) != (PAGE, 1, DIM + 4):
        return f"the cache has shape {tuple(kv_cache.shape)}"
    if kv_cache[0].numel() and not kv_cache[0].is_contiguous():
        return "a cache page is not dense"
    pitch = _torch.row_stride(kv_cache)
    if pitch >= 2**32:
        return f"cache pages lie {pitch} bytes apart"
    if pitch % 16 or kv_cache.data_ptr() % 16:
        return "cache pages are not aligned to 16 bytes"
    if reason := _torch.first_refusal(
        device,
        ("q", q, torch.float8_e4m3fn, 4),
        ("weights", weights, torch.float32, 2),
        ("seq_lens", seq_lens, torch.int32, 1),
        ("page_table", page_table, torch.int32, 2),
    ):
        return reason
    if _torch.row_stride(weights) % 2 or weights.data_ptr() % 8:
        return "weights are not aligned to 8 bytes"
    rows = q.shape[0]
    if tuple(q.shape[1:]) != (1, HEADS, DIM) or not q[0].is_contiguous() or q.data_ptr() % 16:
        return f"q has shape {tuple(q.shape)}, strides {q.stride()}"
    if _torch.row_stride(q) % 16:
        return "q rows are not aligned to 16 bytes"
    if tuple(weights.shape) != (rows, HEADS) or seq_lens.shape[0] != rows or page_table.shape[0] != rows:
        return "the tensors differ in rows"
    if not 1 <= next_n <= MAX_NEXT or rows < 1 or rows % next_n:
        return f"{rows} rows are not of {next_n} a request"
    if rows // next_n > MAX_REQUESTS:
        return f"more than {MAX_REQUESTS} requests"
    if max_seq_len < 1:
        return f"max_seq_len {max_seq_len}"
    return None


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    logits: torch.Tensor,
    maxima: torch.Tensor | None = None,
    next_n: int = 1,
    skip: int = 0,
) -> None:
    """Launches without checking. maxima: fp32 [rows, topk.maxima_stride(width)] to fill for top-k, or None; skip:
    rows of at most so many tokens get no scores."""
    from .. import _torch

    code = _lib.function("indexer", "dsv4_indexer", _ARGUMENTS)(
        q.data_ptr(),
        _torch.row_stride(q),
        kv_cache.data_ptr(),
        _torch.row_stride(kv_cache),
        weights.data_ptr(),
        _torch.row_stride(weights),
        seq_lens.data_ptr(),
        page_table.data_ptr(),
        _torch.row_stride(page_table),
        page_table.shape[1],
        logits.data_ptr(),
        _torch.row_stride(logits),
        maxima.data_ptr() if maxima is not None else None,
        maxima.shape[1] if maxima is not None else 0,
        q.shape[0] // next_n,
        next_n,
        skip,
        _torch.multiprocessors(q.device.index),
        _torch.stream(q),
    )
    _lib.check("indexer", "indexer logits", code)


def paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_seq_len: int,
    next_n: int = 1,
) -> torch.Tensor:
    """Returns logits [rows, max_seq_len] fp32; entries at and past a row's length are not written.

    q [rows, 1, 64, 128] e4m3; kv_cache [pages, 64, 1, 132] uint8, a page being 64 x 128 e4m3 and then 64 fp32 scales,
    pitch from stride(0); weights [rows, 64] fp32 with q's scale in them; seq_lens [rows] int32 in compressed tokens, 0
    allowed; page_table [rows, *] int32. next_n: so many consecutive rows share a request and its page table.
    logit[t] = scale[t] * sum_h weight[h] * relu(q_h . k_t), products exact, sums in fp32; on sm_90 relu(q_h . k_t) is
    rounded to fp16 (see NOTES.md). Raises ValueError where refusal() gives a reason, KernelError when the launch fails.
    """
    reason = refusal(q, kv_cache, weights, seq_lens, page_table, max_seq_len, next_n)
    if reason:
        raise ValueError(reason)
    logits = q.new_empty((q.shape[0], max_seq_len), dtype=weights.dtype)
    launch(q, kv_cache, weights, seq_lens, page_table, logits, None, next_n)
    return logits


def fused_refusal(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    logits: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
    next_n: int = 1,
) -> str | None:
    """Returns why the pair cannot be fused for these arguments, or None when it can."""
    reason = refusal(q, kv_cache, weights, seq_lens, page_table, logits.shape[1], next_n)
    return reason or topk.refusal(logits, seq_lens, page_table, out_page_indices, page_size, out_raw_indices)


def fused_launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    logits: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
    next_n: int = 1,
) -> None:
    """Indexer and top-k as one operation, unchecked: logits is workspace. The indexer leaves each tile's maximum
    behind, so top-k reads a sixteenth of the scores first; rows of at most k tokens get no scores at all."""
    maxima = None
    if logits.shape[1] > topk.HELD_WIDTH:
        maxima = logits.new_empty((logits.shape[0], topk.maxima_stride(logits.shape[1])))
    k = out_page_indices.shape[1]
    launch(q, kv_cache, weights, seq_lens, page_table, logits, maxima, next_n, k)
    topk.launch(logits, seq_lens, page_table, out_page_indices, page_size, out_raw_indices, maxima)
