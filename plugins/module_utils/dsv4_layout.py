# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which tensors a DeepSeek-V4 checkpoint holds, derived from its config.json.

The names are those of the published checkpoint (C(embed), C(layers.N.attn...), C(mtp.N...)), not of a
converted one. Each tensor has a role, and the role says which dtypes it may have; the shape follows
from the configuration. The small checkpoint of the rehearsal is written from the same table that the
check of a real one uses, so the two cannot drift apart.
"""

from __future__ import annotations

#: Config keys without which no layout can be derived.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "sliding_window",
    "hc_mult",
)
#: Ratios that the engine knows for V4 (0 = sliding window only).
RATIOS = (0, 4, 128)

#: Keys in config.json that mark a bundled DSpark draft.
DSPARK_KEYS = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")

#: Roles of tensors and the dtypes each may have. "linear" and "expert" carry a scale beside the weight.
ROLE_DTYPES = {
    "linear": ("F8_E4M3", "BF16"),
    "linear_scale": ("F8_E8M0", "F32"),
    "expert": ("I8", "U8", "F4", "F8_E4M3"),
    "expert_scale": ("F8_E8M0", "U8", "F32"),
    "plain": ("BF16", "F32"),
    "float": ("F32", "BF16"),
    "table": ("I64", "I32"),
}
FP4_DTYPES = ("I8", "U8", "F4")
#: Values that share one scale along the input dimension in MXFP4.
FP4_GROUP = 32


def whole(value):
    """Whether this is an integer; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def hash_layers(config):
    """Layers whose experts are chosen by a table over token ids."""
    for key in ("num_hash_layers", "n_hash_layers"):
        value = config.get(key)
        if whole(value) and value >= 0:
            return value
    return 3


def block_size(config):
    """Rows and columns that share one scale of an fp8 weight."""
    quantization = config.get("quantization_config") or {}
    block = quantization.get("weight_block_size") or [128, 128]
    if isinstance(block, list) and len(block) == 2 and all(whole(n) and n > 0 for n in block):
        return tuple(block)
    return (128, 128)


def blocks(count, size):
    """How many blocks of C(size) cover C(count)."""
    return -(-count // size)


def config_problems(config):
    """Problems of config.json that make the layout underivable or wrong; list of (code, message)."""
    problems = []
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        problems.append(("config_key_missing", "config.json lacks %s" % ", ".join(missing)))
    wrong = [key for key in REQUIRED if key in config and (not whole(config[key]) or not 0 < config[key] < 1 << 31)]
    if wrong:
        problems.append(
            ("config_value_invalid", "config.json: %s" % ", ".join("%s=%s" % (key, str(config[key])[:40]) for key in wrong))
        )
    if missing or wrong:
        return problems
    layers, nextn = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    if not whole(nextn) or not 0 <= nextn < 64:
        problems.append(("config_value_invalid", "config.json: num_nextn_predict_layers=%s" % str(nextn)[:40]))
    if layers > 4096 or config["n_routed_experts"] > 65536:
        problems.append(("config_value_invalid", "config.json: %d layers of %d experts" % (layers, config["n_routed_experts"])))
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list) or not all(whole(r) for r in ratios):
        problems.append(("config_compress_ratios", "config.json: compress_ratios is not a list of numbers"))
    else:
        if len(ratios) < layers:
            problems.append(("config_compress_ratios", "compress_ratios has %d entries for %d layers" % (len(ratios), layers)))
        foreign = sorted(set(ratios) - set(RATIOS))
        if foreign:
            problems.append(("config_compress_ratios", "compress_ratios holds %s, DeepSeek-V4 knows 0, 4 and 128" % foreign))
        if any(ratios[layers:]):
            problems.append(("config_compress_ratios", "compress_ratios gives a draft layer a ratio other than 0"))
    if config["num_experts_per_tok"] > config["n_routed_experts"]:
        problems.append(("config_value_invalid", "num_experts_per_tok is larger than n_routed_experts"))
    if (config["num_attention_heads"] * config["head_dim"]) % config["o_groups"]:
        problems.append(("config_value_invalid", "o_groups does not divide num_attention_heads * head_dim"))
    if config["qk_rope_head_dim"] >= config["head_dim"]:
        problems.append(("config_value_invalid", "qk_rope_head_dim is not smaller than head_dim"))
    if config["hidden_size"] % FP4_GROUP or config["moe_intermediate_size"] % FP4_GROUP:
        problems.append(("config_value_invalid", "hidden_size and moe_intermediate_size must be multiples of %d" % FP4_GROUP))
    return problems


def top_level(config):
    """Tensors outside of the layers: name -> (role, shape)."""
    hidden, vocab, hc_mult = config["hidden_size"], config["vocab_size"], config["hc_mult"]
    tensors = {
        "embed.weight": ("plain", (vocab, hidden)),
        "norm.weight": ("plain", (hidden,)),
        "head.weight": ("plain", (vocab, hidden)),
    }
    tensors.update(_hc_head(hidden, hc_mult))
    return tensors


def _hc_head(hidden, hc_mult):
    return {
        "hc_head_fn": ("float", (hc_mult, hc_mult * hidden)),
        "hc_head_base": ("float", (hc_mult,)),
        "hc_head_scale": ("float", (1,)),
    }


