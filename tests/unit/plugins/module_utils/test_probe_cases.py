# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Failures that people reported of this model and engine, each a test by its id.

A case is a list of tries: what the endpoint sends, to which probe, and the verdict that it must get.
``python test_probe_cases.py`` prints the table of expected and given verdicts.
"""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from endpoint import Endpoint, Reply, sse  # noqa: E402

from ansible_collections.blackwell.dsv4.plugins.module_utils import probes, topology  # noqa: E402

BAR = "\uff5c"
PARIS = '{"city":"Paris"}'
TOKYO = '{"city":"Tokyo"}'


def body(content=None, thought=None, calls=None, finish="stop", usage=None, **extra):
    message = dict({"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": calls}, **extra)
    return {"id": "x", "object": "chat.completion", "model": "dsv4", "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": usage or {"prompt_tokens": 18, "completion_tokens": 14, "total_tokens": 32}}


def a_call(number, arguments, name="get_weather", **extra):
    return dict({"index": 0, "id": "call-%d" % number, "type": "function", "function": {"name": name, "arguments": arguments}}, **extra)


def chunk(delta, finish=None):
    return {"id": "s", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def ask(what, probe, stream=False, **options):
    """The one check of ``probe`` against an endpoint that always sends ``what`` (a body, bytes of a stream, or a hook)."""
    def hook(request):
        if request["number"] is None:
            return None
        if isinstance(what, Reply):
            return what
        if isinstance(what, bytes):
            return Reply(body=what, kind="text/event-stream", chunked=True)
        return Reply(body=what)

    options.setdefault("repeat", 1)
    with Endpoint(what if callable(what) else hook) as endpoint:
        suite = probes.Suite(probes.Options(
            base_url=options.pop("base_url", None) or endpoint.url, model="deepseek-v4-flash", probes=[probe],
            streams="stream" if stream else "whole", timeout=options.pop("timeout", 10), **options))
        checks = suite.run()
        return checks[-1], endpoint


def given(what, probe, stream=False, **options):
    check, dummy = ask(what, probe, stream, **options)
    return "%s %s" % (check["status"], check["reason"]), check


# Each try: (what the server sends, probe, streamed, expected verdict[, words that evidence or hint must hold]).
ANSWERS = {
    "FAB-04-probes": [
        (body("!!!!!!!!!!!!!!!!", finish="length", usage={"prompt_tokens": 18, "completion_tokens": 256, "total_tokens": 274}),
         "arithmetic", False, "fail garbage_output", ["peer-to-peer", "IOMMU", "kernels"]),
        (body("\u7684" * 200, finish="length"), "arithmetic", False, "fail garbage_output"),
        (body("Paris Paris " * 40, finish="length"), "arithmetic", False, "fail garbage_output"),
    ],
    "PD-06": [
        (body("", finish="abort"), "arithmetic", False, "fail aborted", ["KV transfer"]),
        (body("391", finish="abort"), "arithmetic", False, "fail aborted"),
        (sse([chunk({"role": "assistant", "content": "391"}), chunk({}, "abort")]), "arithmetic", True, "fail aborted"),
    ],
    "API-01": [
        (body("", "17*23 is 391.<%send\u2581of\u2581sentence%s>" % (BAR, BAR)), "thinking", False, "fail answer_only_in_reasoning", ["special_token_leak"]),
    ],
    "API-02": [
        (body(None, "391"), "arithmetic", False, "fail content_null_reasoning_filled", ["reasoning parser does not match the model"]),
    ],
    "API-03": [
        (body("We need 17*23. 17*20=340, 17*3=51, sum 391.\n</think>\n391"), "thinking", False, "fail think_tag_in_content", ["--reasoning-parser"]),
        (body("<think>391"), "thinking", False, "fail think_tag_in_content"),
        (body("<think>340+51</think>391"), "arithmetic", False, "fail think_tag_in_content"),
        (sse([chunk({"role": "assistant", "content": "sum 391</th"}), chunk({"content": "ink>391"}), chunk({}, "stop")]),
         "thinking", True, "fail think_tag_in_content"),
    ],
    "API-05": [
        (body("17 * 23 = 391", reasoning="340 + 51 = 391", calls=[]), "thinking", False, "fail reasoning_field_name",
         ["found `reasoning`", "`reasoning_content`"]),
        (body("391", "340 + 51 = 391", reasoning="340 + 51 = 391"), "thinking", False, "pass ok"),
    ],
    "API-06": [
        (body(None, "Let me compute 17*23 in several ways. First", finish="length",
              usage={"prompt_tokens": 18, "completion_tokens": 256, "total_tokens": 274, "completion_tokens_details": {"reasoning_tokens": 256}}),
         "thinking", False, "inconclusive truncated", ["2048", "8192"]),
    ],
    "API-07": [
        (body('<{0}DSML{0}tool_calls>\n<{0}DSML{0}invoke name="get_weather">\n<{0}DSML{0}parameter name="city" string="true">Paris</{0}DSML{0}parameter>\n'
              '</{0}DSML{0}invoke>\n</{0}DSML{0}tool_calls>'.format(BAR)), "tools", False, "fail tool_markup_in_content",
         ["V4", "tool-call parser does not match the template"]),
        (body('<{0}DSML{0}function_calls><{0}DSML{0}invoke name="get_weather"></{0}DSML{0}invoke></{0}DSML{0}function_calls>'.format(BAR)),
         "tools", False, "fail tool_markup_in_content", ["V3.2"]),
        (body('<{0}tool\u2581calls\u2581begin{0}><{0}tool\u2581call\u2581begin{0}>get_weather'.format(BAR)),
         "tools", False, "fail tool_markup_in_content", ["V3.1"]),
    ],
    "API-08": [
        (body('get_weather({"city": "Paris"})\nget_weather({"city": "Tokyo"})'), "tools", False, "fail tool_call_as_text", ["not the parser"]),
    ],
    "API-10": [
        (body('<|DSML|invoke name="get_weather"></|DSML|invoke>'), "tools", False, "fail tool_markup_in_content"),
        (body('< | DSML | tool_calls>'), "tools", False, "fail tool_markup_in_content"),
        (body('<%sDSML%sinv' % (BAR, BAR)), "tools", False, "fail tool_markup_in_content"),
    ],
    "API-11": [
        (sse([chunk({"role": "assistant", "tool_calls": [a_call(1, PARIS)]}), chunk({"tool_calls": [a_call(2, TOKYO)]}), chunk({}, "tool_calls")]),
         "tools", True, "fail parallel_calls_same_index"),
    ],
    "API-12": [
        (body(None, calls=[a_call(1, PARIS + TOKYO)], finish="tool_calls"), "tools", False, "fail tool_calls_merged"),
    ],
    "API-13": [
        (body(None, calls=[a_call(2, '{"arguments": {"city": "Rome"}}')], finish="tool_calls"), "tools_again", False, "fail arguments_wrapped"),
    ],
    "API-15": [
        (body(None, calls=[a_call(1, {"city": "Paris"}), a_call(2, {"city": "Tokyo"})], finish="tool_calls"), "tools", False, "fail arguments_not_string"),
    ],
    "API-17": [
        (body(None, calls=[a_call(1, PARIS), a_call(2, TOKYO)], finish="stop"), "tools", False, "fail finish_reason_wrong", ["got stop, want tool_calls"]),
        (sse([chunk({"role": "assistant", "tool_calls": [a_call(1, PARIS)]}), chunk({"tool_calls": [a_call(2, '{"city":', index=1)]}),
              chunk({"tool_calls": [{"index": 1, "function": {"arguments": '"Tokyo"}'}}]}, "stop")]),
         "tools", True, "fail finish_reason_wrong"),
    ],
    "API-19": [
        ({"id": "x", "object": "chat.completion", "model": "dsv4", "choices": [{"index": 0, "message": {
            "role": "assistant", "content": None}, "finish_reason": "stop"}]}, "tools", False, "fail no_tool_calls", ["empty turn"]),
        (body("I would look outside."), "tools", False, "fail no_tool_calls", ["prose"]),
    ],
    "API-23": [
        (body(text, refusal=None, calls=[]), "arithmetic", False, "pass ok")
        for text in ("17 \u00d7 23 = **391**.", "391", "\n\n391", "$17 \\times 23 = 391$", "\\boxed{391}", "\u4e09\u767e\u4e5d\u5341\u4e00 (391)")
    ] + [
        (body(text, calls=[a_call(1, PARIS), a_call(2, TOKYO)], finish="tool_calls"), "tools", False, "pass ok")
        for text in ("", None, "I will look that up.")
    ],
    "API-24": [
        (sse([
            chunk({"role": "assistant", "content": None, "tool_calls": [a_call(1, '{"ci')]}),
            chunk({"tool_calls": [{"index": 0, "id": "call-1", "function": {"arguments": 'ty":"Paris"}'}}]}),
            chunk({"tool_calls": [a_call(2, TOKYO, index=1)]}),
            chunk({}, "tool_calls"),
            {"id": "s", "object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 40, "total_tokens": 130}},
        ]), "tools", True, "pass ok"),
    ],
    "API-26": [
        (body(None, calls=[a_call(1, PARIS)], finish="tool_calls"), "tools", False, "fail too_few_tool_calls", ["expected 2, got 1 (missing city Tokyo)"]),
        (body(None, calls=[a_call(1, PARIS), a_call(2, PARIS)], finish="tool_calls"), "tools", False, "fail wrong_tool_arguments", ["missing city Tokyo"]),
        (body(None, calls=[a_call(1, PARIS), a_call(2, TOKYO), a_call(3, PARIS)], finish="tool_calls"), "tools", False, "fail too_many_tool_calls"),
        (body(None, calls=[a_call(1, TOKYO), a_call(2, PARIS)], finish="tool_calls"), "tools", False, "pass ok"),
        (body(None, calls=[a_call(1, PARIS), a_call(1, TOKYO)], finish="tool_calls"), "tools", False, "fail duplicate_tool_call_id"),
    ],
    "API-29": [
        (Reply(400, {"error": {"message": "Thinking mode does not support this tool_choice", "type": "invalid_request_error", "param": None,
                               "code": "invalid_request_error"}}), "tools", False, "inconclusive request_rejected",
         ["Thinking mode does not support this tool_choice"]),
    ],
    "API-31": [
        (body("391", None), "thinking", False, "fail no_reasoning", ["deepseek-v4", "deepseekv4"]),
        (body("391", "17*23 is simple"), "arithmetic", False, "fail reasoning_when_disabled"),
    ],
}


@pytest.mark.parametrize("tries", [pytest.param(tries, id=case) for case, tries in ANSWERS.items()])
def test_answers(tries):
    for what, probe, stream, expected, *words in tries:
        got, check = given(what, probe, stream)
        assert got == expected, check
        text = " ".join([check["evidence"], check["hint"]] + check["also"])
        for word in words[0] if words else ():
            assert word in text, check


def test_the_tool_probes_ask_with_auto_and_arguments_as_strings():
    """API-29's cause and API-13's condition: what the requests hold."""
    for probe in ("tools", "tools_answer", "tools_again", "tools_nested"):
        check, endpoint = ask(lambda request: None, probe)
        assert check["status"] == "pass", check
        payload = [r["payload"] for r in endpoint.requests if r["number"] is not None][0]
        assert payload["tool_choice"] == "auto"
        assert payload["chat_template_kwargs"] == {"thinking": False}
        for message in payload["messages"]:
            for one in message.get("tool_calls") or []:
                assert isinstance(one["function"]["arguments"], str)
    assert any(m["role"] == "tool" for m in payload["messages"]) is False


# ------------------------------------------------------------------- cases that are more than one answer


def case_pd_03():
    """Router healthy, decode up, prefill still loading: not one question is asked."""
    with Endpoint() as router, Endpoint() as decode:
        suite = probes.Suite(probes.Options(
            base_url=router.url, model="deepseek-v4-flash", timeout=5,
            workers=[{"name": "prefill", "url": "http://127.0.0.1:9"}, {"name": "decode", "url": decode.url}]))
        checks = suite.run()
        assert router.chats == 0 and decode.chats == 0
        assert checks[0]["evidence"] == "prefill not ready (connection refused)"
        assert set(c["status"] for c in checks[1:]) == {"skipped"}
        assert suite.summary()["status"] == "inconclusive"
        return "%s %s" % (checks[0]["status"], checks[0]["reason"])


def case_pd_05():
    """A socket that accepts and never says a word."""
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(8)
    begun = time.monotonic()
    suite = probes.Suite(probes.Options(base_url="http://127.0.0.1:%d" % silent.getsockname()[1], model="deepseek-v4-flash",
                                        probes=["arithmetic"], streams="whole", timeout=0.6))
    check = suite.run()[-1]
    silent.close()
    assert time.monotonic() - begun < 3
    return "%s %s" % (check["status"], check["reason"])


def case_pd_08():
    """Headers would come after ten minutes: the probe's own limit ends it, and the decode journal is quoted."""
    line = "Decode transfer failed for request rank=0 bootstrap_room=7 timed out after 600.0s in KVPoll.WaitingForInput"
    with Endpoint(lambda r: Reply(500, {"error": "late"}, hang=600) if r["number"] is not None else None) as endpoint:
        suite = probes.Suite(
            probes.Options(base_url=endpoint.url, model="deepseek-v4-flash", probes=["arithmetic", "thinking", "tools"], timeout=0.5,
                           journal_units=["sglang-dsv4-prefill", "sglang-dsv4-decode"]),
            journal=lambda unit: ["ready", line] if unit == "sglang-dsv4-decode" else ["fine"])
        begun = time.monotonic()
        checks = suite.run()
        assert time.monotonic() - begun < 5
        assert "KVPoll.WaitingForInput" in checks[1]["evidence"] and "sglang-dsv4-decode" in checks[1]["evidence"]
        assert "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in checks[1]["hint"]
        assert checks[1]["attempts"] == 1, "a request that hangs is not tried three times"
        assert [c["reason"] for c in checks[3:]] == ["endpoint_hangs"] * 4
        return "%s %s" % (checks[1]["status"], checks[1]["reason"])


