# SPDX-License-Identifier: Apache-2.0
"""What the kernels are timed against. Each loader returns None, with its reason in `absent`, when a contestant is missing.

DSV4_SM120_PEERS names the folder that build_peers.py filled; DeepGEMM is imported if it is installed.
"""

from __future__ import annotations

import ctypes
import os
import pathlib

import torch
from torch.nn import functional

absent: dict[str, str] = {}
PEERS = pathlib.Path(os.environ.get("DSV4_SM120_PEERS", "peers"))


def _module(name: str):
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(PEERS / f"{name}.so"))
    except Exception as error:  # noqa: BLE001 - a missing contestant is a line in the table
        absent[name] = str(error).splitlines()[0][:120]
        return None


def topk_v1():
    """Returns SGLang's default top-k on sm_120: fn(scores, lengths, table, out, page)."""
    module = _module("v1")
    return module and (lambda *args: module.topk_transform(*args, None))


def topk_v2():
    """Returns SGLang's top-k v2 with its cluster paths compiled out, as on sm_120: fn(scores, lengths, table, out, page)."""
    module = _module("v2")
    if module is None:
        return None
    plans = {}

    def call(scores, lengths, table, out, page):
        # without clusters the plan stays unwritten: one is enough for all lengths
        if scores.shape[0] not in plans:
            plans[scores.shape[0]] = lengths.new_zeros(scores.shape[0] + 1, 2)
            module.topk_plan(lengths, plans[scores.shape[0]], -1)
        module.topk_transform_paged(scores, lengths, table, out, page, plans[scores.shape[0]], None)

    return call


def topk_flashinfer():
    """Returns FlashInfer's radix top-k with page-table transform: fn(scores, lengths, table, out, page)."""
    module = _module("fi")
    if module is None:
        return None
    states = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    return lambda scores, lengths, table, out, page: module.radix_topk_page_table_transform(
        scores, out, table, None, lengths, states, out.shape[1], False, 0, page, False, None, None, None
    )


def indexer_tilelang(batch: int):
    """Returns SGLang's default indexer on sm_120, compiled for sm_90 (there its matrix product is wgmma):
    fn(q, cache, weights, lengths, table, width) -> logits."""
    split = max(1, 256 // batch)
    path = PEERS / f"tl_{split}.so"
    try:
        function = ctypes.CDLL(str(path)).tl_launch
    except OSError as error:
        absent["tilelang"] = str(error)[:120]
        return None
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int] * 3 + [ctypes.c_void_p]

    def call(q, cache, weights, lengths, table, width):
        logits = torch.empty(q.shape[0], width, device="cuda")
        pointers = [tensor.data_ptr() for tensor in (q, cache, weights, lengths, table, logits)]
        stream = torch.cuda.current_stream().cuda_stream
        if function(*pointers, q.shape[0], width, table.shape[1], stream):
            raise RuntimeError("TileLang's kernel was not launched")
        return logits

    return call


def indexer_deepgemm():
    """Returns DeepGEMM's sm_90 indexer with its schedule kernel: fn(q, cache, weights, lengths, table, width)."""
    try:
        import deep_gemm
    except Exception as error:  # noqa: BLE001
        absent["deepgemm"] = str(error).splitlines()[0][:120]
        return None

    def call(q, cache, weights, lengths, table, width):
        lengths = lengths.view(-1, 1)
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms())
        return deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, plan, width, False)

    return call


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
