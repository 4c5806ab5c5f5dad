# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The topology's way to command lines, ports and findings."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.blackwell.dsv4.plugins.filter import serving_plan as filter_plugin
from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_plan as sp

ROOT = Path(__file__).resolve().parents[4]
INVENTORIES = ("blackwell8", "rehearsal")


def topology(inventory="blackwell8"):
    text = (ROOT / "inventory" / inventory / "group_vars/all/topology.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["dsv4_topology"]


def gpus(nodes=(0, 0, 0, 0, 1, 1, 1, 1)):
    return [{"index": index, "uuid": "GPU-00000000-0000-4000-8000-%012d" % index, "numa_node": node,
             "compute_capability": "12.0"} for index, node in enumerate(nodes)]


def plan(changes=None, **options):
    """The plan of blackwell8 with some keys replaced: {"instances.decode.gpus": [3]}; None deletes."""
    wanted = topology()
    for path, value in (changes or {}).items():
        keys = path.split(".")
        place = wanted
        for key in keys[:-1]:
            place = place[key]
        if value is None:
            place.pop(keys[-1], None)
        else:
            place[keys[-1]] = value
    options.setdefault("gpus", gpus())
    return sp.serving_plan(wanted, engine="/e", router="/r", model_path="/m", **options)


def errors(result):
    return {(finding["id"], finding["variable"]) for finding in result["findings"]
            if finding["severity"] == "error"}


def flag(instance, name, count=1):
    argv = instance["argv"]
    index = argv.index(name)
    values = argv[index + 1:index + 1 + count]
    return values[0] if count == 1 else values


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_shipped_topologies_are_clean(inventory):
    nodes = (0,) * 8 if inventory == "rehearsal" else (0, 0, 0, 0, 1, 1, 1, 1)
    result = sp.serving_plan(topology(inventory), engine="/e", router="/r", model_path="/m", gpus=gpus(nodes))
    assert result["findings"] == []
    assert {name: entry["unit"] for name, entry in result["instances"].items()} == {
        "prefill": "sglang-dsv4-prefill", "decode": "sglang-dsv4-decode",
        "router": "sglang-dsv4-router", "single": "sglang-dsv4"}


def test_the_trio_as_the_mission_fixes_it():
    result = plan()
    prefill, decode, router, single = (result["instances"][name] for name in ("prefill", "decode", "router", "single"))
    assert (prefill["url"], decode["url"], router["url"]) == (
        "http://127.0.0.1:30000", "http://127.0.0.1:30002", "http://127.0.0.1:30001")
    assert flag(prefill, "--mem-fraction-static") == "0.8"
    assert flag(decode, "--mem-fraction-static") == "0.85"
    assert flag(single, "--mem-fraction-static") == "0.85"
    for worker in (prefill, decode, single):
        assert flag(worker, "--context-length") == "524288"
        assert flag(worker, "--reasoning-parser") == "deepseek-v4"
        assert flag(worker, "--tool-call-parser") == "deepseekv4"
        assert "--enable-metrics" in worker["argv"]
        assert worker["argv"][:3] == ["/e/bin/python", "-m", "sglang.launch_server"]
    assert "--reasoning-parser" not in router["argv"]
    assert flag(prefill, "--disaggregation-bootstrap-port") == "8998"
    assert flag(router, "--prefill", 2) == ["http://127.0.0.1:30000", "8998"]
    assert flag(router, "--decode") == "http://127.0.0.1:30002"
    assert "--disaggregation-mode" not in single["argv"]
    assert result["modes"]["pd"] == {"active": ["prefill", "decode", "router"], "inactive": ["single"]}
    assert result["modes"]["single"] == {"active": ["single"], "inactive": ["prefill", "decode", "router"]}
    assert result["endpoint"] == {"url": "http://127.0.0.1:30001", "port": 30001, "host": "0.0.0.0"}


def test_devices_are_bound_by_uuid():
    decode = plan()["instances"]["decode"]
    assert decode["environment"]["CUDA_VISIBLE_DEVICES"].split(",") == [gpu["uuid"] for gpu in gpus()[4:]]
    assert decode["gpu_uuids"] == [gpu["uuid"] for gpu in gpus()[4:]]
    assert "--disable-custom-all-reduce" in decode["argv"]
    assert flag(decode, "--numa-node", 4) == ["1", "1", "1", "1"]


def test_without_facts_devices_are_bound_by_index_and_it_says_so():
    result = plan(gpus=[])
    assert result["instances"]["decode"]["environment"]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert [finding["id"] for finding in result["findings"]] == ["gpus.unread"]


def test_nixl_sees_the_peers_gpus():
    result = plan({"transfer_backend": "nixl"})
    prefill, decode = result["instances"]["prefill"], result["instances"]["decode"]
    everything = ",".join(gpu["uuid"] for gpu in gpus())
    assert prefill["environment"]["CUDA_VISIBLE_DEVICES"] == everything
    assert decode["environment"]["CUDA_VISIBLE_DEVICES"] == everything
    assert flag(decode, "--base-gpu-id") == "4"
    assert "--base-gpu-id" not in prefill["argv"]
    assert flag(decode, "--numa-node", 8) == ["0"] * 4 + ["1"] * 4
    assert not [item for item in result["listeners"] if item["what"] == "kv transfer"]


def test_the_transfer_ports_are_planned_and_apart():
    result = plan()
    ranges = [(item["port"], item["port_end"]) for item in result["listeners"] if item["what"] == "kv transfer"]
    assert ranges == [(15000, 15999), (16000, 16999)]
    assert result["instances"]["prefill"]["environment"]["MC_MAX_RPC_PORT"] == "15999"
    wildcards = {item["what"] for item in result["listeners"] if item["address"] in ("*", "0.0.0.0")}
    assert wildcards == {"kv transfer", "nccl rendezvous", "http"}


@pytest.mark.parametrize("speculation,algorithm", [("none", None), ("mtp", "EAGLE"), ("dspark", "DSPARK")])
def test_speculation_is_alike_on_both_halves(speculation, algorithm):
    result = plan({"speculation": speculation})
    halves = [[word for pair in sp.flag_pairs(result["instances"][name]["argv"])
               if pair[0].startswith("--speculative") for word in [pair[0]] + pair[1]]
              for name in ("prefill", "decode")]
    assert halves[0] == halves[1]
    assert (flag(result["instances"]["decode"], "--speculative-algorithm") if algorithm else None) == algorithm


def test_kernels_only_where_they_are_built_and_listed():
    with_path = plan(kernel_path="/k")["instances"]
    assert with_path["decode"]["environment"]["DSV4_SM120_KERNELS"] == "topk,indexer,indexer_topk,sparse_mla"
    assert with_path["decode"]["environment"]["PYTHONPATH"] == "/k"
    assert with_path["decode"]["environment"]["SGLANG_PLUGINS"] == "dsv4_sm120"
    assert "SGLANG_PLUGINS" not in with_path["prefill"]["environment"]
    record = {"applied": ["indexer"], "build": "3f2a", "stock": {"topk": "slower", "sparse_mla": "its self-test failed"}}
    whole = plan(kernel_path="/k", kernel_record=record, kernel_selection="/r/selection.json")
    measured = whole["instances"]["decode"]
    assert measured["environment"]["DSV4_SM120_KERNELS"] == "indexer" and measured["kernels"] == ["indexer"]
    assert measured["environment"]["DSV4_SM120_SELECTION"] == "/r/selection.json" and measured["kernel_build"] == "3f2a"
    assert [(one["kernels"], one["line"]) for one in whole["stock_kernels"]] == [
        (["topk"], "decode: the engine's own topk: slower"),
        (["indexer_topk"], "decode: the engine's own indexer_topk: no kernels of ours are installed"),
        (["sparse_mla"], "decode: the engine's own sparse_mla: its self-test failed")]
    nothing = plan(kernel_path="/k", kernel_record={"applied": []})["instances"]["decode"]
    assert "PYTHONPATH" not in nothing["environment"] and nothing["kernels"] == []
    assert plan()["stock_kernels"][0]["kernels"] == ["topk", "indexer", "indexer_topk", "sparse_mla"] and plan(kernel_path="/k")["stock_kernels"] == []
    for stock in (plan(), plan({"instances.decode.kernels": []}, kernel_path="/k")):
        assert not {"PYTHONPATH", "SGLANG_PLUGINS", "DSV4_SM120_KERNELS"} & set(
            stock["instances"]["decode"]["environment"])


@pytest.mark.parametrize("version,needed", [
    ("0.5.23", False), ("0.5.23+rehearsal", False), ("0.5.22", True), ("0.5.30", False)])
def test_chat_template_by_engine_version(version, needed):
    result = plan(engine_version=version, chat_template="/t.jinja")
    assert ("--chat-template" in result["instances"]["decode"]["argv"]) is needed


def test_named_switches():
    result = plan(pcie_ipc_allreduce=True, direct_swa_kv=True, deepgemm_hc_prenorm=True)
    environments = {name: entry["environment"] for name, entry in result["instances"].items()}
    for name in ("prefill", "decode", "single"):
        assert environments[name]["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] == "1"
        assert environments[name]["SGLANG_OPT_SM120_DIRECT_SWA_KV"] == "1"
    assert environments["prefill"]["SGLANG_OPT_DEEPGEMM_HC_PRENORM"] == "1"
    assert "SGLANG_OPT_DEEPGEMM_HC_PRENORM" not in environments["decode"]


@pytest.mark.parametrize("changes,options,expected", [
    ({"instances.decode.gpus": [3, 4, 5, 6]}, {}, ("gpus.shared", "dsv4_topology.instances.decode.gpus")),
    ({"instances.decode.gpus": [4, 4, 5, 6]}, {}, ("gpus.twice", "dsv4_topology.instances.decode.gpus")),
    ({"instances.decode.gpus": [5, 6, 7, 8]}, {}, ("gpus.range", "dsv4_topology.instances.decode.gpus")),
    ({"instances.decode.tp_size": 8}, {}, ("gpus.tp", "dsv4_topology.instances.decode.tp_size")),
    ({"instances.decode.port": 30000}, {}, ("ports.twice", "dsv4_topology.instances.decode.port")),
    ({"instances.decode.port": 8998}, {}, ("ports.twice", "dsv4_topology.instances.decode.port")),
    ({"instances.router.metrics_port": 30001}, {}, ("ports.twice", "dsv4_topology.instances.router.metrics_port")),
    ({"instances.decode.nccl_port": 15500}, {}, ("ports.twice", "dsv4_topology.instances.decode.nccl_port")),
    ({"instances.decode.nccl_port": 35061}, {}, ("ports.ephemeral", "dsv4_topology.instances.decode.nccl_port")),
    ({"instances.prefill.bootstrap_port": None}, {},
     ("ports.explicit", "dsv4_topology.instances.prefill.bootstrap_port")),
    ({"instances.decode.numa_nodes": [1, 1, 1]}, {}, ("numa.length", "dsv4_topology.instances.decode.numa_nodes")),
    ({"instances.decode.numa_nodes": [1, 1, 1, 0]}, {},
     ("numa.conflict", "dsv4_topology.instances.decode.numa_nodes")),
    ({"instances.decode.numa_node": 0}, {}, ("numa.mismatch", "dsv4_topology.instances.decode.numa_node")),
    ({"instances.decode.kernels": ["sparse_mle"]}, {}, ("kernels.unknown", "dsv4_topology.instances.decode.kernels")),
    ({"reasoning_parser": "deepseek-r1"}, {}, ("parser.unknown", "dsv4_topology.reasoning_parser")),
    ({"tool_call_parser": "deepseekv32"}, {}, ("parser.unknown", "dsv4_topology.tool_call_parser")),
    ({"context_length": "1M"}, {}, ("context.length", "dsv4_topology.context_length")),
    ({"context_length": 2097152}, {"model_facts": {"max_position_embeddings": 1048576}},
     ("context.length", "dsv4_topology.context_length")),
    ({"speculation": "mtp"}, {"model_facts": {"speculation": ["dspark"]}},
     ("speculation.checkpoint", "dsv4_topology.speculation")),
    ({"speculation": "NEXTN"}, {}, ("speculation.name", "dsv4_topology.speculation")),
    ({"transfer_backend": "fake"}, {}, ("transfer.backend", "dsv4_topology.transfer_backend")),
    ({"instances.decode.extra_args": ["--speculative-draft-model-path", "/d"]}, {},
     ("halves.speculation", "dsv4_topology.instances.decode.extra_args")),
    ({"instances.decode.extra_args": ["--api-key", "x"]}, {},
     ("extra.secret", "dsv4_topology.instances.decode.extra_args")),
    ({"instances.decode.environment": {"SGLANG_OPT_SM120_DIRECT_SWA_KV": "1"}}, {},
     ("halves.differ", "dsv4_topology.instances.decode.environment")),
    ({"instances.decode.host": "0.0.0.0"}, {}, ("ports.exposed", "dsv4_topology.instances.decode.host")),
    ({"instances.decode.chunked_prefill_size": None}, {},
     ("batch.explicit", "dsv4_topology.instances.decode.chunked_prefill_size")),
    ({"instances.decode.mem_fraction_static": 85}, {},
     ("memory.fraction", "dsv4_topology.instances.decode.mem_fraction_static")),
    ({"instances.decode.mem_fraction": 0.85}, {},
     ("instance.unknown_key", "dsv4_topology.instances.decode.mem_fraction")),
    ({"instances.single": None}, {}, ("topology.modes", "dsv4_topology.instances")),
    ({}, {"gpus": gpus()[:7]}, ("gpus.missing", "dsv4_topology.gpu_count")),
    ({}, {"p2p": "off"}, ("p2p.mode", "sglang_dsv4_p2p")),
    ({}, {"router_kind": "nginx"}, ("router.kind", "sglang_dsv4_router")),
], ids=lambda value: value[0] if isinstance(value, tuple) else None)
def test_bad_topology_is_named(changes, options, expected):
    result = plan(changes, **options)
    assert expected in errors(result)
    assert result["instances"] == {}
    for finding in result["findings"]:
        assert finding["what"] and finding["hint"] and finding["severity"] in ("error", "warning")


def test_all_findings_at_once():
    result = plan({"context_length": "1M", "instances.decode.port": 30000, "tool_call_parser": "x",
                   "instances.prefill.kernels": ["y"]})
    assert len(errors(result)) == 4
    hint = [finding["hint"] for finding in result["findings"] if finding["id"] == "context.length"][0]
    assert "1000000" in hint and "1048576" in hint


def test_a_parser_left_out_is_a_warning_and_no_flag():
    result = plan({"tool_call_parser": None})
    assert not errors(result)
    assert [finding["id"] for finding in result["findings"]] == ["parser.missing"]
    assert "--tool-call-parser" not in result["instances"]["decode"]["argv"]


def test_the_fallback_may_share_port_and_gpus_with_the_trio():
    result = plan()
    assert result["instances"]["single"]["port"] == result["instances"]["router"]["port"]
    assert not result["findings"]


def test_the_plan_does_not_keep_pieces_of_its_input():
    wanted = topology()
    before = copy.deepcopy(wanted)
    result = sp.serving_plan(wanted, gpus=gpus())
    result["instances"]["decode"]["gpus"].append(99)
    result["instances"]["decode"]["environment"]["X"] = "1"
    assert wanted == before


def test_router_kinds():
    ours = plan(router_launcher="/rel/libexec/router.py")["instances"]["router"]["argv"]
    assert ours[:3] == ["/r/bin/python", "/rel/libexec/router.py", "sglang-router"]
    smg = plan(router_kind="smg")["instances"]["router"]["argv"]
    assert smg[:4] == ["/r/bin/python", "-m", "smg", "launch"]
    assert "--disable-tokenizer-autoload" in smg and "--disable-tokenizer-autoload" not in ours


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_no_two_running_units_ever_share_a_gpu(left, right):
    result = plan({"instances.prefill.gpus": left, "instances.decode.gpus": right,
                   "instances.prefill.numa_node": -1, "instances.decode.numa_node": -1})
    legal = (len(set(left)) == len(left) and len(set(right)) == len(right) and not set(left) & set(right)
             and max(left + right) < 8)
    assert bool(result["instances"]) is legal
    if legal:
        prefill, decode = result["instances"]["prefill"], result["instances"]["decode"]
        assert not set(prefill["gpu_uuids"]) & set(decode["gpu_uuids"])


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner,
                                                                                max_size=3), max_leaves=12),
       st.sampled_from(sorted(sp.INSTANCE_KEYS)), st.sampled_from(["prefill", "decode", "router", "single"]))
