# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test mode of the engine on a GPU that is not sm_120, as an engine plugin of its own. DSV4_GPU_TEST lists what to turn on:

weights   fill a --load-format dummy model so that its answers depend on every layer. The engine's own dummy values (below 1e-3,
          which fp8 rounds to zero, and expert weights left as the memory was) give logits that no attention error could change.
attention where the attention asks whether it runs on sm_120, say yes for decode and verify steps. The call then goes to the function
          that a sm_120 host calls, with the arguments that it gives it, and so through the hook of dsv4_sm120 as it is installed
          there. Prefill stays with this GPU's own kernels.
indexer   the same where the indexer chooses its torch fallback: sm_120 has one of its own, the O(max) one.

nan       a NaN in the norm before NextN's output, which nothing but the draft's logits reads.

The indexer's default and top-k on sm_120 need no pretence: environment variables choose them on any GPU.
"""

from __future__ import annotations

import importlib
import os
import threading
import zlib

DUMMY_WEIGHTS = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
NEXTN = "sglang.srt.models.deepseek_v4_nextn.DeepseekV4ModelNextN.forward"
INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
_step = threading.local()


def fill(name: str, parameter) -> None:
    """Fills one parameter from a seed of its name, scaled so that activations keep their size from layer to layer."""
    import torch

    data = parameter.data
    generator = torch.Generator(device=data.device).manual_seed(zlib.crc32(name.encode()))
    leaf = name.rpartition(".")[2]

    def normal(shape, deviation: float):
        return torch.empty(shape, device=data.device, dtype=torch.float32).normal_(0, deviation, generator=generator)

    if leaf.endswith(("weight_scale_inv", "weight_scale", "weight_scale_2")):
        # The inputs of one output: 4096 or near; fp8 weights have deviation 1, random fp4 codes 2.6. A power of two, as ue8m0 needs.
        # Attention averages over hundreds of tokens; its output is scaled up so that it counts beside the experts.
        data.fill_(2.0 ** -7 if "experts" in name else 2.0 ** -3 if "wo_b" in name else 2.0 ** -6)
    elif leaf in ("k_scale", "v_scale"):
        data.fill_(1.0)
    elif not data.is_floating_point():
        if leaf in ("w13_weight", "w2_weight"):
            data.copy_(torch.randint(-128, 128, data.shape, device=data.device, dtype=torch.int8, generator=generator).to(data.dtype))
    elif data.element_size() == 1:
        step = max(1, (1 << 27) // max(1, data[0].numel()))
        for at in range(0, data.shape[0], step):
            part = data[at:at + step]
            part.copy_(normal(part.shape, 1.0).to(data.dtype))
    elif "norm" in name:
        data.copy_(1.0 + normal(data.shape, 0.1))
    elif leaf == "attn_sink":
        data.copy_(normal(data.shape, 1.0))
    elif leaf.startswith("hc_") and leaf.endswith("scale"):
        data.fill_(1.0)
    elif leaf.startswith("hc_") and leaf.endswith("base") or leaf.endswith("bias"):
        data.copy_(normal(data.shape, 0.1))
    elif "embed_tokens" in name:
        data.copy_(normal(data.shape, 1.0))
    elif "lm_head" in name:
        data.copy_(normal(data.shape, 2.5 * data.shape[-1] ** -0.5))
    else:
        data.copy_(normal(data.shape, (data.shape[-1] if data.dim() > 1 else 1) ** -0.5))


def fill_model(model, *_args, **_kwargs) -> None:
    """Stands for the engine's initialize_dummy_weights."""
    for name, parameter in model.named_parameters():
        fill(name, parameter)


class Pretended:
    """The engine's platform, which says that it is sm_120."""

    is_sm120 = True

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)


def pretend(module, always: bool) -> None:
    """Puts a get_platform of ours into one module of the engine."""
    original = module.get_platform

    def get_platform():
        real = original()
        return Pretended(real) if always or getattr(_step, "decode", False) else real

    module.get_platform = get_platform


def attention_around(original, self, q, k, v, layer, forward_batch, *args, **kwargs):
    """AROUND hook that opens the pretence for a decode or verify step."""
    mode = forward_batch.forward_mode
    _step.decode = mode.is_decode() or mode.is_target_verify()
    try:
        return original(self, q, k, v, layer, forward_batch, *args, **kwargs)
    finally:
        _step.decode = False


def nextn_around(original, self, *args, **kwargs):
    """AROUND hook that breaks the draft."""
    self.shared_head.norm.weight.data[:1].fill_(float("nan"))
    return original(self, *args, **kwargs)


def register() -> None:
    """Called by the engine in each of its processes; acts in schedulers, which build the model."""
    from dsv4_sm120.plugin import in_scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted = set(os.environ.get("DSV4_GPU_TEST", "").split(",")) - {""}
    if not in_scheduler():
        return
    if "weights" in wanted:
        HookRegistry.register(DUMMY_WEIGHTS, fill_model, HookType.REPLACE)
    if "nan" in wanted:
        HookRegistry.register(NEXTN, nextn_around, HookType.AROUND)
    if "indexer" in wanted:
        pretend(importlib.import_module(INDEXER), always=True)
    if "attention" in wanted:
        pretend(importlib.import_module(BACKEND), always=False)
        HookRegistry.register(BACKEND + ".DeepseekV4AttnBackend._forward_attention", attention_around, HookType.AROUND)
    print("dsv4_gpu_test: on: " + (", ".join(sorted(wanted)) or "nothing"), flush=True)
