# SPDX-License-Identifier: Apache-2.0
"""Top-k over each row's actual length, as the engine's topk_transform_paged; see kernel.cu and NOTES.md."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING

from .. import _lib

if TYPE_CHECKING:
    import torch

MAX_ROWS = 1024
MAX_K = 2048
# scores that one maximum stands for
GRANULE = 16
# rows up to this width need no maxima
HELD_WIDTH = 16384
_POINTER = ctypes.c_void_p
_LONG = ctypes.c_longlong
_INT = ctypes.c_int
_ARGUMENTS = [_POINTER, _LONG, _INT, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG]
_ARGUMENTS += [_INT, _INT, _INT, _INT, _INT, _INT, _POINTER]
_launches = itertools.count()


def maxima_stride(width: int) -> int:
    """Returns the row length of the granule maxima in floats: one for 16 scores, rounded up to 16 bytes."""
    return -(-width // (GRANULE * 4)) * 4


def refusal(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> str | None:
    """Returns why these arguments cannot go through this kernel, or None when they can. Reads no device memory."""
    import torch

    from .. import _torch

    device = scores.device
    wanted = [
        ("scores", scores, torch.float32, 2),
        ("seq_lens", seq_lens, torch.int32, 1),
        ("page_tables", page_tables, torch.int32, 2),
        ("out_page_indices", out_page_indices, torch.int32, 2),
    ]
    if out_raw_indices is not None:
        wanted.append(("out_raw_indices", out_raw_indices, torch.int32, 2))
    if reason := _torch.first_refusal(device, *wanted):
        return reason
    rows, width = scores.shape
    k = out_page_indices.shape[1]
    if rows < 1 or seq_lens.shape[0] != rows or page_tables.shape[0] != rows or out_page_indices.shape[0] != rows:
        return "the tensors differ in rows"
    if out_raw_indices is not None:
        if out_raw_indices.shape != out_page_indices.shape or not out_raw_indices.is_contiguous():
            return "out_raw_indices is not dense or not of the output's shape"
    if not out_page_indices.is_contiguous():
        return "out_page_indices is not dense"
    if page_size < 1 or page_size & (page_size - 1):
        return f"page size {page_size} is no power of two"
    if rows > MAX_ROWS and width > HELD_WIDTH:
        return f"more than {MAX_ROWS} rows, wider than {HELD_WIDTH}"
    if _torch.row_stride(scores) % 4 or scores.data_ptr() % 16:
        return "scores are not aligned to 16 bytes"
    if not 1 <= k <= MAX_K:
        return f"k {k} is more than the {MAX_K} that the kernel was made for"
    return None


def launch(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
) -> None:
    """Launches without checking; see topk_transform_paged. maxima: fp32 [rows, maxima_stride(width)] as the indexer
    wrote them, or None."""
    import torch

    from .. import _torch

    rows, width = scores.shape
    k = out_page_indices.shape[1]
    ready = maxima is not None
    if maxima is None and width > HELD_WIDTH:
        maxima = torch.empty((rows, maxima_stride(width)), dtype=torch.float32, device=scores.device)
    code = _lib.function("topk", "dsv4_topk", _ARGUMENTS)(
        scores.data_ptr(),
        _torch.row_stride(scores),
        width,
        seq_lens.data_ptr(),
        page_tables.data_ptr(),
        _torch.row_stride(page_tables),
        out_page_indices.data_ptr(),
        out_raw_indices.data_ptr() if out_raw_indices is not None else None,
        maxima.data_ptr() if maxima is not None else None,
        maxima.shape[1] if maxima is not None else 0,
        rows,
        k,
        page_size,
        next(_launches) & 63,
        int(ready),
        _torch.multiprocessors(scores.device.index),
        _torch.stream(scores),
    )
    _lib.check("topk", "top-k", code)


def topk_transform_paged(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Writes the slots of each row's k best scores, k = out_page_indices.shape[1].

    scores [rows, width] fp32, seq_lens [rows] int32 (at most width; 0 and less select nothing), page_tables [rows, *]
    int32, outputs [rows, k] int32. Selected token i becomes page_tables[row, i // page_size] * page_size + i %
    page_size, tokens ascending, then -1. Ties go to the lower token. Nothing past a row's length is read. NaN scores
    are not supported. Same bits at every run. Raises ValueError where refusal() gives a reason, KernelError when the
    launch fails. Takes the signature of SGLang's function of this name.
    """
    reason = refusal(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)
    if reason:
        raise ValueError(reason)
    launch(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)
