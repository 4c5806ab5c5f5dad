# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What SGLang 0.5.23 makes of its arguments for DeepSeek-V4 on compute capability 12.0.

Only what an operator can see is here: the values that /server_info reports and
the combinations that end a start. Messages name the same cause as SGLang's.
"""
from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

PAGE_SIZE = 256


def switch(name: str, default: bool) -> bool:
    """An SGLang environment switch."""
    text = os.environ.get(name)
    return default if text is None else text.strip().lower() in ("1", "true", "yes", "y", "on", "t")


def seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    return default if not text else float(text)


def checkpoint_config(model_path: str) -> dict:
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise OSError(
            "Can't load the configuration of '%s'. If you were trying to load it from a hub: this engine never does; "
            "%s is missing." % (model_path, path)
        )
    return json.loads(path.read_text(encoding="utf-8"))


def resolve(raw: argparse.Namespace) -> dict:
    """The resolved arguments, or an exception as at a real start."""
    args = {name: value for name, value in vars(raw).items() if name not in ("config", "launch_command")}
    config = checkpoint_config(args["model_path"])
    architecture = (config.get("architectures") or [""])[0]
    if "DeepseekV4" not in architecture:
        raise ValueError("Model architectures %s: the rehearsal engine knows DeepseekV4 only" % config.get("architectures"))
    args["model_config"] = config
    args["served_model_name"] = args["served_model_name"] or args["model_path"]
    args["tokenizer_path"] = args["tokenizer_path"] or args["model_path"]
    for name, detected in (("reasoning_parser", "deepseek-v4"), ("tool_call_parser", "deepseekv4")):
        if args[name] == "auto":
            args[name] = detected

    _context(args, config)
    args["device"] = args["device"] or "cuda"
    args["sampling_backend"] = args["sampling_backend"] or "flashinfer"
    args["grammar_backend"] = args["grammar_backend"] or "xgrammar"
    _attention(args)
    _speculation(args)
    _disaggregation(args)
    if args["max_running_requests"] is None:
        args["max_running_requests"] = 256
    if args["chunked_prefill_size"] is None:
        args["chunked_prefill_size"] = 8192
    if args["mem_fraction_static"] is None:
        args["mem_fraction_static"] = 0.87
    if args["watchdog_timeout"] is None:
        args["watchdog_timeout"] = 300
    return args


def _context(args: dict, config: dict) -> None:
    derived = int(config.get("max_position_embeddings") or 1048576)
    wanted = args["context_length"]
    if wanted is not None and wanted > derived and not switch("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", False):
        raise ValueError(
            "User-specified context_length (%d) is greater than the derived context_length (%d). This may lead to "
            "incorrect model outputs or CUDA errors. To allow overriding this maximum, set the env var "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1" % (wanted, derived)
        )
    args["context_length"] = wanted or derived


def _attention(args: dict) -> None:
    args["attention_backend"] = "dsv4"
    args["page_size"] = PAGE_SIZE
    if args["kv_cache_dtype"] == "auto":
        args["kv_cache_dtype"] = "fp8_e4m3"
    if args["swa_full_tokens_ratio"] is None:
        args["swa_full_tokens_ratio"] = 0.1
    if args["dsv4_attn_backend"] in ("flashmla_mega", "trtllm"):
        raise ValueError("--dsv4-attn-backend %s requires SM100" % args["dsv4_attn_backend"])
    if args["dsv4_attn_backend"] == "auto":
        args["dsv4_attn_backend"] = "flashmla"
    if args["quantization"] == "mxfp4":
        raise ValueError(
            "Quantization method specified in the model config (fp8) does not match the quantization method "
            "specified in the `quantization` argument (mxfp4)."
        )
    if args["moe_runner_backend"] == "auto":
        args["moe_runner_backend"] = "flashinfer_mxfp4"


def _speculation(args: dict) -> None:
    algorithm = args["speculative_algorithm"]
    if args["speculative_moe_runner_backend"] is None:
        args["speculative_moe_runner_backend"] = args["moe_runner_backend"]
    if algorithm is None:
        return
    if algorithm not in ("EAGLE", "DSPARK"):
        raise AssertionError("Only EAGLE and DSPARK speculative algorithms are supported for DeepSeek-V4, got %s" % algorithm)
    if algorithm == "EAGLE":
        if args["speculative_eagle_topk"] != 1:
            raise AssertionError("DeepSeek-V4 supports EAGLE with --speculative-eagle-topk 1 only")
        if args["speculative_num_steps"] is None:
            raise AssertionError("--speculative-num-steps is needed with --speculative-eagle-topk")
        if args["speculative_num_draft_tokens"] is None:
            args["speculative_num_draft_tokens"] = args["speculative_num_steps"] + 1
    else:
        block = args["speculative_dspark_block_size"] or int(args["model_config"].get("dspark_block_size") or 5)
        for name, value in (("speculative_num_draft_tokens", block + 1), ("speculative_eagle_topk", 1), ("speculative_num_steps", 1)):
            if args[name] is None:
                args[name] = value
    if args["speculative_draft_model_path"] is None:
        args["speculative_draft_model_path"] = args["model_path"]


def _disaggregation(args: dict) -> None:
    mode = args["disaggregation_mode"]
    if args["load_balance_method"] == "auto":
        args["load_balance_method"] = "follow_bootstrap_room" if mode == "prefill" else "round_robin"
    if args["cuda_graph_config"] is None:
        graphs = args["cuda_graph_backend_decode"] or ("disabled" if mode == "prefill" else "full")
        args["cuda_graph_config"] = {"decode": {"backend": graphs, "max_bs": args["cuda_graph_max_bs_decode"]}, "prefill": {"backend": "disabled"}}
    if args["disaggregation_transfer_backend"] == "mooncake_tcp":
        os.environ["MC_FORCE_TCP"] = "1"
        args["disaggregation_transfer_backend"] = "mooncake"
        args["disaggregation_ib_device"] = None
    if mode == "prefill":
        if args["disaggregation_transfer_backend"] == "fake":
            raise AssertionError("Prefill server does not support the 'fake' transfer backend")
    elif mode == "decode" and not args["disaggregation_decode_enable_radix_cache"]:
        args["disable_radix_cache"] = True
