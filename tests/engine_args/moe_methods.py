# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which MoE method SGLang 0.5.23 gives the experts on sm_120, for the target and for the draft, and what comes of it.

    python moe_methods.py files/moe_methods.json            write the table, and TABLE.md of the operation nextn_moe
    python moe_methods.py --check files/moe_methods.json    compare; exit 1 on a difference

For each checkpoint and each setting that takes part in the choice the engine's own modules do what a scheduler does: resolve the command
line, read from the checkpoint how its experts are stored, build the MoE block of a target and of a draft layer, load experts through the
engine's loader, prepare them, and run one forward pass. Kernels alone are replaced, by functions that compute in float64 what the kernel
computes from exactly what it was handed; the answer is compared with one computed from the checkpoint. "Right" so means that bytes,
scales and their order fit the kernel. Each case runs twice, as the engine is and with our operation nextn_moe, in a process of its own.

Needs the packages of check_engine_args.py. Stand-ins, all of them: torchvision, which nothing calls; the device's capability (12, 0);
FlashInfer (four functions); Triton's MoE kernels; Marlin's repacking, workspace and MoE kernel. A case that asks for another compiled
package is not decided here, and says which.
"""
from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import importlib
import importlib.machinery
import inspect
import io
import itertools
import json
import os
import struct
import sys
import tempfile
import traceback
import types
from pathlib import Path

import check_engine_args as common

ROOT = common.ROOT
PLUGIN = ROOT / "files" / "kernels" / "src"
PAGE = PLUGIN / "dsv4_sm120" / "nextn_moe" / "TABLE.md"
HIDDEN, INTER, EXPERTS, TOP_K, TOKENS = 256, 128, 8, 2, 5
EAGLE = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
# name: how the routed experts are stored, which draft the checkpoint holds, and the flags that use it
CHECKPOINTS = {
    "fp4-mtp": ("fp4", "mtp", EAGLE),
    "fp4-dspark": ("fp4", "dspark", ["--speculative-algorithm", "DSPARK"]),
    "fp8-mtp": ("fp8", "mtp", EAGLE),
}
TARGET, DRAFT = "--moe-runner-backend", "--speculative-moe-runner-backend"
SETTINGS = (
    ("SGLANG_DSV4_FP4_EXPERTS=0",),
    ("SGLANG_DSV4_FP4_EXPERTS=1",),
    ("SGLANG_DSV4_FP4_DEQUANT=1",),
    ("SGLANG_DSV4_FP4_DEQUANT=1", DRAFT, "flashinfer_mxfp4"),
    ("SGLANG_IS_FLASHINFER_AVAILABLE=0",),
    ("--quantization", "fp8"),
    ("--quantization", "mxfp4"),
    ("--speculative-draft-model-quantization", "fp8"),
    ("--speculative-draft-model-quantization", "unquant"),
)
RUNNERS = ("auto", "cutlass", "deep_gemm", "flashinfer_cutlass", "flashinfer_mxfp4", "marlin", "triton")
RIGHT = "right"


def cases(checkpoint: str) -> list[tuple[str, ...]]:
    """The settings as words, those with '=' being environment: every runner of the parser for the published checkpoint, those that
    an NVIDIA host is usually given for the others."""
    flags = json.loads((ROOT / "files" / "sglang_flags.json").read_text(encoding="utf-8"))["flags"]
    runners = [(flag, choice) for flag in (TARGET, DRAFT) for choice in flags[flag]["choices"] if checkpoint == "fp4-mtp" or choice in RUNNERS]
    return [(), *runners, *SETTINGS]


# ---- the checkpoint


@functools.cache
def experts(kind: str) -> dict:
    """{(expert, shard): (stored weight, stored scales, its values in float64)}, as the published checkpoint stores them."""
    import torch

    generator = torch.Generator().manual_seed(8)
    found = {}
    for expert, (shard, rows, columns) in itertools.product(range(EXPERTS), (("w1", INTER, HIDDEN), ("w3", INTER, HIDDEN), ("w2", HIDDEN, INTER))):
        if kind == "fp4":  # e2m1, two in a byte, a ue8m0 scale for 32 of a row
            stored = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8).view(torch.int8)
            exponent = torch.randint(118, 124, (rows, columns // 32), generator=generator, dtype=torch.uint8)
            value = e2m1(stored) * ue8m0(exponent).repeat_interleave(32, 1)
        else:  # e4m3, a ue8m0 scale for a block of 128 x 128
            stored = (torch.randn((rows, columns), generator=generator) * 32).to(torch.float8_e4m3fn)
            exponent = torch.randint(117, 120, (rows // 128, columns // 128), generator=generator, dtype=torch.uint8)
            value = stored.double() * ue8m0(exponent).repeat_interleave(128, 0).repeat_interleave(128, 1)
        found[expert, shard] = stored, exponent.view(torch.float8_e8m0fnu), value
    return found


def model_folder(place: Path, kind: str, speculation: str) -> Path:
    """config.json, and a weight file whose header says how the experts are stored: all that the resolution reads."""
    maker = common.load(ROOT / "molecule" / "rehearsal_host" / "checkpoint" / "make_checkpoint.py")
    arguments = [str(place), "--speculation", speculation, "--experts", kind, "--routed-experts", str(EXPERTS)]
    config = maker.configuration(maker.parser().parse_args(arguments))
    config.update(hidden_size=HIDDEN, moe_intermediate_size=INTER, num_experts_per_tok=TOP_K)
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    entry = {"dtype": "I8" if kind == "fp4" else "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"layers.3.ffn.experts.0.w1.weight": entry}).encode()
    (place / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    return place


# ---- float64


@functools.cache
def pairs():
    """[byte, half] -> value."""
    import torch

    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([table, -table])
    byte = torch.arange(256)
    return torch.stack([table[byte & 15], table[byte >> 4]], 1)


def e2m1(packed):
    """The values of packed bytes, low halves first."""
    import torch

    return pairs()[packed.contiguous().view(torch.uint8).int()].flatten(-2)


def ue8m0(exponent):
    import torch

    return torch.exp2(exponent.contiguous().view(torch.uint8).double() - 127)


def moe(x, ids, weights, w1, w3, w2, limit):
    """The MoE block: w1, w3 and w2 are [expert, row, column]."""
    import torch

    rows = []
    for row, chosen, shares in zip(x.double(), ids.tolist(), weights.double()):
        total = torch.zeros(w2.shape[1], dtype=torch.float64)
        for expert, share in zip(chosen, shares):
            gate, up = (w1[expert] @ row).clamp(max=limit), (w3[expert] @ row).clamp(-limit, limit)
            total += share * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


# ---- the kernels


class Misfed(Exception):
    """A kernel was handed what it cannot read."""


class Activations:
    """FlashInfer's names of activations, as far as these kernels take them."""

    Swiglu, SwigluStep = "Swiglu", "SwigluStep"

    def __getattr__(self, name):
        raise ModuleNotFoundError(name="FlashInfer with the activation %s" % name)