def case_pd_12():
    """First request after hours fails, the next ones are right."""
    def hook(request):
        if request["number"] == 0:
            return Reply(500, {"error": {"message": "Stream error from decode server", "type": "internal_error"}})
        return None

    with Endpoint(hook) as endpoint:
        suite = probes.Suite(probes.Options(base_url=endpoint.url, model="deepseek-v4-flash", probes=["arithmetic"], streams="whole", repeat=3))
        check = suite.run()[-1]
    assert check["evidence"].startswith("1 of 3 failed") and "Stream error from decode server" in check["evidence"]
    assert (check["attempts"], check["passed"]) == (3, 2)
    assert suite.summary()["status"] == "flaky"
    return "%s %s" % (check["status"], check["reason"])


def case_pd_14():
    """Aimed at the prefill port: nothing is sent there."""
    with Endpoint() as half:
        suite = probes.Suite(probes.Options(base_url=half.url, model="deepseek-v4-flash", role_ports={"prefill": half.port, "decode": 30002}))
        checks = suite.run()
        assert half.requests == []
    assert "prefill role" in checks[0]["evidence"] and "router" in checks[0]["hint"]
    assert suite.summary()["status"] == "inconclusive"
    return "%s %s" % (checks[0]["status"], checks[0]["reason"])


