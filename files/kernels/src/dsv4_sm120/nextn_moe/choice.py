# SPDX-License-Identifier: Apache-2.0
"""Which of the engine's MoE methods serves packed fp4 experts on sm_120.

Fp8Config.get_quant_method asks for the MoE runner and knows four of them for packed fp4 experts (e2m1, two in a byte, a
ue8m0 scale for 32). Under any other it returns its fp8 method, whose weights stay packed: the first forward pass then ends in
an assertion (TABLE.md). Where that would come, the hook shows it another runner while it chooses: FlashInfer's CUTLASS MXFP8
x MXFP4 kernels, else Marlin, which takes every shape. Method, layout of the weights, runner and routing all follow from the
choice, so nothing else is touched.
"""

from __future__ import annotations

# Runners that have an fp4 form of their own on sm_120; what they say stands. flashinfer_mxfp4 is left out on purpose.
LEFT_ALONE = ("marlin", "experimental_sgl_marlin", "humming", "deep_gemm")
CUTLASS, MARLIN = "flashinfer_mxfp4", "marlin"
# FlashInfer's kernels take hidden and intermediate sizes that are multiples of this.
ALIGNMENT = 128


def better(runner: str, flashinfer: bool, hidden: int, intermediate: int) -> str | None:
    """Returns the runner that packed fp4 experts need in the place of this one, None when it serves them."""
    if runner in LEFT_ALONE:
        return None
    wanted = CUTLASS if flashinfer and hidden % ALIGNMENT == 0 and intermediate % ALIGNMENT == 0 else MARLIN
    return None if wanted == runner else wanted
