# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From one topology to command lines, environments, units, ports and probe targets.

Everything here is a pure function of its arguments: no file is read, no host is asked. The plan is what the
engine gets; the findings are what is wrong with the topology, all at once, each naming the variable to mend.
"""

from __future__ import annotations

import copy

PYTHON = "bin/python"

WORKER_MODES = ("prefill", "decode", "single")
MODES = WORKER_MODES + ("router",)
UNIT_OF_MODE = {
    "prefill": "sglang-dsv4-prefill",
    "decode": "sglang-dsv4-decode",
    "router": "sglang-dsv4-router",
    "single": "sglang-dsv4",
}

TRANSFER_BACKENDS = ("mooncake_tcp", "nixl")
SPECULATIONS = ("none", "mtp", "dspark")
ROUTERS = ("sglang-router", "smg")
P2P_MODES = ("enabled", "disabled")
KERNELS = ("topk", "indexer", "indexer_topk", "sparse_mla", "nextn_moe")

# Names that SGLang 0.5.23 knows. A name outside of the first set renders or parses another model's text.
REASONING_PARSERS_V4 = ("deepseek-v4",)
TOOL_CALL_PARSERS_V4 = ("deepseekv4",)

# Two lookups by engine version: does an engine of that version render prompts by itself (deepseek-recipe), or
# does it need our jinja template? The longest matching prefix counts.
CHAT_TEMPLATE_BY_ENGINE = {
    "0.5.23": False,
    "0.5.22": True,
    "0.5.21": True,
    "0.5.20": True,
}

# Options that only exist for datacenter Blackwell (compute capability 10.x). Data, so that it can grow.
DATACENTER_ONLY = {
    ("--moe-runner-backend", "deep_gemm_mega_moe"): "mega-MoE on DeepGEMM",
    ("--moe-runner-backend", "flashinfer_trtllm"): "TRT-LLM MoE",
    ("--moe-runner-backend", "flashinfer_trtllm_routed"): "TRT-LLM MoE",
    ("--dsv4-attn-backend", "flashmla_mega"): "FlashMLA mega kernel",
    ("--dsv4-attn-backend", "trtllm"): "TRT-LLM attention",
    ("--enable-deepseek-v4-fp4-indexer", None): "FP4 indexer cache",
}

# Of a checkpoint's facts, those that the plan depends on.
MODEL_FACTS = ("speculation", "experts", "max_position_embeddings")
MOE_RUNNER_FLAGS = ("--moe-runner-backend", "--speculative-moe-runner-backend")

# The plan writes these; a second value in extra_args would make two sources of one fact.
OWNED_FLAGS = {
    "--model-path": "sglang_dsv4_model_path",
    "--model": "sglang_dsv4_model_path",
    "--served-model-name": "dsv4_topology.served_model_name",
    "--host": "{instance}.host",
    "--port": "{instance}.port",
    "--tp-size": "{instance}.gpus",
    "--tensor-parallel-size": "{instance}.gpus",
    "--base-gpu-id": "{instance}.gpus",
    "--gpu-id-step": "{instance}.gpus",
    "--numa-node": "{instance}.numa_node",
    "--nccl-port": "{instance}.nccl_port",
    "--context-length": "dsv4_topology.context_length",
    "--mem-fraction-static": "{instance}.mem_fraction_static",
    "--chunked-prefill-size": "{instance}.chunked_prefill_size",
    "--cuda-graph-max-bs-decode": "{instance}.cuda_graph_max_bs_decode",
    "--max-running-requests": "{instance}.max_running_requests",
    "--reasoning-parser": "dsv4_topology.reasoning_parser",
    "--tool-call-parser": "dsv4_topology.tool_call_parser",
    "--disaggregation-mode": "{instance}.mode",
    "--disaggregation-transfer-backend": "dsv4_topology.transfer_backend",
    "--disaggregation-bootstrap-port": "{instance}.bootstrap_port",
    "--speculative-algorithm": "dsv4_topology.speculation",
    "--speculative-num-steps": "dsv4_topology.speculation",
    "--speculative-eagle-topk": "dsv4_topology.speculation",
    "--speculative-num-draft-tokens": "dsv4_topology.speculation",
    "--chat-template": "sglang_dsv4_engine_version",
    "--disable-custom-all-reduce": "sglang_dsv4_p2p",
}
SECRET_FLAGS = ("--api-key", "--admin-api-key")

# Environment that the plan drives as a set.
P2P_ENVIRONMENT = ("NCCL_P2P_DISABLE", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE")
GPU_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
# How long a half waits for the other: the handshake, and after it the queue and the whole prefill.
PAIR_TIMEOUTS = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "bootstrap_timeout",
                 "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "waiting_timeout"}
HALVES_MUST_AGREE = ("SGLANG_OPT_SM120_DIRECT_SWA_KV", "SGLANG_DSV4_KV_LAYOUT")

TOPOLOGY_KEYS = {
    "served_model_name", "context_length", "transfer_backend", "speculation", "reasoning_parser",
    "tool_call_parser", "gpu_count", "instances",
}
INSTANCE_KEYS = {
    "mode", "gpus", "numa_node", "numa_nodes", "host", "port", "bootstrap_port", "nccl_port", "metrics_port",
    "mem_fraction_static", "chunked_prefill_size", "cuda_graph_max_bs_decode", "max_running_requests",
    "kernels", "tp_size", "extra_args", "environment",
}

# Mooncake's TCP transport listens on every address, on a port of this range, whatever it is told.
MOONCAKE_PORTS = {"prefill": (15000, 15999), "decode": (16000, 16999)}

SPECULATION_ARGV = {
    "none": [],
    "mtp": ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3",
            "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"],
    "dspark": ["--speculative-algorithm", "DSPARK"],
}
SPECULATION_ALGORITHM = {"none": None, "mtp": "EAGLE", "dspark": "DSPARK"}

DEFAULTS = {
    "gpus": [],
    "user": "dsv4",
    "engine_version": "0.5.23",
    "router_kind": "sglang-router",
    "router_launcher": "",
    "p2p": "enabled",
    "pcie_ipc_allreduce": False,
    "direct_swa_kv": False,
    "deepgemm_hc_prenorm": False,
    "kernel_path": "",
    "kernel_record": {},
    "kernel_selection": "",
    "cuda_home": "",
    "cache_root": "/var/cache/dsv4",
    "cache_key": "",
    "worker_keys": True,
    "site_path": "",
    "chat_template": "",
    "model_facts": {},
    "start_timeout": 900,
    "restart_sec": 15,
    "start_burst": 3,
    "stop_timeout": 120,
    "gpu_wait": 60,
    "router_startup_timeout": 86400,
    "router_log_level": "info",
    "request_timeout": 7200,
    "bootstrap_timeout": 100,
    "waiting_timeout": 300,
    "probe_timeout": 120,
    "prefill_rate": 4000,
    "shutdown_grace": 60,
    "api_key": False,
    "api_key_file": "/etc/dsv4/credentials/api-key",
    "firewall": True,
    "ephemeral_ports": [32768, 60999],
    "compute_capability": "12.0",
    "flag_table": {},
    "moe_methods": {},
    "environment": {},
}


class Findings(list):
    """A list that knows how to add a finding."""

    def add(self, identifier, variable, what, hint, severity="error"):
        self.append({
            "id": identifier, "severity": severity, "variable": variable, "what": what, "hint": hint,
            "line": "%s %s: %s: %s. %s" % (severity, identifier, variable, what, hint),
        })

    def warn(self, identifier, variable, what, hint):
        self.add(identifier, variable, what, hint, severity="warning")


def _integer(value):
    """The whole number that a value is, or None: YAML and -e hand over both 4096 and "4096"."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and value.strip().isdigit():
        return int(value.strip())
    return None