def case_krn_08():
    """Right up to seven requests at once; at eight all connections close and nothing listens any more."""
    state = {"inside": 0, "down": False}
    lock = threading.Lock()
    together = threading.Event()
    endpoint = Endpoint()

    def hook(request):
        if request["number"] is None:
            return None
        with lock:
            state["inside"] += 1
            if state["inside"] >= 8:
                state["down"] = True
                endpoint.server.socket.close()
                together.set()
        together.wait(0.15)
        with lock:
            state["inside"] -= 1
        return Reply(None) if state["down"] else None

    endpoint.hook = hook
    with endpoint:
        options = probes.Options(base_url=endpoint.url, model="deepseek-v4-flash", streams="whole", repeat=1, timeout=5)
        options.probes = ["arithmetic", "thinking", "tools"]
        assert all(c["status"] == "pass" for c in probes.Suite(options).run()), "three probes one after the other see nothing"
        options.probes = ["concurrent", "cancel", "healthy"]
        checks = probes.Suite(options).run()
        endpoint.close = endpoint.server.shutdown
    assert [c["reason"] for c in checks[2:]] == ["endpoint_down"] * 2
    assert "illegal memory access" in checks[1]["hint"]
    return "%s %s" % (checks[1]["status"], checks[1]["reason"])


def case_api_21():
    """The worker separates, the router path does not."""
    with Endpoint() as worker:
        got, check = given(body("391", None), "thinking", direct_url=worker.url)
        assert "the worker separates reasoning, the router path does not: field dropped" in check["evidence"]
        sent = [r["payload"] for r in worker.requests if r["number"] is not None]
        assert sent[0]["chat_template_kwargs"] == {"thinking": True}
        chats = worker.chats
        refused, again = given(body("391", None), "thinking", direct_url=worker.url, role_ports={"decode": worker.port})
        assert worker.chats == chats and "was not asked" in again["evidence"], "a half is never asked alone"
    return got