def test_any_rubbish_in_a_key_is_a_finding_or_fine_never_a_traceback(value, key, name):
    wanted = topology()
    wanted["instances"][name][key] = value
    result = sp.serving_plan(wanted, gpus=gpus())
    assert result["instances"] or any(finding["severity"] == "error" for finding in result["findings"])


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner,
                                                                                max_size=3), max_leaves=12),
       st.sampled_from(sorted(sp.TOPOLOGY_KEYS)))
def test_any_rubbish_at_the_top_is_a_finding_or_fine(value, key):
    wanted = topology()
    wanted[key] = value
    result = sp.serving_plan(wanted, gpus=gpus())
    assert result["instances"] or any(finding["severity"] == "error" for finding in result["findings"])


def test_check_argv_refuses_what_the_parser_refuses():
    table = {"--port": {"type": "int", "nargs": None}, "--tp-size": {"type": "int", "aliases": [
        "--tensor-parallel-size"]}, "--mode": {"type": "str", "choices": ["a", "b"]},
        "--on": {"type": "flag", "nargs": 0}, "--nodes": {"type": "int", "nargs": "+"}}
    good = ["python", "-m", "x", "--port", "1", "--tensor-parallel-size", "4", "--mode", "a", "--on", "--nodes", "1",
            "2"]
    assert sp.check_argv(good, table) == []
    for bad in (["--prot", "1"], ["--port", "x"], ["--port"], ["--mode", "c"], ["--on", "1"], ["--nodes"],
                ["--tp", "4"]):
        assert sp.check_argv(bad, table), bad


