# SPDX-License-Identifier: Apache-2.0
"""The draft's experts in the engine: the choice of their method, and the watch over NextN's and DSpark's forward passes."""

from __future__ import annotations

from .. import operation
from ..operation import Operation, Site
from . import choice, guard

NAME = "nextn_moe"
CHOICE = "sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method"
NEXTN = "sglang.srt.models.deepseek_v4_nextn.DeepseekV4ForCausalLMNextN.forward"
DSPARK = "sglang.srt.models.deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark.forward"
_said: set[tuple[str, str, str]] = set()


def needed(config, layer) -> str | None:
    """Returns the runner that this layer needs in the place of the one in effect, None when the engine's choice is right."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
    from sglang.srt.runtime_context import get_platform
    from sglang.srt.utils import is_flashinfer_available

    if not isinstance(layer, FusedMoE) or not config.is_fp4_experts or config.dequant_fp4_to_fp8:
        return None
    if not get_platform().is_sm120 or not get_moe_a2a_backend().is_none():
        return None
    sizes = layer.hidden_size, layer.intermediate_size_per_partition
    return choice.better(get_moe_runner_backend().value, is_flashinfer_available(), *sizes)


def choice_around(original, self, layer, prefix):
    """AROUND hook for Fp8Config.get_quant_method."""
    wanted = needed(self, layer) if operation.enabled(NAME) else None
    if wanted is None:
        return original(self, layer, prefix)
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.runtime_context import get_flags

    flags = get_flags().moe
    before = flags.runner_backend
    said = ("draft" if layer.is_draft else "target", before.value, wanted)
    if said not in _said:
        _said.add(said)
        guard.logger.warning("dsv4_sm120: nextn_moe: the %s's packed fp4 experts go to %s's place: %s", said[0], said[1], said[2])
    flags.runner_backend = MoeRunnerBackend(wanted)
    try:
        return original(self, layer, prefix)
    finally:
        flags.runner_backend = before


def nextn_around(original, self, input_ids, positions, forward_batch):
    """AROUND hook for NextN's forward pass: its logits."""
    slots = forward_batch.out_cache_loc
    result = original(self, input_ids, positions, forward_batch)
    if operation.enabled(NAME):
        guard.observe(result.next_token_logits, slots)
    return result


def dspark_around(original, self, input_ids, positions, forward_batch, *args, **kwargs):
    """AROUND hook for DSpark's forward pass: the states that its logits are made of."""
    slots = forward_batch.out_cache_loc
    result = original(self, input_ids, positions, forward_batch, *args, **kwargs)
    if operation.enabled(NAME):
        guard.observe(result.hidden_states, slots)
    return result


OPERATIONS = [
    Operation(NAME, (), (Site(CHOICE, choice_around), Site(NEXTN, nextn_around), Site(DSPARK, dspark_around))),
]