def case_api_28():
    """The chat route echoes any name; the model list tells who serves."""
    with Endpoint(model="dsv3-fallback") as endpoint:
        suite = probes.Suite(probes.Options(base_url=endpoint.url, model="dsv4", probes=["models", "arithmetic"], streams="whole", repeat=1))
        checks = suite.run()
    assert checks[2]["status"] == "pass", "the answer itself is right"
    assert "dsv3-fallback" in checks[1]["evidence"]
    assert suite.summary()["status"] == "fail"
    for status in (404, 400):
        got, dummy = given(Reply(status, {"error": {"message": "The model `dsv4` does not exist", "code": "model_not_found"}}), "arithmetic")
        assert got == "inconclusive model_name_mismatch"
    return "%s %s" % (checks[1]["status"], checks[1]["reason"])


def _pair(**changes):
    """A fake host that runs the pair of the plan, as test_topology has it."""
    from topology_host import FakeHost, PLAN

    host = FakeHost(PLAN, "pd")
    for name, value in changes.items():
        setattr(host, name, value)
    return host, topology.Topology(PLAN, "pd", host, settle_seconds=0)


def case_pd_10():
    """Health and model list answer, the scheduler is gone and the GPUs are empty."""
    host, watch = _pair()
    host.kill_schedulers("decode")
    checks = dict((c["id"], c) for c in watch.check())
    assert checks["unit.decode"]["status"] == "pass" and checks["health.decode"]["status"] == "pass"
    assert "no scheduler" in checks["process.decode"]["evidence"] and "4/4/4/4 MiB" in checks["process.decode"]["evidence"]
    return "%s %s" % (checks["process.decode"]["status"], checks["process.decode"]["reason"])