def _number(value):
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return float(str(value))
    except ValueError:
        return None


def _truth(value):
    if isinstance(value, str):
        return value.strip().lower() in ("true", "yes", "1", "on")
    return bool(value)


def _loopback(host):
    return host in ("127.0.0.1", "::1", "localhost") or host.startswith("127.")


def _wildcard(host):
    return host in ("0.0.0.0", "::", "*", "")


def _where(name, key):
    return "dsv4_topology.instances.%s.%s" % (name, key)


def flag_pairs(argv):
    """The flags of a command line with their values: [("--tp", ["8"]), ...], --a=b split."""
    pairs = []
    for word in argv:
        word = str(word)
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            pairs.append((flag, [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(word)
    return pairs


def full_flag(flag, table):
    """The flag that the engine's parser would take: prefixes are accepted there (--tp for --tp-size)."""
    known = set(OWNED_FLAGS) | set(SECRET_FLAGS) | set(table)
    for entry in table.values():
        known.update(entry.get("aliases") or [])
    if flag in known:
        return flag
    matches = sorted(name for name in known if name.startswith(flag))
    owned = [name for name in matches if name in OWNED_FLAGS or name in SECRET_FLAGS]
    if flag == "--tp":
        return "--tp-size"
    if len(matches) == 1:
        return matches[0]
    return owned[0] if owned and len(owned) == len(matches) else flag


def check_argv(argv, table):
    """What SGLang's own parser would refuse in a command line: a list of sentences.

    The table is files/sglang_flags.json, dumped from the real parser; prefixes are refused, so that a typo is
    found here even where argparse would guess.
    """
    by_name = {}
    for name, entry in table.items():
        by_name[name] = entry
        for alias in entry.get("aliases") or []:
            by_name[alias] = entry
    problems = []
    words = list(argv)
    while words and not str(words[0]).startswith("--"):
        words.pop(0)
    for flag, values in flag_pairs(words):
        entry = by_name.get(flag)
        if entry is None:
            problems.append("%s: no such option" % flag)
            continue
        problems.extend(_check_values(flag, values, entry))
    return problems


def _check_values(flag, values, entry):
    problems = []
    nargs = entry.get("nargs")
    takes_none = nargs == 0 or entry.get("type") in ("flag", "store_true", "bool_flag")
    if takes_none:
        if values:
            problems.append("%s: takes no value, got %s" % (flag, " ".join(values)))
        return problems
    if nargs in (None, "") and len(values) != 1:
        problems.append("%s: needs one value, got %d" % (flag, len(values)))
    if nargs == "+" and not values:
        problems.append("%s: needs at least one value" % flag)
    choices = [str(choice) for choice in entry.get("choices") or []]
    kind = entry.get("type")
    for value in values:
        if choices and value not in choices:
            problems.append("%s: %s is not one of %s" % (flag, value, ", ".join(choices)))
        if kind == "int" and _integer(value.lstrip("-")) is None:
            problems.append("%s: %s is not a whole number" % (flag, value))
        if kind == "float" and _number(value) is None:
            problems.append("%s: %s is not a number" % (flag, value))
    return problems


# --- what is wrong with a topology ---------------------------------------------------------------------


def _check_shape(topology, findings):
    """The keys and types; without these nothing else can be read."""
    if not isinstance(topology, dict) or not isinstance(topology.get("instances"), dict):
        findings.add("topology.shape", "dsv4_topology", "dsv4_topology is no dictionary with instances",
                     "Copy the shape of inventory/blackwell8/group_vars/all/topology.yml.")
        return False
    for key in sorted(set(topology) - TOPOLOGY_KEYS):
        findings.add("topology.unknown_key", "dsv4_topology.%s" % key, "unknown key %s" % key,
                     "Known keys: %s." % ", ".join(sorted(TOPOLOGY_KEYS)))
    seen = {}
    for name, instance in topology["instances"].items():
        if not isinstance(instance, dict) or instance.get("mode") not in MODES:
            findings.add("instance.mode", _where(name, "mode"),
                         "mode is %r" % (instance.get("mode") if isinstance(instance, dict) else instance),
                         "Use one of %s." % ", ".join(MODES))
            continue
        for key in sorted(set(instance) - INSTANCE_KEYS):
            findings.add("instance.unknown_key", _where(name, key), "unknown key %s" % key,
                         "Known keys: %s." % ", ".join(sorted(INSTANCE_KEYS)))
        _check_types(name, instance, findings)
        seen.setdefault(instance["mode"], []).append(name)
    for mode in MODES:
        names = seen.get(mode, [])
        if len(names) != 1:
            findings.add("topology.modes", "dsv4_topology.instances",
                         "%d instances of mode %s (%s)" % (len(names), mode, ", ".join(names) or "none"),
                         "Name exactly one instance of each mode: %s." % ", ".join(MODES))
    for key in ("served_model_name", "transfer_backend", "speculation", "reasoning_parser", "tool_call_parser"):
        if not isinstance(topology.get(key, ""), (str, type(None))):
            findings.add("topology.type", "dsv4_topology.%s" % key, "%s is %r" % (key, topology[key]),
                         "Write one word, quoted where YAML reads it as something else.")
    return not any(item["id"] in ("instance.mode", "instance.type", "topology.modes", "topology.type")
                   for item in findings)


def _scalars(value):
    return isinstance(value, list) and all(isinstance(item, (str, int, float)) and not isinstance(item, bool)
                                           for item in value)


def _check_types(name, instance, findings):
    """What the keys hold by kind, so that every later check may rely on it."""
    kinds = {
        "gpus": (_scalars, "a list of GPU indices"),
        "numa_nodes": (_scalars, "a list of node numbers"),
        "kernels": (_scalars, "a list of kernel names"),
        "extra_args": (_scalars, "a list of words, numbers included"),
        "environment": (lambda value: isinstance(value, dict) and _scalars(list(value.values())),
                        "a dictionary of words"),
        "host": (lambda value: isinstance(value, str) and bool(value.strip()), "an address"),
        "numa_node": (lambda value: isinstance(value, int) and not isinstance(value, bool),
                      "a node number, or -1 for no binding"),
    }
    for key, (right, words) in kinds.items():
        if key == "host" and key not in instance:
            findings.add("instance.type", _where(name, key), "no host", "Write %s." % words)
        elif key in instance and not right(instance[key]):
            findings.add("instance.type", _where(name, key), "%s is %r" % (key, instance[key]), "Write %s." % words)


def _check_common(topology, options, findings):
    context = topology.get("context_length")
    if _integer(context) is None or _integer(context) < 4096:
        hint = "Write the number of tokens, for example 524288."
        text = str(context).strip()
        if text[:-1].isdigit() and text[-1:] in ("M", "K", "m", "k"):
            binary = int(text[:-1]) * (1048576 if text[-1] in "Mm" else 1024)
            hint = "To the engine %s is %s000; write %d if that is what you mean." % (
                text, text[:-1] + ("000" if text[-1] in "Mm" else ""), binary)
        findings.add("context.length", "dsv4_topology.context_length",
                     "context length is %r, not a number of tokens" % (context,), hint)
    elif options["model_facts"].get("max_position_embeddings"):
        most = _integer(options["model_facts"]["max_position_embeddings"])
        if most and _integer(context) > most:
            findings.add("context.length", "dsv4_topology.context_length",
                         "%d is beyond the checkpoint's %d positions" % (_integer(context), most),
                         "Write %d or less." % most)
    if not str(topology.get("served_model_name") or "").strip():
        findings.add("model.name", "dsv4_topology.served_model_name", "no name to serve the model by",
                     "Clients send this name as model.")
    backend = topology.get("transfer_backend")
    if backend not in TRANSFER_BACKENDS:
        findings.add("transfer.backend", "dsv4_topology.transfer_backend", "transfer backend %r" % (backend,),
                     "Use %s; mooncake wants RDMA, fake moves nothing." % " or ".join(TRANSFER_BACKENDS))
    speculation = topology.get("speculation", "none")
    if speculation not in SPECULATIONS:
        findings.add("speculation.name", "dsv4_topology.speculation", "speculation %r" % (speculation,),
                     "Use one of %s." % ", ".join(SPECULATIONS))
    elif speculation != "none" and options["model_facts"].get("speculation") is not None:
        possible = options["model_facts"]["speculation"]
        possible = [possible] if isinstance(possible, str) else list(possible)
        if speculation not in possible:
            findings.add("speculation.checkpoint", "dsv4_topology.speculation",
                         "the checkpoint has no weights for %s" % speculation,
                         "It can do: %s." % (", ".join(possible) or "none"))
    _check_parser(topology, "reasoning_parser", REASONING_PARSERS_V4,
                  "thinking would stay inside the answer's content", findings)
    _check_parser(topology, "tool_call_parser", TOOL_CALL_PARSERS_V4,
                  "tool calls would stay inside the answer's content as markup", findings)


def _check_parser(topology, key, known, consequence, findings):
    value = topology.get(key)
    variable = "dsv4_topology.%s" % key
    if value in (None, ""):
        findings.warn("parser.missing", variable, "no %s is set: %s" % (key.replace("_", " "), consequence),
                      "Set it to %s." % known[0])
    elif value not in known:
        findings.add("parser.unknown", variable, "%s is no parser of this model" % value,
                     "Set it to %s; another model's parser renders another model's prompts." % known[0])


def _check_worker(name, instance, topology, options, findings):
    gpus = instance.get("gpus")
    count = _integer(topology.get("gpu_count"))
    if not isinstance(gpus, list) or not gpus or any(_integer(gpu) is None for gpu in gpus):
        findings.add("gpus.list", _where(name, "gpus"), "gpus is %r" % (gpus,), "List the GPU indices, [0, 1, 2, 3].")
        gpus = []
    else:
        gpus = [_integer(gpu) for gpu in gpus]
        twice = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
        if twice:
            findings.add("gpus.twice", _where(name, "gpus"), "GPU %s is listed twice" % _words(twice),
                         "List each GPU once.")
        beyond = [gpu for gpu in gpus if count is not None and gpu >= count]
        if beyond:
            findings.add("gpus.range", _where(name, "gpus"),
                         "GPU %s, but the host has %d GPUs" % (_words(beyond), count),
                         "Indices run from 0 to %d; see dsv4_topology.gpu_count." % (count - 1))
    tp_size = _integer(instance.get("tp_size", len(gpus)))
    if gpus and tp_size != len(gpus):
        findings.add("gpus.tp", _where(name, "tp_size"),
                     "tensor parallel size %s, but %d GPUs" % (instance.get("tp_size"), len(gpus)),
                     "Leave tp_size out, or make it %d." % len(gpus))
    for key, low, high in (("mem_fraction_static", 0.1, 0.97),):
        value = _number(instance.get(key)) if instance.get(key) is not None else None
        if value is None or not low <= value <= high:
            findings.add("memory.fraction", _where(name, key), "%s is %r" % (key, instance.get(key)),
                         "A fraction between %.2f and %.2f." % (low, high))
    for key in ("chunked_prefill_size", "cuda_graph_max_bs_decode"):
        if not _integer(instance.get(key)):
            findings.add("batch.explicit", _where(name, key), "%s is %r" % (key, instance.get(key)),
                         "Write a positive number: what the engine guesses from memory does not fit this card.")
    if instance.get("max_running_requests") is not None and not _integer(instance["max_running_requests"]):
        findings.add("batch.explicit", _where(name, "max_running_requests"),
                     "max_running_requests is %r" % (instance["max_running_requests"],), "Write a positive number.")
    _check_numa(name, instance, gpus, findings)
    _check_kernels(name, instance, findings)
    _check_extra(name, instance, gpus, options, findings)
    _check_moe(name, instance, topology, options, findings)
    if instance["mode"] in ("prefill", "decode") and not _loopback(str(instance.get("host", ""))):
        findings.add("ports.exposed", _where(name, "host"),
                     "%s listens on %s, without a key of its own" % (name, instance.get("host")),
                     "Only the router leaves the loopback interface: 127.0.0.1.")


def _words(items):
    return ", ".join(str(item) for item in items)


def _check_numa(name, instance, gpus, findings):
    node = instance.get("numa_node", -1)
    if isinstance(node, bool) or not isinstance(node, int) or node < -1:
        findings.add("numa.node", _where(name, "numa_node"), "numa_node is %r" % (node,),
                     "A node number, or -1 for no binding.")
    nodes = instance.get("numa_nodes")
    if nodes is None:
        return
    if not isinstance(nodes, list) or len(nodes) != len(gpus):
        findings.add("numa.length", _where(name, "numa_nodes"),
                     "numa_nodes has %s entries for %d GPUs: %s"
                     % (len(nodes) if isinstance(nodes, list) else "no", len(gpus), _words(gpus)),
                     "The engine indexes it by GPU: one entry for each.")
    elif any(isinstance(entry, bool) or not isinstance(entry, int) or entry < 0 for entry in nodes):
        findings.add("numa.node", _where(name, "numa_nodes"), "numa_nodes is %r" % (nodes,), "Node numbers from 0.")
    elif isinstance(node, int) and node >= 0 and set(nodes) != {node}:
        findings.add("numa.conflict", _where(name, "numa_nodes"),
                     "numa_nodes %s, but the unit is bound to node %d" % (_words(nodes), node),
                     "A unit bound to one node can't place ranks on another: numa_node -1.")


def _check_kernels(name, instance, findings):
    for kernel in instance.get("kernels") or []:
        if kernel not in KERNELS:
            findings.add("kernels.unknown", _where(name, "kernels"), "unknown kernel %s" % kernel,
                         "Known: %s." % ", ".join(KERNELS))


def _check_extra(name, instance, gpus, options, findings):
    variable = _where(name, "extra_args")
    extra = instance.get("extra_args") or []
    if not isinstance(extra, list):
        findings.add("extra.list", variable, "extra_args is no list", "One word an entry.")
        return
    capability = str(options["compute_capability"] or "")
    for flag, values in flag_pairs(extra):
        whole = full_flag(flag, options["flag_table"])
        value = values[0] if values else None
        if whole in SECRET_FLAGS:
            findings.add("extra.secret", variable, "%s on a command line is readable by every user" % whole,
                         "Use sglang_dsv4_api_key or sglang_dsv4_api_key_file.")
        elif whole in OWNED_FLAGS:
            findings.add("extra.owned", variable,
                         "%s %s given by hand; the plan writes it for GPUs %s"
                         % (flag, " ".join(values), _words(gpus)),
                         "Set %s." % OWNED_FLAGS[whole].replace(
                             "{instance}", "dsv4_topology.instances.%s" % name))
        for wanted in ((whole, value), (whole, None), ("--moe-runner-backend", value)):
            if whole in MOE_RUNNER_FLAGS + ("--dsv4-attn-backend", "--enable-deepseek-v4-fp4-indexer") \
                    and wanted in DATACENTER_ONLY and capability.partition(".")[0] != "10":
                findings.add("extra.capability", variable,
                             "%s (%s): option needs compute capability 10.x; host is %s"
                             % (" ".join([flag] + values), DATACENTER_ONLY[wanted], capability or "unknown"),
                             "Leave it out: sm_120 is not sm_100.")
                break
        if options["flag_table"] and whole not in OWNED_FLAGS and whole not in SECRET_FLAGS:
            for problem in check_argv([whole] + values, options["flag_table"]):
                if problem.endswith("no such option"):
                    findings.warn("extra.unknown", variable,
                                  "%s is unknown to SGLang %s" % (flag, options["engine_version"]),
                                  "Unknown options end the engine with exit code 2.")
                else:
                    findings.add("extra.value", variable, problem, "See files/sglang_flags.json.")
    _check_environment(_where(name, "environment"), instance.get("environment") or {},
                       "GPUs %s; set %s" % (_words(gpus), _where(name, "gpus")), findings)


def _check_environment(variable, environment, binding, findings):
    """What the plan drives as a set is not given by hand: for one instance or for all workers."""
    for key in sorted(set(environment) & set(GPU_ENVIRONMENT)):
        findings.add("environment.gpus", variable,
                     "%s=%s by hand, but the plan binds the GPUs" % (key, environment[key]), "Leave it out: the plan binds %s." % binding)
    for key in sorted(set(environment) & set(PAIR_TIMEOUTS)):
        findings.add("environment.timeouts", variable, "%s=%s by hand" % (key, environment[key]),
                     "Set sglang_dsv4_%s, which both halves follow." % PAIR_TIMEOUTS[key])
    for key in sorted(set(environment) & set(P2P_ENVIRONMENT)):
        findings.add("environment.p2p", variable,
                     "%s=%s by hand drives one peer path only: %s"
                     % (key, environment[key],
                        "P2P disabled for NCCL but custom all-reduce still on"
                        if key == "NCCL_P2P_DISABLE" else "NCCL and custom all-reduce do not follow it"),
                     "Set sglang_dsv4_p2p, which drives NCCL, custom and PCIe-IPC all-reduce together.")


def moe_rows(topology, options):
    """What is known of the MoE methods for this checkpoint and its draft: rows of files/moe_methods.json by their settings.

    Nothing is known of another engine than the one that they were taken from.
    """
    if options["moe_methods"].get("engine") != "sglang %s" % str(options["engine_version"]).partition("+")[0]:
        return {}
    checkpoints = options["moe_methods"].get("checkpoints") or {}
    kind = options["model_facts"].get("experts") or "fp4"
    speculation = topology.get("speculation", "none")
    rows = checkpoints.get("%s-%s" % (kind, speculation)) or checkpoints.get("%s-mtp" % kind) or []
    return {tuple(sorted(_moe_words(row["settings"]))): row for row in rows}


def _moe_words(words):
    """Settings of a row or a command line, a flag and its value as one: ["A=1", "--flag value"]."""
    pairs = [" ".join([flag] + values) for flag, values in flag_pairs(words)]
    return [word for word in words if "=" in word and not word.startswith("--")] + pairs


def moe_settings(instance, options):
    """The settings of an instance that take part in the choice of the MoE method, each with the key of the instance that holds it."""
    rows = [row for rows in (options["moe_methods"].get("checkpoints") or {}).values() for row in rows]
    names = {setting.split("=")[0].split()[0] for row in rows for setting in _moe_words(row["settings"])}
    found = {}
    for flag, values in flag_pairs(instance.get("extra_args") or []):
        whole = full_flag(flag, options["flag_table"])
        if whole in names:
            found[" ".join([whole] + values)] = "extra_args"
    for source in (options["environment"], instance.get("environment") or {}):
        found.update({"%s=%s" % item: "environment" for item in source.items() if item[0] in names})
    return found


def moe_fault(settings, rows, speculation):
    """Why these settings must not serve, None when the table says that they do.

    A runner for the target and one for the draft choose apart from each other; anything else has to be in the table as it is.
    """
    def fault(row):
        if row is None:
            return "nobody has tried it"
        if "refused" in row:
            return "the engine refuses it: %s" % row["refused"]
        ends = [(layer, row["stock"][layer]["outcome"]) for layer in (("target",) if speculation == "none" else ("target", "draft"))]
        return "; ".join("the %s's experts: %s" % end for end in ends if end[1] != "right") or None

    together = rows.get(tuple(sorted(settings)))
    if together is None and all(setting.split()[0] in MOE_RUNNER_FLAGS for setting in settings):
        return "; ".join(filter(None, (fault(rows.get((setting,))) for setting in sorted(settings)))) or None
    return fault(together)


def _check_moe(name, instance, topology, options, findings):
    if topology.get("speculation", "none") != "none" and options["kernel_path"] and "nextn_moe" not in (instance.get("kernels") or []):
        findings.warn("kernels.draft", _where(name, "kernels"), "nobody watches the numbers of the draft", "Add nextn_moe.")
    rows = moe_rows(topology, options)
    settings = moe_settings(instance, options)
    if not settings or any(tuple(setting.split()) in DATACENTER_ONLY for setting in settings):
        return
    speculation = topology.get("speculation", "none")
    fault = moe_fault(settings, rows, speculation)
    if fault:
        flags = {setting.split("=")[0].split()[0] for setting in settings}
        good = [key[0] for key in rows if len(key) == 1 and key[0].split("=")[0].split()[0] in flags and not moe_fault(key, rows, speculation)]
        findings.add("extra.moe_runner", _where(name, next(iter(settings.values()))),
                     "%s: %s" % (" and ".join(sorted(settings)), fault),
                     "Leave it out%s; files/moe_methods.json says what each setting ends in."
                     % (", or use one of: %s" % ", ".join(good) if good else ""))


def _expected_moe(instance, topology, options):
    """The runners that the engine must report, for verification."""
    rows = moe_rows(topology, options)
    settings = moe_settings(instance, options)
    known = [rows[key] for key in [tuple(sorted(settings))] + [(setting,) for setting in sorted(settings)] if key in rows]
    if not known or "runner" not in known[0]:
        return {}
    expected = {"moe_runner_backend": known[0]["runner"]}
    if topology.get("speculation", "none") != "none":
        expected["speculative_moe_runner_backend"] = known[-1]["draft_runner"]
    return expected


def _check_between(topology, findings):
    """What only shows when instances are looked at side by side."""
    instances = topology["instances"]
    by_mode = {instance["mode"]: (name, instance) for name, instance in instances.items()}
    prefill_name, prefill = by_mode["prefill"]
    decode_name, decode = by_mode["decode"]
    if isinstance(prefill.get("gpus"), list) and isinstance(decode.get("gpus"), list):
        shared = sorted({str(gpu) for gpu in prefill["gpus"]} & {str(gpu) for gpu in decode["gpus"]})
        if shared:
            findings.add("gpus.shared", _where(decode_name, "gpus"),
                         "GPU %s is in %s and in %s" % (_words(shared), prefill_name, decode_name),
                         "The two run at the same time: give each its own GPUs.")
    for key in HALVES_MUST_AGREE:
        left = (prefill.get("environment") or {}).get(key)
        right = (decode.get("environment") or {}).get(key)
        if str(left) != str(right):
            findings.add("halves.differ", _where(decode_name, "environment"),
                         "%s is %s on %s and %s on %s" % (key, left, prefill_name, right, decode_name),
                         "The halves exchange memory in this layout: set both or none.")
    left = [pair for pair in flag_pairs(prefill.get("extra_args") or []) if pair[0].startswith("--speculative")]
    right = [pair for pair in flag_pairs(decode.get("extra_args") or []) if pair[0].startswith("--speculative")]
    if left != right:
        findings.add("halves.speculation", _where(decode_name, "extra_args"),
                     "speculative flags on %s and %s differ: %s | %s"
                     % (prefill_name, decode_name, _flags(left), _flags(right)),
                     "The halves must speculate alike: set dsv4_topology.speculation.")


def _flags(pairs):
    return " ".join(" ".join([flag] + values) for flag, values in pairs) or "none"


def _check_ports(topology, plan_listeners, options, findings):
    low, high = (_integer(bound) for bound in options["ephemeral_ports"])
    for name, instance in topology["instances"].items():
        needed = ["port"]
        if instance["mode"] == "prefill":
            needed.append("bootstrap_port")
        if instance["mode"] in WORKER_MODES:
            needed.append("nccl_port")
        if instance["mode"] == "router":
            needed.append("metrics_port")
        for key in needed + [key for key in ("bootstrap_port",) if key in instance and key not in needed]:
            port = _integer(instance.get(key))
            if port is None or not 1024 <= port <= 65535:
                findings.add("ports.explicit", _where(name, key), "%s is %r" % (key, instance.get(key)),
                             "Write a port between 1024 and 65535.")
            elif low <= port <= high:
                findings.add("ports.ephemeral", _where(name, key), "%d lies in %d-%d" % (port, low, high),
                             "The kernel hands those ports to anybody: choose one below %d." % low)
    _check_overlap(plan_listeners, findings)


def _check_overlap(listeners, findings):
    said = set()
    for index, first in enumerate(listeners):
        for second in listeners[index + 1:]:
            together = {first["mode"], second["mode"]}
            # The fallback never runs beside the three others, so it shares the public port with the router.
            if "single" in together and len(together) > 1:
                continue
            if first["port"] > second["port_end"] or second["port"] > first["port_end"]:
                continue
            if first["instance"] == second["instance"] and first["variable"] == second["variable"]:
                continue
            key = (second["variable"], first["variable"])
            if key in said:
                continue
            said.add(key)
            port = max(first["port"], second["port"])
            what = "port %d used by %s (%s) and %s (%s)" % (
                port, first["instance"], first["what"], second["instance"], second["what"])
            if first["what"] == second["what"]:
                what = "%s port %d used by %s and %s" % (
                    first["what"], port, first["instance"], second["instance"])
            findings.add("ports.twice", second["variable"], what, "Give each listener a port of its own.")


def _check_options(options, findings):
    start = _integer(options["start_timeout"])
    if start is None or start < 120:
        findings.add("timeouts.start", "sglang_dsv4_start_timeout",
                     "start limit %r s is too short to load the model" % (options["start_timeout"],),
                     "systemd's own 90 s kill a loading server: 900.")
    else:
        router = _integer(options["router_startup_timeout"])
        if router is None or router < start:
            findings.add("timeouts.router", "sglang_dsv4_router_startup_timeout",
                         "the router gives up on a worker after %r s, a worker may load for %d s"
                         % (options["router_startup_timeout"], start),
                         "At least sglang_dsv4_start_timeout; it forgets a late worker for good.")
    if options["p2p"] not in P2P_MODES:
        findings.add("p2p.mode", "sglang_dsv4_p2p", "p2p is %r" % (options["p2p"],),
                     "Use %s." % " or ".join(P2P_MODES))
    elif options["p2p"] == "disabled" and _truth(options["pcie_ipc_allreduce"]):
        findings.add("p2p.conflict", "sglang_dsv4_pcie_ipc_allreduce",
                     "PCIe-IPC all-reduce asked for while sglang_dsv4_p2p is disabled",
                     "It is a peer path too: switch one of them.")
    if options["router_kind"] not in ROUTERS:
        findings.add("router.kind", "sglang_dsv4_router", "router is %r" % (options["router_kind"],),
                     "Use %s." % " or ".join(ROUTERS))
    if options["router_kind"] == "smg":
        findings.warn("router.thinking", "sglang_dsv4_router",
                      "smg turns thinking on for requests that do not mention it",
                      "Thinking is opt-in only through sglang-router.")


def _check_pair_timeouts(topology, options, findings):
    """The limits of the halves against those around them. Only the handshake can stay below a probe's limit: the wait after it
    holds the prefill, and 500,000 tokens take minutes."""
    bootstrap, waiting, probe, rate, request = (_integer(options[key]) for key in (
        "bootstrap_timeout", "waiting_timeout", "probe_timeout", "prefill_rate", "request_timeout"))
    if not (bootstrap and waiting and probe and rate and request):
        return
    if bootstrap >= probe:
        findings.warn("timeouts.bootstrap", "sglang_dsv4_bootstrap_timeout",
                      "a half looks %d s for the other, a probe gives up after %d s: it never hears why" % (bootstrap, probe),
                      "Below %d, or a longer verification_timeout." % probe)
    context = _integer(topology.get("context_length"))
    if context and waiting * rate < context:
        findings.warn("timeouts.waiting", "sglang_dsv4_waiting_timeout",
                      "decode waits %d s for the KV, prefill needs %d s for %d tokens at %d a second: long prompts are aborted"
                      % (waiting, -(-context // rate), context, rate),
                      "At least %d; with it a request whose prefill failed is also given up that late." % -(-context // rate))
    if max(bootstrap, waiting) >= request:
        late = "waiting_timeout" if waiting >= bootstrap else "bootstrap_timeout"
        findings.add("timeouts.request", "sglang_dsv4_%s" % late,
                     "the router ends a request after %d s, a half gives up after %d s" % (request, max(bootstrap, waiting)),
                     "Below sglang_dsv4_request_timeout, or the client never gets the engine's error.")


def _check_gpu_facts(topology, gpus, findings):
    if not gpus:
        findings.warn("gpus.unread", "dsv4_topology.gpu_count",
                      "no GPU facts: devices are bound by index instead of UUID",
                      "On a host the driver role hands them over.")
        return
    count = _integer(topology.get("gpu_count"))
    known = {gpu.get("index") for gpu in gpus}
    missing = [index for index in range(count or 0) if index not in known]
    if missing:
        findings.add("gpus.missing", "dsv4_topology.gpu_count",
                     "GPU %s not found on the host; it has %s" % (_words(missing), _words(sorted(known))),
                     "A card fell off the bus, or gpu_count is wrong.")
    nodes = {gpu.get("index"): gpu.get("numa_node") for gpu in gpus}
    for name, instance in topology["instances"].items():
        node = instance.get("numa_node", -1)
        if instance["mode"] not in WORKER_MODES or not isinstance(node, int) or node < 0:
            continue
        elsewhere = [gpu for gpu in instance.get("gpus") or []
                     if isinstance(nodes.get(gpu), int) and nodes[gpu] >= 0 and nodes[gpu] != node]
        if elsewhere:
            findings.add("numa.mismatch", _where(name, "numa_node"),
                         "bound to node %d, but GPU %s is on node %s"
                         % (node, _words(elsewhere), _words(sorted({nodes[gpu] for gpu in elsewhere}))),
                         "numa_node %d for these GPUs, or -1 for no binding." % nodes[elsewhere[0]])


# --- the plan --------------------------------------------------------------------------------------------


def _listeners(name, instance, topology):
    """Every port that an instance opens, its address, and where the number comes from."""
    mode = instance["mode"]
    host = str(instance.get("host", "127.0.0.1"))

    def entry(key, what, address, wildcard_ok=False, last=None):
        port = _integer(instance.get(key)) if isinstance(key, str) else key
        return {
            "instance": name, "mode": mode, "port": port, "port_end": last if last is not None else port,
            "address": address, "what": what, "wildcard_ok": wildcard_ok,
            "range": "%s-%s" % (port, last) if last is not None else str(port),
            "variable": _where(name, key) if isinstance(key, str) else "dsv4_topology.transfer_backend",
        }

    listeners = [entry("port", "http", host, wildcard_ok=mode in ("router", "single"))]
    if mode == "prefill" or "bootstrap_port" in instance:
        listeners.append(entry("bootstrap_port", "bootstrap", host))
    if mode in WORKER_MODES:
        # torch's rendezvous store binds every address; it lives only inside one unit.
        listeners.append(entry("nccl_port", "nccl rendezvous", "*", wildcard_ok=True))
    if mode == "router":
        listeners.append(entry("metrics_port", "router metrics", "127.0.0.1"))
    if mode in MOONCAKE_PORTS and topology.get("transfer_backend") == "mooncake_tcp":
        first, last = MOONCAKE_PORTS[mode]
        listeners.append(entry(first, "kv transfer", "*", wildcard_ok=True, last=last))
    return [listener for listener in listeners if listener["port"] is not None]


def _gpu_binding(instance, topology, options):
    """CUDA_VISIBLE_DEVICES, the flags that go with it, and what the unit holds."""
    gpus = [_integer(gpu) for gpu in instance["gpus"]]
    uuids = {gpu.get("index"): gpu.get("uuid") for gpu in options["gpus"]}
    by_uuid = bool(uuids) and all(uuids.get(gpu) for gpu in gpus)
    everything = topology.get("transfer_backend") == "nixl" and instance["mode"] in ("prefill", "decode")
    visible = list(range(_integer(topology["gpu_count"]))) if everything else gpus
    if by_uuid and not all(uuids.get(gpu) for gpu in visible):
        visible = gpus
        everything = False
    flags = []
    if everything and gpus[0] != 0:
        flags += ["--base-gpu-id", str(gpus[0])]
    if by_uuid or options["p2p"] == "disabled":
        flags.append("--disable-custom-all-reduce")
    nodes = _numa_list(instance, topology, visible)
    if nodes:
        flags += ["--numa-node"] + [str(node) for node in nodes]
    return {
        "visible": ",".join(uuids[gpu] if by_uuid else str(gpu) for gpu in visible),
        "flags": flags,
        "uuids": [uuids[gpu] for gpu in gpus] if by_uuid else [],
        "numa_bound": bool(nodes),
    }


def _numa_list(instance, topology, visible):
    """One node for each visible GPU (the engine indexes the list by GPU), or nothing."""
    nodes = {}
    for other in topology["instances"].values():
        if other["mode"] not in ("prefill", "decode"):
            continue
        listed = other.get("numa_nodes") or [other.get("numa_node", -1)] * len(other.get("gpus") or [])
        nodes.update(zip([_integer(gpu) for gpu in other.get("gpus") or []], listed))
    if instance.get("numa_nodes"):
        nodes.update(zip([_integer(gpu) for gpu in instance["gpus"]], instance["numa_nodes"]))
    elif instance.get("numa_node", -1) < 0:
        return []
    else:
        nodes.update({_integer(gpu): instance["numa_node"] for gpu in instance["gpus"]})
    wanted = [nodes.get(gpu, -1) for gpu in visible]
    return wanted if all(isinstance(node, int) and node >= 0 for node in wanted) else []


def cache_environment(root):
    """Where every compiler and cache of the engine writes: below one folder of the instance."""
    return {
        "HOME": root,
        "XDG_CACHE_HOME": root + "/xdg",
        "TRITON_CACHE_DIR": root + "/triton",
        "TORCHINDUCTOR_CACHE_DIR": root + "/inductor",
        "TORCH_EXTENSIONS_DIR": root + "/torch-extensions",
        "FLASHINFER_WORKSPACE_BASE": root + "/flashinfer",
        "TILELANG_CACHE_DIR": root + "/tilelang",
        "TVM_FFI_CACHE_DIR": root + "/tvm-ffi",
        "SGLANG_DG_CACHE_DIR": root + "/deep-gemm",
        "CUDA_CACHE_PATH": root + "/cuda",
        "OUTLINES_CACHE_DIR": root + "/outlines",
    }


def serving_kernels(instance, options):
    """The kernels of ours that an instance runs: listed in the topology, built, and not ruled out by the record."""
    if not options["kernel_path"]:
        return []
    applied = options["kernel_record"].get("applied")
    return [kernel for kernel in instance.get("kernels") or [] if applied is None or kernel in applied]


def stock_kernels(name, instance, options):
    """The kernels that the topology lists for an instance and that are the engine's own after all, an entry for each reason."""
    serving = serving_kernels(instance, options)
    reasons = options["kernel_record"].get("stock") or {}
    by_reason = {}
    for kernel in instance.get("kernels") or []:
        if kernel not in serving:
            by_reason.setdefault(reasons.get(kernel, "no kernels of ours are installed"), []).append(kernel)
    return [{"instance": name, "kernels": kernels, "reason": reason, "line": "%s: the engine's own %s: %s" % (name, _words(kernels), reason)}
            for reason, kernels in by_reason.items()]


def rows_per_request(topology):
    """Rows that a request has in a decode step: its draft tokens while they are verified, else one."""
    tokens = dict(flag_pairs(SPECULATION_ARGV[topology.get("speculation", "none")])).get("--speculative-num-draft-tokens")
    return int(tokens[0]) if tokens else 1


def _worker_environment(name, instance, binding, topology, options, engine):
    root = "%s/%s%s" % (options["cache_root"], name, "/" + options["cache_key"] if options["cache_key"] else "")
    environment = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": binding["visible"],
        "SGLANG_HOST_IP": "127.0.0.1",
        # NCCL and Gloo do not ask it: they listen at the first interface, or where the host's name points, and connect to each other there.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
    }
    environment.update(cache_environment(root))
    # The engine compiles kernels by the word ninja, which its own environment brings.
    programs = ["%s/bin" % engine]
    if options["cuda_home"]:
        environment["CUDA_HOME"] = options["cuda_home"]
        programs.append("%s/bin" % options["cuda_home"])
    environment["PATH"] = ":".join(programs + ["/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"])
    if not binding["numa_bound"]:
        environment["SGLANG_AUTO_NUMA_BIND"] = "0"
    if options["p2p"] == "disabled":
        environment["NCCL_P2P_DISABLE"] = "1"
        environment["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] = "0"
        if topology.get("transfer_backend") == "nixl":
            environment["UCX_TLS"] = "cuda_copy,sm,self,tcp"
    elif _truth(options["pcie_ipc_allreduce"]):
        environment["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] = "1"
    if _truth(options["direct_swa_kv"]):
        environment["SGLANG_OPT_SM120_DIRECT_SWA_KV"] = "1"
    if _truth(options["deepgemm_hc_prenorm"]) and instance["mode"] == "prefill":
        environment["SGLANG_OPT_DEEPGEMM_HC_PRENORM"] = "1"
    if instance["mode"] in MOONCAKE_PORTS and topology.get("transfer_backend") == "mooncake_tcp":
        first, last = MOONCAKE_PORTS[instance["mode"]]
        environment["MC_MIN_RPC_PORT"] = str(first)
        environment["MC_MAX_RPC_PORT"] = str(last)
    if instance["mode"] in ("prefill", "decode"):
        environment.update({key: str(_integer(options[option])) for key, option in PAIR_TIMEOUTS.items()})
    kernels = serving_kernels(instance, options)
    paths = []
    if _truth(options["api_key"]) and _truth(options["worker_keys"]) and options["site_path"]:
        paths.append(options["site_path"])
    if kernels:
        paths.append(options["kernel_path"])
        environment["SGLANG_PLUGINS"] = "dsv4_sm120"
        environment["DSV4_SM120_KERNELS"] = ",".join(kernels)
        if options["kernel_selection"]:
            environment["DSV4_SM120_SELECTION"] = options["kernel_selection"]
    if paths:
        environment["PYTHONPATH"] = ":".join(paths)
    for source in (options["environment"], instance.get("environment") or {}):
        environment.update({str(key): str(value) for key, value in source.items()})
    return environment


def _worker_argv(instance, binding, topology, options, engine, model_path):
    argv = [
        "%s/%s" % (engine, PYTHON), "-m", "sglang.launch_server",
        "--model-path", model_path,
        "--served-model-name", str(topology["served_model_name"]),
        "--host", str(instance["host"]),
        "--port", str(_integer(instance["port"])),
        "--tp-size", str(len(instance["gpus"])),
        "--nccl-port", str(_integer(instance["nccl_port"])),
        "--context-length", str(_integer(topology["context_length"])),
        "--mem-fraction-static", "%g" % _number(instance["mem_fraction_static"]),
        "--chunked-prefill-size", str(_integer(instance["chunked_prefill_size"])),
        "--cuda-graph-max-bs-decode", str(_integer(instance["cuda_graph_max_bs_decode"])),
    ]
    if instance.get("max_running_requests"):
        argv += ["--max-running-requests", str(_integer(instance["max_running_requests"]))]
    for key, flag in (("reasoning_parser", "--reasoning-parser"), ("tool_call_parser", "--tool-call-parser")):
        if topology.get(key):
            argv += [flag, str(topology[key])]
    if instance["mode"] in ("prefill", "decode"):
        argv += ["--disaggregation-mode", instance["mode"],
                 "--disaggregation-transfer-backend", topology["transfer_backend"]]
    if instance["mode"] == "prefill":
        argv += ["--disaggregation-bootstrap-port", str(_integer(instance["bootstrap_port"]))]
    argv += SPECULATION_ARGV[topology.get("speculation", "none")]
    argv += binding["flags"]
    if needs_chat_template(options["engine_version"]) and options["chat_template"]:
        argv += ["--chat-template", options["chat_template"]]
    argv.append("--enable-metrics")
    if _truth(options["api_key"]) and _truth(options["worker_keys"]):
        # systemd's copy of the credential; options in it never show in the process list.
        argv += ["--config", "/run/credentials/%s.service/worker.yaml" % UNIT_OF_MODE[instance["mode"]]]
    return argv + [str(word) for word in instance.get("extra_args") or []]


def needs_chat_template(engine_version):
    """Whether an engine of this version needs our jinja template to render prompts."""
    version = str(engine_version).partition("+")[0]
    best = max((known for known in CHAT_TEMPLATE_BY_ENGINE if version.startswith(known)), key=len, default=None)
    return CHAT_TEMPLATE_BY_ENGINE[best] if best is not None else False


def _router_argv(instance, topology, options, router):
    workers = {other["mode"]: other for other in topology["instances"].values()}
    prefill, decode = workers["prefill"], workers["decode"]
    argv = ["%s/%s" % (router, PYTHON)]
    if options["router_launcher"]:
        argv += [options["router_launcher"], options["router_kind"]]
    elif options["router_kind"] == "smg":
        argv += ["-m", "smg", "launch"]
    else:
        argv += ["-m", "sglang_router.launch_router"]
    argv += [
        "--pd-disaggregation",
        "--prefill", _url(prefill), str(_integer(prefill["bootstrap_port"])),
        "--decode", _url(decode),
        "--host", str(instance["host"]),
        "--port", str(_integer(instance["port"])),
        "--policy", "round_robin",
        "--worker-startup-timeout-secs", str(_integer(options["router_startup_timeout"])),
        "--health-check-interval-secs", "10",
        "--health-check-timeout-secs", "30",
        "--health-failure-threshold", "6",
        "--health-success-threshold", "1",
        "--disable-circuit-breaker",
        "--disable-retries",
        "--request-timeout-secs", str(_integer(options["request_timeout"])),
        "--shutdown-grace-period-secs", str(_integer(options["shutdown_grace"])),
        "--prometheus-host", "127.0.0.1",
        "--prometheus-port", str(_integer(instance["metrics_port"])),
        "--log-level", str(options["router_log_level"]),
    ]
    if options["router_kind"] == "smg":
        argv += ["--worker-startup-check-interval", "5", "--disable-tokenizer-autoload", "--log-json",
                 "--pd-admission-wait-secs", "600"]
    return argv + [str(word) for word in instance.get("extra_args") or []]


def _url(instance):
    host = str(instance["host"])
    if _wildcard(host):
        host = "127.0.0.1"
    if ":" in host:
        host = "[%s]" % host
    return "http://%s:%d" % (host, _integer(instance["port"]))


def _worker(name, instance, topology, options, engine, model_path):
    binding = _gpu_binding(instance, topology, options)
    url = _url(instance)
    return {
        "name": name,
        "unit": UNIT_OF_MODE[instance["mode"]],
        "mode": instance["mode"],
        "argv": _worker_argv(instance, binding, topology, options, engine, model_path),
        "environment": _worker_environment(name, instance, binding, topology, options, engine),
        "host": str(instance["host"]),
        "port": _integer(instance["port"]),
        "url": url,
        "health_url": url + "/health",
        "bootstrap_port": _integer(instance.get("bootstrap_port")),
        "gpus": [_integer(gpu) for gpu in instance["gpus"]],
        "gpu_uuids": binding["uuids"],
        "numa_node": instance.get("numa_node", -1),
        "tp_size": len(instance["gpus"]),
        "mem_fraction_static": _number(instance["mem_fraction_static"]),
        "context_length": _integer(topology["context_length"]),
        "kernels": serving_kernels(instance, options),
        "kernel_build": options["kernel_record"].get("build", ""),
        "rows_per_request": rows_per_request(topology),
        "listeners": _listeners(name, instance, topology),
        "expect": {
            **_expected_moe(instance, topology, options),
            "served_model_name": topology["served_model_name"],
            "context_length": _integer(topology["context_length"]),
            "tp_size": len(instance["gpus"]),
            "mem_fraction_static": _number(instance["mem_fraction_static"]),
            "chunked_prefill_size": _integer(instance["chunked_prefill_size"]),
            "cuda_graph_max_bs_decode": _integer(instance["cuda_graph_max_bs_decode"]),
            "reasoning_parser": topology.get("reasoning_parser") or None,
            "tool_call_parser": topology.get("tool_call_parser") or None,
            "disaggregation_mode": instance["mode"] if instance["mode"] != "single" else "null",
            "speculative_algorithm": SPECULATION_ALGORITHM[topology.get("speculation", "none")],
            "enable_metrics": True,
        },
    }


def _router(name, instance, topology, options, router):
    url = _url(instance)
    return {
        "name": name,
        "unit": UNIT_OF_MODE["router"],
        "mode": "router",
        "kind": options["router_kind"],
        "argv": _router_argv(instance, topology, options, router),
        "environment": dict(
            {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1",
             "HF_HUB_OFFLINE": "1", "HOME": "%s/%s" % (options["cache_root"], name)},
            **{str(key): str(value) for key, value in (instance.get("environment") or {}).items()}),
        "host": str(instance["host"]),
        "port": _integer(instance["port"]),
        "url": url,
        "health_url": url + "/readiness",
        "metrics_url": "http://127.0.0.1:%d/metrics" % _integer(instance["metrics_port"]),
        "gpus": [],
        "gpu_uuids": [],
        "numa_node": -1,
        "listeners": _listeners(name, instance, topology),
        "expect": {"served_model_name": topology["served_model_name"]},
    }


def start_limit_interval(start_timeout, restart_sec, burst, gpu_wait=0, stop_timeout=0):
    """A start limit that can trigger: longer than all its tries take together."""
    return burst * (gpu_wait + start_timeout + stop_timeout + restart_sec) + 60


def serving_plan(topology, engine="", router="", model_path="", **given):
    """The plan for a topology, and what is wrong with it. With an error among the findings there is no plan."""
    unknown = sorted(set(given) - set(DEFAULTS))
    if unknown:
        raise TypeError("serving_plan: unknown option %s" % _words(unknown))
    options = copy.deepcopy(DEFAULTS)
    options.update({key: value for key, value in given.items() if value is not None})
    findings = Findings()
    plan = {
        "instances": {}, "modes": {}, "endpoint": {}, "served_model_name": None, "listeners": [], "timing": {},
        "stock_kernels": [],
        "auth": {"api_key": _truth(options["api_key"]),
                 "api_key_file": options["api_key_file"] if _truth(options["api_key"]) else "",
                 "workers": _truth(options["api_key"]) and _truth(options["worker_keys"])},
        "model": {key: options["model_facts"][key] for key in MODEL_FACTS if options["model_facts"].get(key) is not None},
        "gpus": [{key: gpu.get(key) for key in ("index", "uuid", "bus_id", "name", "numa_node", "compute_capability")}
                 for gpu in options["gpus"]],
        "chat_template": needs_chat_template(options["engine_version"]) and bool(options["chat_template"]),
        "findings": findings,
    }
    if not _check_shape(topology, findings):
        return plan
    instances = topology["instances"]
    plan["served_model_name"] = topology.get("served_model_name")
    for key in ("restart_sec", "start_burst", "stop_timeout", "gpu_wait", "shutdown_grace", "request_timeout",
                "bootstrap_timeout", "waiting_timeout", "prefill_rate"):
        if not _integer(options[key]):
            findings.add("timeouts.number", "sglang_dsv4_%s" % key, "%s is %r" % (key, options[key]),
                         "Write a positive number.")
    _check_options(options, findings)
    _check_pair_timeouts(topology, options, findings)
    _check_environment("sglang_dsv4_environment", options["environment"], "each instance's own; set its gpus", findings)
    _check_common(topology, options, findings)
    for name, instance in instances.items():
        if instance["mode"] in WORKER_MODES:
            _check_worker(name, instance, topology, options, findings)
    if _integer(topology.get("gpu_count")) is None:
        findings.add("gpus.count", "dsv4_topology.gpu_count", "gpu_count is %r" % (topology.get("gpu_count"),),
                     "The number of GPUs of the host.")
    else:
        _check_gpu_facts(topology, options["gpus"], findings)
    _check_between(topology, findings)
    for name, instance in instances.items():
        plan["listeners"] += _listeners(name, instance, topology)
    _check_ports(topology, plan["listeners"], options, findings)
    if not _truth(options["firewall"]):
        findings.warn("ports.unfiltered", "sglang_dsv4_firewall",
                      "ports %s are on every address, and only the units' own IPAddressDeny keeps other hosts from them"
                      % _words(item["range"] for item in plan["listeners"] if item["address"] == "*"),
                      "Let the units load their table, or close these ports in a filter of yours.")
    if any(finding["severity"] == "error" for finding in findings):
        return plan
    for name, instance in instances.items():
        if instance["mode"] == "router":
            plan["instances"][name] = _router(name, instance, topology, options, router)
        else:
            plan["instances"][name] = _worker(name, instance, topology, options, engine, model_path)
            plan["stock_kernels"] += stock_kernels(name, instance, options)
    names = {instance["mode"]: name for name, instance in instances.items()}
    trio = [names["prefill"], names["decode"], names["router"]]
    plan["modes"] = {
        "pd": {"active": trio, "inactive": [names["single"]]},
        "single": {"active": [names["single"]], "inactive": trio},
    }
    public = plan["instances"][names["router"]]
    plan["endpoint"] = {"url": public["url"], "port": public["port"], "host": public["host"]}
    start, restart, burst, wait, stop = (_integer(options[key]) for key in (
        "start_timeout", "restart_sec", "start_burst", "gpu_wait", "stop_timeout"))
    plan["timing"] = {
        "start_timeout": start, "restart_sec": restart, "start_burst": burst, "gpu_wait": wait, "stop_timeout": stop,
        "start_limit_interval": start_limit_interval(start, restart, burst, wait, stop),
        "shutdown_grace": _integer(options["shutdown_grace"]),
    }
    return plan
