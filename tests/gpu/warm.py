# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compiles, many at once, kernels that the engine would compile one after another at its first start. What is missing here or not
needed does no harm: the engine compiles it when it gets there.

    python3 tests/gpu/servers.py exec hopper python3 tests/gpu/warm.py
"""

from __future__ import annotations

import concurrent.futures
import importlib
import sys
import time

import torch

BF16, F32, FP8, I32, I64 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64


def modules():
    """Yields (module of the engine, function, arguments)."""
    from sglang.kernels.jit.utils import is_arch_support_pdl
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    pdl, v4 = is_arch_support_pdl(), KVLayout.V4
    dsv4 = "attention.dsv4."
    yield dsv4 + "topk", "_jit_topk_v1_module", ()
    yield dsv4 + "topk", "_jit_topk_v2_module", ()
    yield dsv4 + "compress", "_jit_compress_plan_module", ()
    for head, ratio in ((512, 4), (512, 128), (128, 4)):
        for kind in (BF16, F32):
            yield dsv4 + "compress", "_jit_compress_module", (head, F32, kind, kind, ratio)
    for head, page in ((512, 64), (512, 2), (128, 64)):
        for kind in (BF16, F32):
            yield dsv4 + "compress", "_jit_compress_norm_rope_module", (kind, head, 64, page, False, v4)
    yield dsv4 + "norm_rope", "_jit_fused_rope_module", ()
    for norm in (True, False):
        yield dsv4 + "norm_rope", "_jit_main_q_norm_rope_module", (BF16, 512, 64, norm)
    yield dsv4 + "norm_rope", "_jit_main_k_norm_rope_flashmla_module", (BF16, 512, 64, 256, v4)
    yield dsv4 + "norm_rope", "_jit_main_q_indexer_rope_hadamard_quant_module", (BF16,)
    yield dsv4 + "attn", "_jit_metadata_module", ()
    yield dsv4 + "flashmla_sched_meta", "_jit_flashmla_sched_meta_module", ()
    yield "moe.dsv4", "_jit_hash_topk_module", ()
    yield "moe.dsv4", "_jit_mask_topk_module", ()
    for zero in (False, True):
        yield "moe.moe_wna16_marlin", "_jit_moe_wna16_marlin_module", (BF16, False, False, True, zero, True)
    yield "moe.moe_align_single_token", "_jit_align_single_token_module", (True,)
    yield "quantization.gptq_marlin_repack", "_jit_gptq_marlin_repack_module", ()
    for kind in (I32, I64):
        yield "moe.moe_align", "_jit_moe_align_module", (kind, True)
        yield "attention.clamp_position", "_jit_clamp_position_module", (kind,)
    yield "activation.silu_and_mul_clamp", "_jit_silu_and_mul_clamp_module", (BF16,)
    for fast in (True, False):
        yield "activation.activation", "activation_module", (BF16, {"fast_math": fast})
    for hidden in (4096, 1024, 512, 16384):
        yield "layernorm.norm", "_jit_rmsnorm_module", (hidden, BF16)
    yield "quantization.per_token_group_quant_8bit_v2", "_jit_module", (BF16, FP8, pdl)
    yield "quantization.per_token_group_quant", "_jit_module", (BF16, FP8, 128, False, False, True, False, False, pdl)


def build(item) -> str:
    """Compiles one; returns what became of it."""
    module, function, arguments = item
    named = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
    begun = time.monotonic()
    try:
        plain = [argument for argument in arguments if argument is not named]
        getattr(importlib.import_module("sglang.kernels.ops." + module), function)(*plain, **named)
        became = "built"
    except Exception as error:  # noqa: BLE001 - the engine will say it again, and better
        became = f"{type(error).__name__}: {str(error)[-300:]}"
    return f"{time.monotonic() - begun:6.1f} s {function} {arguments}: {became}"


def main() -> int:
    """Compiles everything; returns the exit status."""
    items = list(modules())
    for module in sorted({item[0] for item in items}):
        importlib.import_module("sglang.kernels.ops." + module)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        for line in pool.map(build, items):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