def case_krn_12():
    """Ready, two answers, a crash at 40 s and systemd's restart: found by pid, restart count and settle time."""
    host, watch = _pair()
    watch.settle = 120
    before = watch.snapshot()
    host.clock = host.started + 20
    host.at(40, lambda: host.restart("decode"))
    checks = dict((c["id"], c) for c in watch.check(before))
    assert "decode" in checks["stable"]["evidence"]
    host, watch = _pair()
    before = watch.snapshot()
    host.restart("decode")
    again = dict((c["id"], c) for c in watch.check(before))["stable"]
    assert again["reason"] == "restarted_during_verification" and "restarts 0 -> 1" in again["evidence"] or "main pid" in again["evidence"]
    return "%s %s" % (checks["stable"]["status"], checks["stable"]["reason"])


def run_module(name, arguments):
    """The module as Ansible runs it: arguments in, JSON out."""
    root = pathlib.Path(__file__).resolve().parents[4]
    script = (
        "import json, sys\n"
        "from ansible.module_utils import basic\n"
        "basic._ANSIBLE_ARGS = sys.stdin.buffer.read()\n"
        "basic._ANSIBLE_PROFILE = 'legacy'\n"
        "from ansible_collections.blackwell.dsv4.plugins.modules import %s\n"
        "%s.main()\n" % (name, name))
    done = subprocess.run([sys.executable, "-c", script], input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode(),
                          capture_output=True, check=False, env={"PYTHONPATH": str(root / ".collections"), "PATH": "/usr/bin:/bin"}, timeout=60)
    assert done.stdout, done.stderr.decode()
    return json.loads(done.stdout)