def test_filter_returns_plain_data_and_refuses_unknown_options():
    result = filter_plugin.FilterModule().filters()["serving_plan"](topology(), gpus=gpus())
    assert result["findings"].__class__ is list
    with pytest.raises(Exception, match="unknown option colour"):
        filter_plugin.serving_plan(topology(), colour="red")


def test_both_halves_carry_the_limits_of_the_pair():
    result = plan(bootstrap_timeout=90, waiting_timeout="400")
    for name in ("prefill", "decode"):
        environment = result["instances"][name]["environment"]
        assert environment["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "90"
        assert environment["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "400"
    for name in ("single", "router"):
        assert not [key for key in result["instances"][name]["environment"] if key.startswith("SGLANG_DISAGGREGATION_")]


@pytest.mark.parametrize("options, found", [
    ({}, []),
    ({"bootstrap_timeout": 119}, []),
    ({"bootstrap_timeout": 120}, [("warning", "timeouts.bootstrap", "sglang_dsv4_bootstrap_timeout")]),
    ({"bootstrap_timeout": 299, "probe_timeout": 300}, []),
    # 524288 tokens at 4000 a second are 132 s.
    ({"waiting_timeout": 132}, []),
    ({"waiting_timeout": 131}, [("warning", "timeouts.waiting", "sglang_dsv4_waiting_timeout")]),
    ({"waiting_timeout": 131, "prefill_rate": 8000}, []),
    ({"waiting_timeout": 7200}, [("error", "timeouts.request", "sglang_dsv4_waiting_timeout")]),
    ({"bootstrap_timeout": 400, "probe_timeout": 500, "request_timeout": 400},
     [("error", "timeouts.request", "sglang_dsv4_bootstrap_timeout")]),
    ({"waiting_timeout": 0}, [("error", "timeouts.number", "sglang_dsv4_waiting_timeout")]),
    ({"bootstrap_timeout": "soon"}, [("error", "timeouts.number", "sglang_dsv4_bootstrap_timeout")]),
])
def test_the_limits_of_the_pair_fit_those_around_them(options, found):
    assert [(item["severity"], item["id"], item["variable"]) for item in plan(**options)["findings"]] == found


@pytest.mark.parametrize("name, value, finding", [
    ("CUDA_VISIBLE_DEVICES", "0,1", "environment.gpus"), ("NCCL_P2P_DISABLE", "1", "environment.p2p"),
    ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "60", "environment.timeouts"),
])
def test_what_the_plan_drives_is_not_given_by_hand(name, value, finding):
    for result, variable in ((plan(environment={name: value}), "sglang_dsv4_environment"),
                             (plan({"instances.decode.environment": {name: value}}), "dsv4_topology.instances.decode.environment")):
        assert errors(result) == {(finding, variable)}


def test_ports_that_no_filter_closes_are_named():
    [finding] = plan(firewall=False)["findings"]
    assert (finding["severity"], finding["id"], finding["variable"]) == ("warning", "ports.unfiltered", "sglang_dsv4_firewall")
    assert "15000-15999" in finding["what"] and "30000" not in finding["what"]
    assert plan(firewall="yes")["findings"] == []


def test_start_limit_can_trigger():
    result = plan()
    timing = result["timing"]
    assert timing["start_limit_interval"] > timing["start_burst"] * (timing["start_timeout"] + timing["restart_sec"])
    assert timing["start_limit_interval"] > 2745


def test_workers_find_the_programs_of_their_own_environment():
    """The engine's JIT runs the word ninja; without the environment's bin in PATH the first kernel ends the server."""
    for home, start in (("", "/e/bin:/usr/local/sbin:"), ("/usr/local/cuda", "/e/bin:/usr/local/cuda/bin:/usr/local/sbin:")):
        made = plan(cuda_home=home)["instances"]
        for name in ("prefill", "decode", "single"):
            assert made[name]["environment"]["PATH"].startswith(start)


# --- the experts' MoE method: what files/moe_methods.json marks as right, and nothing else

METHODS = json.loads((ROOT / "files/moe_methods.json").read_text(encoding="utf-8"))


def moe_findings(extra=(), environment=None, speculation="mtp", experts="fp4"):
    result = plan({"speculation": speculation, **{"instances.%s.extra_args" % name: list(extra) for name in ("prefill", "decode")},
                   "instances.decode.environment": environment or {}}, moe_methods=METHODS, model_facts={"experts": experts})
    return result, [finding for finding in result["findings"] if finding["id"] == "extra.moe_runner"]


@pytest.mark.parametrize(("checkpoint", "row"), [
    pytest.param(name, row, id="%s %s" % (name, " ".join(row["settings"]) or "none"))
    for name, rows in METHODS["checkpoints"].items() for row in rows if tuple(row["settings"]) not in sp.DATACENTER_ONLY])
def test_a_setting_passes_when_the_table_marks_it(checkpoint, row):
    experts, speculation = checkpoint.split("-")
    flags = [word for word in row["settings"] if "=" not in word]
    environment = dict(word.split("=") for word in row["settings"] if "=" in word)
    result, found = moe_findings(flags, environment, speculation, experts)
    assert (not found) == row["good"], row
    if row["good"] and not environment:
        assert result["instances"]["decode"]["expect"]["moe_runner_backend"] == row["runner"]
        assert result["instances"]["decode"]["expect"]["speculative_moe_runner_backend"] == row["draft_runner"]


def test_a_refused_runner_names_the_variable_the_end_and_what_works():
    _result, found = moe_findings(["--speculative-moe-runner-backend", "auto"])
    assert {finding["variable"] for finding in found} == {"dsv4_topology.instances.%s.extra_args" % name for name in ("prefill", "decode")}
    assert "the draft's experts: first forward: AssertionError: Hidden size mismatch" in found[0]["what"]
    assert "--speculative-moe-runner-backend marlin" in found[0]["hint"]
    assert "--speculative-moe-runner-backend triton" not in found[0]["hint"]


def test_without_speculation_the_draft_s_end_does_not_matter():
    assert moe_findings(["--speculative-moe-runner-backend", "auto"], speculation="none")[1] == []
    assert moe_findings(["--moe-runner-backend", "triton"], speculation="none")[1] != []


def test_target_and_draft_choose_apart():
    result, found = moe_findings(["--moe-runner-backend", "marlin", "--speculative-moe-runner-backend", "flashinfer_mxfp4"])
    assert not found
    expect = result["instances"]["decode"]["expect"]
    assert (expect["moe_runner_backend"], expect["speculative_moe_runner_backend"]) == ("marlin", "flashinfer_mxfp4")
    assert moe_findings(["--moe-runner-backend", "marlin", "--speculative-moe-runner-backend", "triton"])[1]


def test_what_was_never_tried_together_is_refused():
    _result, found = moe_findings(["--moe-runner-backend", "marlin"], {"SGLANG_DSV4_FP4_DEQUANT": "1"})
    assert "nobody has tried it" in found[0]["what"]
    _result, found = moe_findings([], {"SGLANG_DSV4_FP4_EXPERTS": "0"})
    assert found[0]["variable"] == "dsv4_topology.instances.decode.environment" and "load: " in found[0]["what"]


def test_of_another_engine_nothing_is_known():
    topology_of = {"instances.decode.extra_args": ["--moe-runner-backend", "marlin"]}
    assert not errors(plan(topology_of, moe_methods=METHODS, engine_version="0.5.23+rehearsal"))
    assert ("extra.moe_runner", "dsv4_topology.instances.decode.extra_args") in errors(plan(topology_of, moe_methods=METHODS, engine_version="0.5.24"))
    other = plan(moe_methods=METHODS, engine_version="0.5.24")
    assert not errors(other) and "moe_runner_backend" not in other["instances"]["decode"]["expect"]


def test_a_draft_that_nobody_watches_is_a_warning():
    found = plan({"speculation": "mtp", "instances.decode.kernels": ["topk"]}, kernel_path="/k")["findings"]
    assert ("kernels.draft", "dsv4_topology.instances.decode.kernels") in {(f["id"], f["variable"]) for f in found if f["severity"] == "warning"}
    found = plan({"speculation": "mtp", "instances.decode.kernels": ["nextn_moe"], "instances.prefill.kernels": ["nextn_moe"],
                  "instances.single.kernels": ["nextn_moe"]}, kernel_path="/k")["findings"]
    assert not [f for f in found if f["id"] == "kernels.draft"]


def test_where_the_key_lies_is_said_only_when_there_is_one():
    assert plan()["auth"] == {"api_key": False, "api_key_file": "", "workers": False}
    assert plan(api_key=True, worker_keys=False, api_key_file="/etc/own/key")["auth"] == {
        "api_key": True, "api_key_file": "/etc/own/key", "workers": False}


def test_the_plan_keeps_what_it_was_told_of_the_checkpoint():
    facts = {"speculation": "none", "experts": "fp8", "layers": 43, "max_position_embeddings": None}
    assert plan(model_facts=facts)["model"] == {"speculation": "none", "experts": "fp8"}
    methods = json.loads((ROOT / "files/moe_methods.json").read_text(encoding="utf-8"))
    runners = [plan(model_facts=known, moe_methods=methods)["instances"]["decode"]["expect"]["moe_runner_backend"] for known in (facts, {})]
    # Two plans of one topology: a run that does not read the checkpoint must not forget what it is.
    assert runners == ["auto", "flashinfer_mxfp4"]
