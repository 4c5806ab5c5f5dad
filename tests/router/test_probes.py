# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The probes against the rehearsal engine: the pair behind each real router, and servers that are wired wrongly."""

from __future__ import annotations

import time

import pytest
import rehearsal_engine as support

from ansible_collections.blackwell.dsv4.plugins.module_utils import probes, topology

CONTEXT = 65536


def suite(port, router="none", **more):
    options = {"base_url": "http://127.0.0.1:%d" % port, "model": support.NAME, "context_length": CONTEXT, "router": router, "timeout": 20,
               "long_prompt_tokens": 4096}
    options.update(more)
    made = probes.Suite(probes.Options(**options))
    return made, dict((c["id"], c) for c in made.run())


def failed(checks):
    return dict((name, c["reason"]) for name, c in checks.items() if c["status"] not in ("pass", "skipped"))


def test_probes_through_the_router(setup, name, seen):
    router, prefill, decode = setup
    before = [engine.metric("num_requests_total") for engine in (prefill, decode)]
    began = time.monotonic()
    made, checks = suite(router.port, name.replace("_", "-"), readiness_path="/readiness", role_ports={"prefill": prefill.port, "decode": decode.port},
                         workers=[{"name": e.mode, "url": "http://127.0.0.1:%d" % e.port} for e in (prefill, decode)])
    took = time.monotonic() - began
    # smg asks for thinking on its own: the probe of the default must say so, and nothing else may be wrong.
    expected = {} if name == "sglang_router" else {"thinking_default.whole": "reasoning_when_disabled", "thinking_default.stream": "reasoning_when_disabled"}
    assert failed(checks) == expected, [checks[c] for c in failed(checks)]
    assert took < 20
    assert made.summary()["overhead_most"] < 0.05
    for engine, old in zip((prefill, decode), before):
        assert engine.metric("num_requests_total") - old >= made.requests
    seen("%d checks in %.1f s%s" % (len(checks), took, ", thinking on by default" if expected else ""))


def test_topology_without_systemd(setup, name, seen):
    """The parts that need no systemd, by direct call, as on a machine with GPUs and no units."""
    router, prefill, decode = setup
    engines = {"prefill": prefill, "decode": decode}
    plan = {
        "instances": {mode: {"unit": mode, "mode": mode, "url": "http://127.0.0.1:%d" % engine.port, "tp_size": 4, "gpus": [], "numa_node": -1,
                             "kernels": [], "listeners": [],
                             "expect": {"context_length": CONTEXT, "reasoning_parser": "deepseek-v4", "disaggregation_mode": mode}}
                      for mode, engine in engines.items()},
        "modes": {"pd": {"active": ["prefill", "decode", "router"], "inactive": []}},
        "endpoint": {"url": "http://127.0.0.1:%d" % router.port},
    }
    plan["instances"]["router"] = {"unit": "router", "mode": "router", "url": plan["endpoint"]["url"], "listeners": []}

    class Host(topology.Host):
        def units(self, names):
            return None

        def start_log(self, unit, properties):
            return []

        def pids(self, unit, properties):
            return list(engines[unit].children().values()) + [engines[unit].pid] if unit in engines else []

    watch = topology.Topology(plan, "pd", Host(), settle_seconds=0, min_kv_tokens=1000)
    before = watch.snapshot()
    made, dummy = suite(router.port, name.replace("_", "-"), probes=["arithmetic", "thinking", "tools"])
    checks = dict((c["id"], c) for c in watch.check(before, made.requests))
    for identity in ("mode", "router.workers", "counters.prefill", "counters.decode", "server.prefill", "server.decode", "kv.decode", "process.decode",
                     "health.prefill"):
        assert checks[identity]["status"] == "pass", checks[identity]
    seen(checks["router.workers"]["evidence"].replace("http://127.0.0.1", ""))