def case_ans_07():
    """Placeholder keys do not censor the result; a real one is nowhere in it."""
    for key in ("EMPTY", "391", "ok", "changed", "content"):
        with Endpoint(lambda r: Reply(body=body(None, "391")) if r["number"] is not None else None) as endpoint:
            result = run_module("chat_probe", {"base_url": endpoint.url, "model": "deepseek-v4-flash", "api_key": key, "probes": ["arithmetic"],
                                               "streams": "whole", "repeat": 1})
        check = result["checks"][-1]
        assert check["reason"] == "content_null_reasoning_filled", result
        assert "***" not in json.dumps(result["checks"]) and "changed" in result, result
        assert "not masked" in json.dumps(result["warnings"])
    key = "dsv4-Zq81-planted-key"

    def echo(request):
        if request["number"] is None:
            return None
        return Reply(500, {"error": {"message": "bad header %s and 391" % request["headers"].get("Authorization")}})

    with Endpoint(echo) as endpoint:
        result = run_module("chat_probe", {"base_url": endpoint.url, "model": "deepseek-v4-flash", "api_key": key, "probes": ["arithmetic"],
                                           "streams": "whole", "repeat": 1})
    assert key not in json.dumps(result) and "Zq81" not in json.dumps(result)
    assert result["checks"][-1]["reason"] == "server_error"
    with Endpoint(lambda r: Reply(body=body(None, "391")) if r["number"] is not None else None) as endpoint:
        result = run_module("chat_probe", {"base_url": endpoint.url, "model": "deepseek-v4-flash", "api_key": "391", "probes": ["arithmetic"],
                                           "streams": "whole", "repeat": 1})
    return "%s %s" % (result["checks"][-1]["status"], result["checks"][-1]["reason"])


SCENES = {
    "PD-03": (case_pd_03, "inconclusive waiting"),
    "PD-05-probes": (case_pd_05, "fail timeout_no_bytes"),
    "PD-08": (case_pd_08, "fail timeout_no_bytes"),
    "PD-10": (case_pd_10, "fail zombie_server"),
    "PD-12": (case_pd_12, "flaky server_error"),
    "PD-14": (case_pd_14, "inconclusive probe_aimed_at_half"),
    "KRN-08": (case_krn_08, "fail crash_under_concurrency"),
    "KRN-12": (case_krn_12, "fail restarted_during_verification"),
    "API-21": (case_api_21, "fail no_reasoning"),
    "API-28": (case_api_28, "fail model_not_listed"),
    "ANS-07": (case_ans_07, "fail content_null_reasoning_filled"),
}


@pytest.mark.parametrize(("scene", "expected"), [pytest.param(*scene, id=case) for case, scene in SCENES.items()])
def test_scenes(scene, expected):
    assert scene() == expected


def table():
    """The lines ``case | try | expected | given | equal``."""
    rows = []
    for case, tries in ANSWERS.items():
        for number, (what, probe, stream, expected, *dummy) in enumerate(tries, 1):
            got, dummy2 = given(what, probe, stream)
            rows.append((case, "%s%s %d/%d" % (probe, ".stream" if stream else "", number, len(tries)), expected, got))
    for case, (scene, expected) in SCENES.items():
        rows.append((case, scene.__doc__.strip(), expected, scene()))
    lines = ["| case | try | expected | given | equal |", "|---|---|---|---|---|"]
    lines += ["| %s | %s | %s | %s | %s |" % (row + ("yes" if row[2] == row[3] else "NO",)) for row in sorted(rows, key=lambda r: r[0])]
    return "\n".join(lines)


HEAD = """# Reported failures, and what the probes say

Each case is a test by its id in `tests/unit/plugins/module_utils/test_probe_cases.py`; a try is one answer or one scene. Written by
`PYTHONPATH=.collections python tests/unit/plugins/module_utils/test_probe_cases.py > roles/verification/CASES.md`.
"""
PAGE = pathlib.Path(__file__).resolve().parents[4] / "roles" / "verification" / "CASES.md"


@pytest.mark.slow
def test_the_page_of_cases_is_as_they_are():
    page = PAGE.read_text(encoding="utf-8")
    assert page == HEAD + "\n" + table() + "\n"
    assert "| NO |" not in page


if __name__ == "__main__":
    print(HEAD + "\n" + table())
