# SPDX-License-Identifier: Apache-2.0
"""What the kernels are timed against. Each loader returns None, with its reason in `absent`, when a contestant is missing.

The engine's own functions are called where the engine is installed. DSV4_SM120_PEERS names a folder that
benchmarks/build_peers.py filled with the same kernels, for a machine without the engine; it goes first.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import pkgutil

import torch

absent: dict[str, str] = {}
PEERS = pathlib.Path(os.environ.get("DSV4_SM120_PEERS", ""))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def _module(name: str, library: str):
    """Returns a built peer as a tvm-ffi module, None without DSV4_SM120_PEERS or when it does not load."""
    if not os.environ.get("DSV4_SM120_PEERS"):
        return None
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(PEERS / f"{library}.so"))
    except Exception as error:  # noqa: BLE001 - a missing contestant is a line in the table
        absent[name] = _short(error)
        return None


def _engine(name: str, target: str):
    """Returns a function of the installed engine."""
    try:
        return pkgutil.resolve_name(target)
    except Exception as error:  # noqa: BLE001
        absent.setdefault(name, _short(error))
        return None


def topk_v1():
    """Returns SGLang's default top-k on sm_120: fn(scores, lengths, table, out, page)."""
    module = _module("v1", "v1")
    if module is not None:
        return lambda *args: module.topk_transform(*args, None)
    return _engine("v1", "sglang.kernels.ops.attention.dsv4.topk:topk_transform_paged")


def topk_v2():
    """Returns SGLang's top-k v2 with its cluster paths compiled out, as on sm_120: fn(scores, lengths, table, out, page)."""
    module = _module("v2", "v2")
    if module is None:
        absent.setdefault("v2", "the engine switches it off on sm_120")
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
    module = _module("flashinfer", "fi")
    if module is None:
        return _flashinfer_installed()
    states = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    return lambda scores, lengths, table, out, page: module.radix_topk_page_table_transform(
        scores, out, table, None, lengths, states, out.shape[1], False, 0, page, False, None, None, None
    )


def _flashinfer_installed():
    try:
        import flashinfer
    except Exception as error:  # noqa: BLE001
        absent.setdefault("flashinfer", _short(error))
        return None

    def call(scores, lengths, table, out, page):
        flashinfer.top_k_page_table_transform(scores, table, lengths, out.shape[1], dsa_graph_safe=True, page_size=page, out=out)

    return call


def indexer_tilelang(batch: int):
    """Returns SGLang's default indexer on sm_120: fn(q, cache, weights, lengths, table, width) -> logits. A built peer is
    compiled for sm_90, where its matrix product is wgmma."""
    path = PEERS / f"tl_{max(1, 256 // batch)}.so"
    if not os.environ.get("DSV4_SM120_PEERS"):
        engine = _engine("tilelang", "sglang.kernels.ops.attention.dsa.tilelang_kernel:tilelang_fp8_paged_mqa_logits")
        return engine and (lambda q, cache, w, lengths, table, width: engine(q, cache, w, lengths, table, None, width, False))
    try:
        function = ctypes.CDLL(str(path)).tl_launch
    except OSError as error:
        absent["tilelang"] = _short(error)
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
    """Returns DeepGEMM's indexer with its schedule kernel: fn(q, cache, weights, lengths, table, width) -> logits."""
    try:
        import deep_gemm
    except Exception as error:  # noqa: BLE001
        absent["deepgemm"] = _short(error)
        return None

    def call(q, cache, weights, lengths, table, width):
        lengths = lengths.view(-1, 1)
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms())
        return deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, plan, width, False)

    return call


def attention_engine():
    """Returns the engine's sparse-MLA decode on sm_120, FlashInfer's kernel unless its environment says otherwise; it takes
    and gives what the engine's own call does."""
    return _engine("engine", "sglang.kernels.ops.attention.flash_mla_sm120:flash_mla_with_kvcache_sm120")


def attention_flashmla():
    """Returns FlashMLA's kernel for sm_90, what the engine runs there, called as attention_engine's is. It takes 64 heads:
    fewer are padded, outside of the timed call."""
    try:
        import flash_mla
    except Exception as error:  # noqa: BLE001
        absent["flashmla"] = _short(error)
        return None
    padded_inputs: dict[int, tuple] = {}

    def call(**kwargs):
        q, sink = kwargs["q"], kwargs["attn_sink"]
        heads = q.shape[2]
        if id(q) not in padded_inputs:
            padded = q.new_zeros(*q.shape[:2], max(heads, 64), q.shape[3])
            padded[:, :, :heads] = q
            wide = sink.new_zeros(max(heads, 64))
            wide[:heads] = sink
            # q is kept so that its id stays its own
            padded_inputs[id(q)] = (padded, wide, flash_mla.get_mla_metadata()[0], q)
        padded, wide, metadata, _q = padded_inputs[id(q)]
        kwargs |= {"q": padded, "attn_sink": wide, "tile_scheduler_metadata": metadata, "use_legacy": True}
        kwargs |= {"block_table": None, "cache_seqlens": None, "is_fp8_kvcache": True}
        out, lse = flash_mla.flash_mla_with_kvcache(**kwargs)
        return out[:, :, :heads], lse

    return call