def interleaved(scales):
    """Block scales in the order of the tensor cores, tiles of 128 rows by 4; its own inverse but for the tile's shape."""
    *lead, rows, columns = scales.shape
    tiles = scales.reshape(-1, rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(*lead, rows, columns)


def straight(scales, rows, columns):
    tiles = scales.reshape(-1, rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1, rows, columns)


def flashinfer() -> dict:
    """{module: names} of what the engine takes from FlashInfer for these experts."""
    import torch

    def mxfp8_quantize(x, is_sf_swizzled_layout, alignment):
        assert is_sf_swizzled_layout and alignment == 32
        blocks = x.double().reshape(x.shape[0], -1, 32)
        exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=1e-30) / 448)).clamp(-127, 127)
        values = (blocks / torch.exp2(exponent)[..., None]).flatten(1).to(torch.float8_e4m3fn)
        padded = torch.zeros((-(-x.shape[0] // 128) * 128, exponent.shape[1]), dtype=torch.uint8)
        padded[: x.shape[0]] = (exponent + 127).to(torch.uint8)
        return values, interleaved(padded).flatten()

    def cutlass_fused_moe(*, input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype, quant_scales,
                          input_sf, swiglu_limit, use_mxfp8_act_scaling, output, activation_type, swiglu_alpha, swiglu_beta, **rest):
        if not use_mxfp8_act_scaling or fc1_expert_weights.dtype != torch.int64 or activation_type != "Swiglu":
            raise Misfed("not the MXFP8 x MXFP4 form")
        assert swiglu_alpha is None and swiglu_beta is None and output_dtype == torch.bfloat16
        assert rest["tp_size"] == rest["ep_size"] == 1 and not rest["use_w4_group_scaling"]
        scales13, global13, scales2, global2 = quant_scales
        w13 = e2m1(fc1_expert_weights.contiguous().view(torch.uint8)) * ue8m0(
            straight(scales13.view(torch.uint8), 2 * INTER, HIDDEN // 32)).repeat_interleave(32, -1) * global13.double()[:, None, None]
        w2 = e2m1(fc2_expert_weights.contiguous().view(torch.uint8)) * ue8m0(
            straight(scales2.view(torch.uint8), HIDDEN, INTER // 32)).repeat_interleave(32, -1) * global2.double()[:, None, None]
        x = input.double() * ue8m0(straight(input_sf, 128, HIDDEN // 32)[0, : input.shape[0]]).repeat_interleave(32, -1)
        up, gate = w13[:, :INTER], w13[:, INTER:]
        output.copy_(moe(x, token_selected_experts, token_final_scales, gate, up, w2, float(swiglu_limit[0])))

    return {
        "flashinfer": {"mxfp8_quantize": mxfp8_quantize, "block_scale_interleave": interleaved, "__version__": "0.7.2"},
        "flashinfer.fused_moe": {"cutlass_fused_moe": cutlass_fused_moe},
        "flashinfer.fused_moe.core": {"ActivationType": Activations()},
    }


def triton_moe(hidden_states, w1, w2, topk_weights, topk_ids, *rest, use_fp8_w8a8, w1_scale, w2_scale, block_shape, swiglu_limit, **more):
    """The Triton kernels behind fused_experts: block-scaled fp8 is what they are asked for."""
    import torch

    if not use_fp8_w8a8 or w1.dtype != torch.float8_e4m3fn:
        raise Misfed("%s under use_fp8_w8a8" % str(w1.dtype).replace("torch.", ""))
    assert list(block_shape) == [128, 128]
    w13, down = (w.double() * s.double().repeat_interleave(128, 1).repeat_interleave(128, 2) for w, s in ((w1, w1_scale), (w2, w2_scale)))
    answer = moe(hidden_states, topk_ids, topk_weights, w13[:, :INTER], w13[:, INTER:], down, float(swiglu_limit))
    return hidden_states.copy_(answer * more["routed_scaling_factor"])  # it is asked to work in place


def marlin_moe(hidden_states, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, num_bits, clamp_limit, **rest):
    """Marlin's MoE kernel on weights that the repacking stand-in left as they were handed to it; mxfp4 takes no further factor."""
    import torch
    from sglang.srt.layers.quantization.marlin_utils import get_scale_perms

    assert num_bits == 4
    order = torch.tensor(get_scale_perms()[0]).argsort()

    def weight(packed, scales):
        groups, columns = scales.shape[1:]
        plain_order = packed.reshape(len(packed), groups * 4, columns).transpose(1, 2)
        values = e2m1(plain_order.contiguous().view(torch.uint8))
        plain = ue8m0(scales).reshape(len(scales), -1, 4)[..., [0, 2, 1, 3]].reshape(len(scales), -1, len(order))[..., order]
        return values * plain.reshape(len(scales), groups, columns).transpose(1, 2).repeat_interleave(32, -1)

    w13, down = weight(w1, w1_scale), weight(w2, w2_scale)
    return moe(hidden_states, topk_ids, topk_weights, w13[:, :INTER], w13[:, INTER:], down, float(clamp_limit)).to(hidden_states.dtype)


class Provided(common.Hollow):
    """FlashInfer beside the torchvision of check_engine_args.py."""

    def __init__(self):
        self.modules = flashinfer()

    def find_spec(self, name, path=None, target=None):
        if name in self.modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return super().find_spec(name, path, target)

    def create_module(self, spec):
        if spec.name not in self.modules:
            return super().create_module(spec)
        module = types.ModuleType(spec.name)
        vars(module).update(self.modules[spec.name])
        return module


def prepare() -> None:
    """Import once; every case then runs in a fork."""
    common.prepare()
    sys.meta_path.insert(0, Provided())
    sys.path.insert(0, str(PLUGIN))
    import torch

    torch.cuda.get_device_capability = lambda *device: (12, 0)
    torch.set_num_threads(1)
    for kind, _speculation, _flags in CHECKPOINTS.values():
        experts(kind)
    import sglang.srt.configs.model_config
    from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe
    import sglang.srt.layers.moe.moe_runner.flashinfer_cutlass
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.layers.quantization import marlin_utils
    from sglang.srt.layers.quantization import marlin_utils_fp4
    import sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe
    import sglang.srt.layers.quantization.mxfp4_marlin_moe
    import sglang.srt.models.registry  # noqa: F401
    # The operators are registered for CUDA alone; these are the functions below them.
    fused_moe.inplace_fused_experts = inspect.unwrap(fused_moe.inplace_fused_experts)
    fused_moe.outplace_fused_experts = inspect.unwrap(fused_moe.outplace_fused_experts)
    fp8.cutlass_fp8_supported = lambda: True
    fused_moe._prepare_fused_moe_run = lambda *arguments, **settings: (None,) * 7
    fused_moe._fused_moe_kernel_sequence = triton_moe
    fused_marlin_moe.fused_marlin_moe = marlin_moe
    marlin_utils_fp4.gptq_marlin_repack = lambda b_q_weight, size_k, size_n, **settings: b_q_weight.reshape(size_k // 16, size_n * 2)
    marlin_utils_fp4.marlin_make_workspace = marlin_utils.marlin_make_workspace = lambda *arguments, **settings: None


# ---- one case


def sentence(error: BaseException) -> str:
    """An error in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return ("%s: %s" % (type(error).__name__, first) if first else type(error).__name__)[:160]


@contextlib.contextmanager
def step(name: str):
    """Says in which step an error came up."""
    try:
        yield
    except Exception as error:
        error.step = name
        raise


def draft_scopes(speculation: str) -> list:
    """The contexts in which the engine's worker builds its draft, read from its source: DSpark's leaves the runner alone."""
    import sglang
    from sglang.srt.layers.moe import utils

    name, function = {"mtp": ("eagle_worker_v2", "__init__"), "dspark": ("draft_worker_common", "build_draft_tp_worker")}[speculation]
    tree = ast.parse((Path(sglang.__path__[0]) / "srt" / "speculative" / (name + ".py")).read_text(encoding="utf-8"))
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
    called = {ast.unparse(item.context_expr) for node in ast.walk(body) if isinstance(node, ast.With) for item in node.items}
    names = ("speculative_moe_backend_context", "speculative_moe_a2a_backend_context", "draft_model_build_scope")
    return [getattr(utils, name) for name in names if name + "()" in called]


def resolve(words: list[str], model: Path):
    """What the main process and the head of a scheduler do."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import common as utils

    args = prepare_server_args(["--model-path", str(model), "--mem-fraction-static", "0.85", "--chunked-prefill-size", "4096", "--device", "cuda", *words])
    args.resolve_once()
    runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0, gpu_id=0))
    runtime_context.get_parallel().override_permanently(tp_group=None)
    initialize_moe_config()
    utils.is_cuda = lambda: True  # is_flashinfer_available asks it
    utils.is_flashinfer_available.cache_clear()
    return args


def build(args, draft: bool):
    """The MoE block of a target or a draft layer, as the model's class builds it, and its configuration."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    model = ModelConfig.from_server_args(args, is_draft_model=draft)
    quant = loader._get_quantization_config(model, LoadConfig())
    torch.set_default_dtype(torch.bfloat16)
    place = {"layer_id": 0, "prefix": "model.decoder.mlp", "is_nextn": True} if draft else {"layer_id": 3, "prefix": "model.layers.3.mlp"}
    return DeepseekV2MoE(config=model.hf_config, quant_config=quant, is_deepseek_v4=True, **place), model.hf_config


def load_experts(layer, kind: str) -> dict:
    """Loads a checkpoint's experts through the engine's loader."""
    stored = experts(kind)
    names = {"w1": "w13", "w3": "w13", "w2": "w2"}
    for (expert, shard), (weight, scale, _value) in stored.items():
        for tensor, suffix in ((weight, "weight"), (scale, "weight_scale_inv")):
            name = "%s_%s" % (names[shard], suffix)
            parameter = getattr(layer, name, None)
            if parameter is None:
                raise KeyError("no parameter %s" % name)
            parameter.weight_loader(parameter, tensor, name, shard, expert)
    return stored


def forward(layer, stored: dict, config) -> str:
    """One forward pass against float64; how the answer compares."""
    import torch
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    generator = torch.Generator().manual_seed(9)
    x = (torch.randint(-6, 7, (TOKENS, HIDDEN), generator=generator) / 4).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for dummy in range(TOKENS)]).to(torch.int32)
    weights = torch.tensor([[0.75, 0.25]] * TOKENS)
    w1, w3, w2 = (torch.stack([stored[expert, shard][2] for expert in range(EXPERTS)]) for shard in ("w1", "w3", "w2"))
    expected = moe(x, ids, weights, w1, w3, w2, config.swiglu_limit) * config.routed_scaling_factor
    if layer.should_fuse_routed_scaling_factor_in_topk:
        weights = weights * config.routed_scaling_factor
    topk = StandardTopKOutput(topk_weights=weights, topk_ids=ids, router_logits=torch.zeros(TOKENS, EXPERTS))
    output = StandardDispatchOutput(hidden_states=x.clone(), hidden_states_scale=None, topk_output=topk)
    found = layer.quant_method.apply(layer, output).hidden_states.double()
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    return RIGHT if error <= 2**-8 else "wrong values: error %.2g of the largest" % error


def one(args, kind: str, draft: bool) -> dict:
    """{method, weights, outcome} of the target's or the draft's experts."""
    found = {"method": None, "weights": None}
    try:
        with step("build"):
            block, config = build(args, draft)
            layer = block.experts
            found.update(method=type(layer.quant_method).__name__, weights=str(layer.w13_weight.dtype).replace("torch.", ""))
        with step("load"):
            stored = load_experts(layer, kind)
            layer.quant_method.process_weights_after_loading(layer)
        with step("first forward"):
            found["outcome"] = forward(layer, stored, config)
    except (ImportError, NameError) as error:
        found["outcome"] = "not decided: needs %s" % error.name
    except Exception as error:  # noqa: BLE001 - whatever the engine raises is the result
        found["outcome"] = "%s: %s" % (error.step, sentence(error))
    return found


def run(checkpoint: str, case: tuple[str, ...], model: Path) -> dict:
    """One case in this process, which is spent afterwards: {stock, ours} of what the target's and the draft's experts end in."""
    kind, speculation, flags = CHECKPOINTS[checkpoint]
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        del os.environ[name]
    os.environ.update(word.split("=", 1) for word in case if "=" in word)
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        try:
            args = resolve([*flags, *(word for word in case if "=" not in word)], model)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is the result
            return {"refused": sentence(error)}
        except SystemExit:
            return {"refused": heard.getvalue().strip().splitlines()[-1]}
        from sglang.srt.runtime_context import get_flags

        runners = get_flags().moe
        found = {"runner": runners.runner_backend.value, "draft_runner": runners.speculative_runner_backend.value}
        for column in ("stock", "ours"):
            if column == "ours":
                apply_plugin()
            found[column] = {"target": one(args, kind, draft=False)}
            with contextlib.ExitStack() as scopes:
                for scope in draft_scopes(speculation):
                    scopes.enter_context(scope())
                found[column]["draft"] = one(args, kind, draft=True)
    return found


def apply_plugin() -> None:
    """Loads the plugin as a scheduler would, strictly."""
    os.environ.update(DSV4_SM120_KERNELS="nextn_moe", DSV4_SM120_STRICT="1", DSV4_SM120_ROLE="scheduler")
    from dsv4_sm120 import plugin

    plugin.register()


def in_forks(lines: list[tuple]) -> list[dict]:
    """run() of every line, each in a process of its own, as many at a time as there are cores."""
    waiting, running, found = list(lines), [], []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(start(waiting.pop(0)))
        pid, pipe = running.pop(0)
        with os.fdopen(pipe, encoding="utf-8") as stream:
            text = stream.read()
        os.waitpid(pid, 0)
        found.append(json.loads(text) if text else {"failed": "the process died"})
    return found


def start(line: tuple) -> tuple[int, int]:
    """Forks for one line; returns the process and the pipe that its answer comes through."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.close(read)
    try:
        answer = run(*line)
    except BaseException as error:  # noqa: BLE001
        answer = {"failed": "%s (%s)" % (sentence(error), traceback.extract_tb(error.__traceback__)[-1].name)}
    answer["modules"] = sorted(name for name in sys.modules if name.startswith("sglang."))
    with os.fdopen(write, "w", encoding="utf-8") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


# ---- the table


def table() -> dict:
    """Runs everything."""
    with tempfile.TemporaryDirectory() as folder:
        models = {name: model_folder(Path(folder) / name, kind, speculation) for name, (kind, speculation, _flags) in CHECKPOINTS.items()}
        controls = [("fp4-mtp", case, models["fp4-mtp"]) for case in ((), (TARGET, "marlin"), (TARGET, "triton"), (TARGET, "flashinfer_trtllm"))]
        for module in sorted(set(itertools.chain(*(answer["modules"] for answer in in_forks(controls))))):
            with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
                importlib.import_module(module)  # once for all forks
        lines = [(name, case, models[name]) for name in CHECKPOINTS for case in cases(name)]
        answers = in_forks(lines)
    if failed := ["%s %s: %s" % (*line[:2], answer["failed"]) for line, answer in zip(lines, answers) if "failed" in answer]:
        raise SystemExit("\n".join(failed))
    found = {name: [] for name in CHECKPOINTS}
    for (name, case, _model), answer in zip(lines, answers):
        del answer["modules"]
        good = "stock" in answer and all(layer["outcome"] == RIGHT for layer in answer["stock"].values())
        found[name].append({"settings": list(case), "good": good, **answer})
    return {"schema": 1, "engine": "sglang 0.5.23", "made_by": "tests/engine_args/moe_methods.py", "checkpoints": found}


def page(document: dict) -> str:
    """The table for people."""
    def said(layer: dict) -> str:
        if layer["method"] is None:
            return layer["outcome"]
        return "%s (%s): %s" % (layer["method"].removesuffix("MoEMethod"), layer["weights"], layer["outcome"])

    lines = [
        "# Which MoE method the experts get on sm_120", "",
        "Made by `tests/engine_args/moe_methods.py` (which says how) from %s; the same as data: `files/moe_methods.json`. Stock is the engine"
        % document["engine"],
        "as it is; ours is the engine with the operation `nextn_moe`, shown where it differs. *Right*: a forward pass through the engine's own",
        "modules gives the float64 answer. Good rows are right in both columns of stock, and the role emits no others.", "",
    ]
    for name, rows in document["checkpoints"].items():
        kind, speculation, _flags = CHECKPOINTS[name]
        lines += ["## %s experts, %s" % (kind, {"mtp": "MTP head (EAGLE)", "dspark": "DSpark draft"}[speculation]), "",
                  "| setting | runner, draft's | good | stock: target | stock: draft | ours: target | ours: draft |", "|---|---|---|---|---|---|---|"]
        for row in rows:
            setting = "`%s`" % " ".join(row["settings"]) if row["settings"] else "none"
            if "refused" in row:
                lines.append("| %s | | no | refused: %s | | | |" % (setting, row["refused"].replace("|", "\\|")))
                continue
            cells = [said(row["stock"][layer]) for layer in ("target", "draft")]
            cells += ["" if row["ours"][layer] == row["stock"][layer] else said(row["ours"][layer]) for layer in ("target", "draft")]
            lines.append("| %s | %s, %s | %s | %s |" % (
                setting, row["runner"], row["draft_runner"], "yes" if row["good"] else "no", " | ".join(cell.replace("|", "\\|") for cell in cells)))
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--check", action="store_true", help="compare instead of writing")
    cli.add_argument("file", type=Path)
    options = cli.parse_args()
    prepare()
    document = table()
    written = {options.file: json.dumps(document, indent=1) + "\n", PAGE: page(document)}
    if not options.check:
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
        return 0
    differs = [path for path, text in written.items() if path.read_text(encoding="utf-8") != text]
    for path in differs:
        lines = difflib.unified_diff(path.read_text(encoding="utf-8").splitlines(), written[path].splitlines(), str(path), "now", lineterm="", n=0)
        print("\n".join(itertools.islice(lines, 40)))
    rows = list(itertools.chain(*document["checkpoints"].values()))
    print("moe_methods: %d settings, %d of them good%s" % (len(rows), sum(row["good"] for row in rows), ", and the table differs" if differs else ""))
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