#: Faults of the engine that make an answer wrong in one way, the probe that must see it, and what it must say.
FAULTS = {
    "abort": ({"abort": True}, "arithmetic", {"aborted"}),
    "garbage": ({"garbage": True}, "arithmetic", {"garbage_output"}),
    "empty": ({"empty": True}, "arithmetic", {"empty_content"}),
    "wrong number": ({"wrong_number": True}, "arithmetic", {"wrong_answer"}),
    "parser unaware": ({"parser_unaware": True}, "thinking", {"no_reasoning", "think_tag_in_content"}),
    "never closed": ({"never_close": True}, "thinking", {"answer_only_in_reasoning"}),
    "field name": ({"reasoning_field": True}, "thinking", {"reasoning_field_name"}),
    "answer in reasoning": ({"content_in_reasoning": True}, "arithmetic", {"content_null_reasoning_filled"}),
    "one call": ({"one_call": True}, "tools", {"too_few_tool_calls"}),
    "same call": ({"same_call": True}, "tools", {"wrong_tool_arguments"}),
    "extra call": ({"extra_call": True}, "tools", {"too_many_tool_calls"}),
    "no call": ({"no_call": True}, "tools", {"no_tool_calls"}),
    "prose": ({"call_as_text": True}, "tools", {"tool_call_as_text"}),
    "ASCII markup": ({"ascii_markup": True}, "tools", {"tool_markup_in_content"}),
    "cut markup": ({"cut_markup": True}, "tools", {"tool_markup_in_content"}),
    "wrapped": ({"wrap_arguments": True}, "tools_again", {"arguments_wrapped"}),
    "merged": ({"merged_calls": True}, "tools", {"tool_calls_merged"}),
    "same ids": ({"duplicate_ids": True}, "tools", {"duplicate_tool_call_id"}),
    "finish stop": ({"finish_stop": True}, "tools", {"finish_reason_wrong"}),
}
HARMLESS = {"bold": ({"bold": True}, "arithmetic"), "both fields": ({"reasoning_field": "both"}, "thinking"), "null content": ({"null_content": True}, "tools"),
            "repeated id": ({"repeat_id": True}, "tools")}


@pytest.fixture(scope="module")
def single(model, tmp_path_factory):
    engine = support.EngineProcess(tmp_path_factory.mktemp("single"), model)
    yield engine
    engine.stop()


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_of_the_engine_are_named(single, fault):
    values, probe, reasons = FAULTS[fault]
    single.fault(**values)
    try:
        dummy, checks = suite(single.port, probes=[probe], repeat=1, max_tokens=256)
    finally:
        single.fault()
    found = failed(checks)
    assert set(found) == {probe + ".whole", probe + ".stream"} and set(found.values()) <= reasons, found


@pytest.mark.parametrize("fault", list(HARMLESS))
def test_variations_pass(single, fault):
    values, probe = HARMLESS[fault]
    single.fault(**values)
    try:
        dummy, checks = suite(single.port, probes=[probe], repeat=1)
    finally:
        single.fault()
    assert failed(checks) == {}


@pytest.mark.parametrize(("flags", "expected", "flag"), [
    pytest.param(["--tool-call-parser", "deepseekv4"], {"thinking": "no_reasoning"}, "--reasoning-parser deepseek-v4", id="no reasoning parser"),
    pytest.param(["--reasoning-parser", "deepseek-v4"], {"tools": "tool_markup_in_content"}, "--tool-call-parser deepseekv4", id="no tool-call parser"),
    pytest.param([], {"thinking": "think_tag_in_content", "tools": "tool_markup_in_content"}, "--reasoning-parser deepseek-v4", id="no parser at all"),
    pytest.param(["--tool-call-parser", "deepseekv32"], {"tools": "tool_markup_in_content"}, "--tool-call-parser deepseekv4", id="another generation"),
])
def test_parsers_that_are_not_wired(model, tmp_path, flags, expected, flag):
    engine = support.EngineProcess(tmp_path, model, "null", *flags, parsers=False)
    try:
        dummy, checks = suite(engine.port, probes=["arithmetic", "thinking", "tools"], repeat=1)
    finally:
        engine.stop()
    for probe, reason in expected.items():
        for way in (".whole", ".stream"):
            assert checks[probe + way]["reason"] == reason, checks[probe + way]
    assert any(flag in checks[probe + ".whole"]["hint"] for probe in expected), checks
    assert checks["arithmetic.whole"]["status"] == "pass"


def test_keys(model, name, tmp_path, seen):
    """The same key on router and workers: 401 without it, everything right with it, and it is in no result."""
    key = "dsv4-Zq81-planted-key"
    engines = [support.EngineProcess(tmp_path, model, mode, "--api-key", key, wait=False) for mode in ("prefill", "decode")]
    processes = list(engines)
    try:
        for engine in engines:
            engine.wait_ready()
        router = support.RouterProcess(tmp_path, name, *engines, "--api-key", key)
        processes.append(router)
        router.wait_ready()
        workers = [{"name": e.mode, "url": "http://127.0.0.1:%d" % e.port} for e in engines]
        dummy, checks = suite(router.port, name.replace("_", "-"), api_key=key, probes=["models", "auth", "arithmetic", "cancel", "healthy"],
                              repeat=1, workers=workers, readiness_path="/readiness")
        assert failed(checks) == {} and checks["auth"]["status"] == "pass", checks
        assert key not in repr(checks)
        dummy, without = suite(router.port, name.replace("_", "-"), probes=["arithmetic"], repeat=1)
        assert set(failed(without).values()) == {"key_missing"}
        dummy, other = suite(router.port, name.replace("_", "-"), api_key="dsv4-another-key-1", probes=["arithmetic"], repeat=1)
        assert set(failed(other).values()) == {"unauthorized"}
        seen(checks["auth"]["evidence"])
    finally:
        for process in reversed(processes):
            process.stop()