def layer_template(config, ratio, hashed):
    """Tensors of one layer without its routed experts: suffix -> (role, shape)."""
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_rank, o_rank, groups = config["q_lora_rank"], config["o_lora_rank"], config["o_groups"]
    mix = (2 + config["hc_mult"]) * config["hc_mult"]
    hc_width = config["hc_mult"] * hidden
    shared = config["moe_intermediate_size"] * config["n_shared_experts"]
    tensors = {
        "attn_norm.weight": ("plain", (hidden,)),
        "ffn_norm.weight": ("plain", (hidden,)),
        "attn.attn_sink": ("float", (heads,)),
        "attn.wq_a.weight": ("linear", (q_rank, hidden)),
        "attn.q_norm.weight": ("plain", (q_rank,)),
        "attn.wq_b.weight": ("linear", (heads * head_dim, q_rank)),
        "attn.wkv.weight": ("linear", (head_dim, hidden)),
        "attn.kv_norm.weight": ("plain", (head_dim,)),
        "attn.wo_a.weight": ("linear", (groups * o_rank, heads * head_dim // groups)),
        "attn.wo_b.weight": ("linear", (hidden, groups * o_rank)),
        "ffn.gate.weight": ("plain", (config["n_routed_experts"], hidden)),
        "ffn.shared_experts.w1.weight": ("linear", (shared, hidden)),
        "ffn.shared_experts.w2.weight": ("linear", (hidden, shared)),
        "ffn.shared_experts.w3.weight": ("linear", (shared, hidden)),
    }
    for part in ("attn", "ffn"):
        tensors["hc_%s_fn" % part] = ("float", (mix, hc_width))
        tensors["hc_%s_base" % part] = ("float", (mix,))
        tensors["hc_%s_scale" % part] = ("float", (3,))
    if hashed:
        tensors["ffn.gate.tid2eid"] = ("table", (config["vocab_size"], config["num_experts_per_tok"]))
    else:
        tensors["ffn.gate.bias"] = ("float", (config["n_routed_experts"],))
    if ratio:
        # Ratio 4 keeps overlapping pairs of windows, which doubles the width.
        tensors.update(_compressor("attn.compressor", hidden, head_dim, ratio, 2 if ratio == 4 else 1))
    if ratio == 4:
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        tensors["attn.indexer.wq_b.weight"] = ("linear", (index_heads * index_dim, q_rank))
        tensors["attn.indexer.weights_proj.weight"] = ("plain", (index_heads, hidden))
        tensors.update(_compressor("attn.indexer.compressor", hidden, index_dim, ratio, 2))
    return tensors


def _compressor(prefix, hidden, width, ratio, times):
    return {
        prefix + ".wkv.weight": ("plain", (times * width, hidden)),
        prefix + ".wgate.weight": ("plain", (times * width, hidden)),
        prefix + ".ape": ("float", (ratio, times * width)),
        prefix + ".norm.weight": ("plain", (width,)),
    }


def mtp_template(config):
    """Tensors of an MTP head beside those of its layer."""
    hidden = config["hidden_size"]
    tensors = {
        "e_proj.weight": ("linear", (hidden, hidden)),
        "h_proj.weight": ("linear", (hidden, hidden)),
        "enorm.weight": ("plain", (hidden,)),
        "hnorm.weight": ("plain", (hidden,)),
        "norm.weight": ("plain", (hidden,)),
    }
    tensors.update(_hc_head(hidden, config["hc_mult"]))
    return tensors


def expert_shapes(config):
    """Logical shapes of the three matrices of a routed expert."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    return {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}


def fp8_scale_shape(config, shape):
    """Shape of the block scale of an fp8 weight."""
    rows, columns = block_size(config)
    return (blocks(shape[0], rows), blocks(shape[1], columns))


def expert_tensors(config, kind):
    """Stored tensors of one routed expert for C(fp4) or C(fp8): suffix -> (role, shape)."""
    tensors = {}
    for name, shape in expert_shapes(config).items():
        if kind == "fp4":
            tensors[name + ".weight"] = ("expert", (shape[0], shape[1] // 2))
            tensors[name + ".scale"] = ("expert_scale", (shape[0], shape[1] // FP4_GROUP))
        else:
            tensors[name + ".weight"] = ("expert", shape)
            tensors[name + ".scale"] = ("expert_scale", fp8_scale_shape(config, shape))
    return tensors


def has_dspark_keys(config):
    """Whether config.json announces a bundled DSpark draft, judged as the engine judges it."""
    return any(config.get(key) is not None for key in DSPARK_KEYS)


def groups(config):
    """The parts of the model in order: (prefix, template without routed experts, has experts)."""
    ratios = config["compress_ratios"]
    hashed = hash_layers(config)
    yield "", top_level(config), False
    cache = {}
    for layer in range(config["num_hidden_layers"]):
        key = (ratios[layer], layer < hashed)
        if key not in cache:
            cache[key] = layer_template(config, *key)
        yield "layers.%d." % layer, cache[key], True
    if not has_dspark_keys(config):
        for head in range(config.get("num_nextn_predict_layers", 0)):
            template = dict(layer_template(config, 0, False))
            template.update(mtp_template(config))
            yield "mtp.%d." % head, template, True
