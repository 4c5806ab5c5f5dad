# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each probe passes a good endpoint and fails the one that it is made for."""

from __future__ import annotations

import json
import pathlib
import sys
import threading

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from endpoint import Endpoint, Reply, call, good_answer, sse, streamed, whole  # noqa: E402

from ansible_collections.blackwell.dsv4.plugins.module_utils import chat_client, probes, verdict  # noqa: E402

NAME = "deepseek-v4-flash"


def suite(endpoint, **options):
    options.setdefault("timeout", 10)
    options.setdefault("context_length", 20000)
    return probes.Suite(probes.Options(base_url=endpoint.url, model=NAME, **options))


def run(hook=None, api_key=None, given_key=None, **options):
    with Endpoint(hook, api_key=api_key) as endpoint:
        made = suite(endpoint, api_key=given_key, **options)
        return dict((c["id"], c) for c in made.run()), made, endpoint


def answering(change):
    """A hook that changes the good answer: ``change(payload, content, reasoning, calls)`` gives the three anew."""
    def hook(request):
        if request["number"] is None or request["payload"] is None:
            return None
        return Endpoint.answer(request["payload"], *change(request["payload"], *good_answer(request["payload"])))

    return hook


def text_of(payload):
    return str(payload["messages"][-1].get("content"))


def test_a_good_endpoint_passes_everything_in_stable_order():
    checks, made, endpoint = run(api_key="dsv4-Zq81-planted-key", given_key="dsv4-Zq81-planted-key", readiness_path="/readiness")
    assert set(c["status"] for c in checks.values()) == {"pass"}, [c for c in checks.values() if c["status"] != "pass"]
    assert list(checks) == probes.check_ids(made.o)
    assert made.summary()["ok"] and made.summary()["counts"]["pass"] == len(checks)
    for name, check in checks.items():
        if name.endswith(".stream"):
            assert check["ttft"] is not None and check["tokens"], check


def test_no_question_is_asked_twice_with_the_same_numbers():
    dummy, made, endpoint = run(probes=["arithmetic"], streams="whole", repeat=6)
    asked = [text_of(r["payload"]) for r in endpoint.requests if r["number"] is not None]
    assert len(asked) == len(set(asked)) == 6 and asked[0].startswith("What is 17*23?")
    dummy, made, again = run(probes=["arithmetic"], streams="whole", repeat=6)
    assert [text_of(r["payload"]) for r in again.requests if r["number"] is not None][1:] != asked[1:]


def test_a_cached_answer_does_not_pass():
    cached = answering(lambda payload, content, reasoning, calls: ("391", reasoning, calls))
    check = run(cached, probes=["arithmetic"], streams="whole", repeat=3)[0]["arithmetic.whole"]
    assert (check["status"], check["reason"], check["passed"]) == ("flaky", "wrong_answer", 1)


def stream_only(change):
    """Spoils streamed answers and leaves whole ones good."""
    def hook(request):
        payload = request["payload"]
        if request["number"] is None or payload is None or not payload.get("stream"):
            return None
        return Endpoint.answer(payload, *change(payload, *good_answer(payload)))

    return hook


SPOILED = {
    # probe: (hook, check, status, reason)
    "thinking is on by default": (
        answering(lambda p, c, r, t: (c, "A thought.", t) if "chat_template_kwargs" not in p and "reasoning_effort" not in p else (c, r, t)),
        "thinking_default.whole", "fail", "reasoning_when_disabled"),
    "effort none thinks": (answering(lambda p, c, r, t: (c, "A thought.", t) if p.get("reasoning_effort") == "none" else (c, r, t)),
                           "effort_none.stream", "fail", "reasoning_when_disabled"),
    "effort high does not": (answering(lambda p, c, r, t: (c, None, t) if p.get("reasoning_effort") == "high" else (c, r, t)),
                             "effort_high.whole", "fail", "no_reasoning"),
    "tool results are not used": (answering(lambda p, c, r, t: ("It is mild in both.", r, t) if p["messages"][-1]["role"] == "tool" else (c, r, t)),
                                  "tools_answer.whole", "fail", "wrong_answer"),
    "the tool is called again": (
        answering(lambda p, c, r, t: ("", r, [call("get_weather", {"city": "Paris"})]) if p["messages"][-1]["role"] == "tool" else (c, r, t)),
        "tools_answer.stream", "fail", "unexpected_tool_calls"),
    "the second turn calls nothing": (answering(lambda p, c, r, t: ("It rains in Rome.", r, None) if "Rome" in text_of(p) else (c, r, t)),
                                      "tools_again.whole", "fail", "no_tool_calls"),
    "a nested number as text": (
        answering(lambda p, c, r, t: (c, r, [dict(x, function=dict(x["function"], arguments=x["function"]["arguments"].replace('"quantity": ', '"quantity": "#')
                                                                   .replace("}]", '"}]'))) for x in t]) if "create_order" in text_of(p) else (c, r, t)),
        "tools_nested.whole", "fail", "arguments_schema"),
    "a nested value of another": (
        answering(lambda p, c, r, t: (c, r, [dict(x, function=dict(x["function"], arguments=x["function"]["arguments"].replace("75001", "75002")))
                                             for x in t]) if "create_order" in text_of(p) else (c, r, t)),
        "tools_nested.stream", "fail", "wrong_tool_arguments"),
    "a tool that nobody offered": (answering(lambda p, c, r, t: (c, r, [call("get_weather", {"city": "Paris"})]) if "no tools" in text_of(p) else (c, r, t)),
                                   "no_tools.whole", "fail", "unexpected_tool_calls"),
    "markup without tools": (answering(lambda p, c, r, t: ("<\uff5cDSML\uff5ctool_calls>", r, t) if "no tools" in text_of(p) else (c, r, t)),
                             "no_tools.stream", "fail", "tool_markup_in_content"),
    "JSON in a fence": (answering(lambda p, c, r, t: ("```json\n%s\n```" % c, r, t) if p.get("response_format") else (c, r, t)),
                        "structured.whole", "fail", "structured_invalid"),
    "JSON with one key more": (answering(lambda p, c, r, t: (json.dumps(dict(json.loads(c), note="x")), r, t) if p.get("response_format") else (c, r, t)),
                               "structured.whole", "fail", "structured_invalid"),
    "JSON with a wrong product": (answering(lambda p, c, r, t: (c.replace('"product": ', '"product": 1'), r, t) if p.get("response_format") else (c, r, t)),
                                  "structured.stream", "fail", "wrong_answer"),
    "an emoji taken apart": (answering(lambda p, c, r, t: (c.replace("\u200d", ""), r, t)), "unicode.whole", "fail", "text_changed"),
    "an accent normalised": (answering(lambda p, c, r, t: (c.replace("e\u0301", "\u00e9"), r, t)), "unicode.whole", "fail", "text_changed"),
    "a character split between chunks": (answering(lambda p, c, r, t: (c.replace("\U0001f680", "\ufffd\ufffd"), r, t)),
                                         "unicode.stream", "fail", "replacement_character"),
    "the middle of a long prompt is lost": (answering(lambda p, c, r, t: ("I do not know.", r, t) if "box GREEN?" in text_of(p) else (c, r, t)),
                                            "long_prompt.whole", "fail", "needle_missed"),
    "streams lose text": (stream_only(lambda p, c, r, t: (c[:-1] if c else c, r, t)), "tools_answer.stream", "fail", "stream_lost_text"),
    "streams are reordered": (stream_only(lambda p, c, r, t: (c[::-1], r, t) if "no tools" in text_of(p) else (c, r, t)),
                              "no_tools.stream", "fail", "stream_reordered"),
    "streams call otherwise": (stream_only(lambda p, c, r, t: (c, r, t and [dict(x, function=dict(x["function"], arguments='{"city": "Tokyo, or Paris"}'))
                                                                            for x in t]) if "Rome" not in text_of(p) else (c, r, t)),
                               "tools.stream", "fail", "stream_differs"),
}


@pytest.mark.parametrize("name", list(SPOILED))
def test_each_probe_sees_what_it_is_made_for(name):
    hook, identity, status, reason = SPOILED[name]
    checks = run(hook, probes=[identity.split(".")[0]], repeat=1)[0]
    check = checks[identity]
    assert (check["status"], check["reason"]) == (status, reason), check
    assert check["hint"] and check["evidence"]


def test_answers_of_others_are_cross_talk():
    """Two requests at once get each other's answers."""
    waiting, lock = [], threading.Lock()

    def hook(request):
        if request["number"] is None:
            return None
        content = good_answer(request["payload"])[0]
        with lock:
            waiting.append(content)
            other = waiting[-2] if len(waiting) > 1 else content
        return Endpoint.answer(request["payload"], other)

    check = run(hook, probes=["concurrent"], streams="whole")[0]["concurrent.whole"]
    assert (check["status"], check["reason"]) == ("fail", "cross_talk"), check
    assert (check["attempts"], check["passed"]) == (8, 1)


def test_some_failures_at_once_with_a_server_that_lives():
    def hook(request):
        return Reply(500, {"error": {"message": "CUDA error"}}) if request["number"] is not None and request["number"] % 2 else None

    check = run(hook, probes=["concurrent"], streams="whole")[0]["concurrent.whole"]
    assert check["reason"] == "errors_under_concurrency" and "4 of 8 at once failed" in check["evidence"]


def test_a_slot_that_is_not_freed():
    with Endpoint() as endpoint:
        made = suite(endpoint, probes=["cancel"], workers=[{"name": "decode", "url": endpoint.url}])
        made.slot_wait = 0.3
        running = endpoint.send

        def send(handler, reply):
            running(handler, reply)
            if reply.pause:
                endpoint.running += 1

        endpoint.send = send
        check = made.run()[-1]
    assert (check["status"], check["reason"]) == ("fail", "slot_not_freed"), check
    assert "decode runs 1" in check["evidence"]


def test_an_answer_that_is_over_before_it_can_be_cut():
    quick = answering(lambda p, c, r, t: ("1, 2, 3" if "Count" in text_of(p) else c, r, t))

    def hook(request):
        reply = quick(request)
        if reply:
            reply.chunked, reply.pause = False, 0
        return reply

    check = run(hook, probes=["cancel"])[0]["cancel"]
    assert check["status"] in ("inconclusive", "pass"), check


@pytest.mark.parametrize(("what", "reply", "reason"), [
    ("bad_json", lambda r: Reply(body=whole("391")) if r["number"] is not None and r["payload"] is None else None, "not_refused"),
    ("bad_json", lambda r: Reply(500, b"Internal Server Error") if r["number"] is not None and r["payload"] is None else None, "server_error"),
    ("too_long", lambda r: Reply(body=whole("391")) if r["number"] is not None and len(r["raw"]) > 30000 else None, "not_refused"),
    ("too_long", lambda r: Reply(None) if r["number"] is not None and len(r["raw"]) > 30000 else None, "connection_closed"),
    ("unknown_model", lambda r: Reply(503, {"error": {"message": "no_available_workers"}}) if r["number"] is not None else None, "unknown_model_unexpected"),
    ("models", lambda r: Reply(body={"object": "list", "data": [{"id": "unknown"}]}) if r["path"] == "/v1/models" else None, "model_not_listed"),
    ("models", lambda r: Reply(body=b"ok") if r["path"] == "/v1/models" else None, "body_not_json"),
    ("healthy", lambda r: Reply(503, {"status": "not ready"}) if r["path"] == "/readiness" and len(seen_readiness(r)) > 1 else None, "unhealthy_after"),
])
def test_bad_manners_are_seen(what, reply, reason):
    READINESS.clear()
    check = run(reply, probes=[what], readiness_path="/readiness")[0][what]
    assert (check["status"], check["reason"]) == ("fail", reason), check


READINESS = []


def seen_readiness(request):
    READINESS.append(request["path"])
    return READINESS


def test_a_server_that_dies_of_a_bad_request():
    state = {"dead": False}

    def hook(request):
        if request["number"] is not None and request["payload"] is None:
            state["dead"] = True
            return Reply(400, {"error": "bad"})
        return Reply(500, {"error": "dead"}) if state["dead"] and request["number"] is not None else None

    check = run(hook, probes=["bad_json"])[0]["bad_json"]
    assert check["reason"] == "unhealthy_after" and "server_error" in check["evidence"]


@pytest.mark.parametrize(("router", "status", "verdict_"), [
    ("sglang-router", 200, "pass"), ("sglang-router", 503, "fail"), ("smg", 503, "pass"), ("smg", 200, "fail"), ("none", 200, "pass"), ("none", 404, "pass"),
])
def test_an_unknown_model_gets_what_the_routers_table_says(router, status, verdict_):
    hook = None if status == 200 else lambda r: Reply(status, {"error": {"message": "x"}}) if r["number"] is not None else None
    assert run(hook, probes=["unknown_model"], router=router)[0]["unknown_model"]["status"] == verdict_


def test_noise_that_ends_at_the_limit_is_truncated_in_every_generating_probe():
    """Random weights: whatever is asked, text without sense until max_tokens. Transport, names and keys must still pass."""
    key = "dsv4-Zq81-planted-key"
    noise = "lorem <\uff5c ipsum </think dolor 42 " + "".join(chr(0x4e00 + 37 * n % 900) for n in range(200))

    def hook(request):
        if request["number"] is None or request["payload"] is None or len(request["raw"]) > 40000:
            return None
        if request["headers"].get("Authorization") != "Bearer " + key:
            return None
        return Endpoint.answer(request["payload"], noise + request["raw"].decode()[-40:], None, None, "length")

    with Endpoint(hook, api_key=key) as endpoint:
        made = suite(endpoint, api_key=key, repeat=1, long_prompt_tokens=1000)
        checks = dict((c["id"], c) for c in made.run())
    passing = {"endpoint", "models", "auth", "bad_json", "too_long", "unknown_model", "healthy"}
    assert set(name for name, c in checks.items() if c["status"] == "pass") == passing
    for name in set(checks) - passing:
        assert (checks[name]["status"], checks[name]["reason"], checks[name]["finish"]) == ("inconclusive", "truncated", "length"), checks[name]
    assert made.summary()["status"] == "inconclusive"


def test_more_room_is_tried_once():
    def hook(request):
        if request["number"] is None:
            return None
        payload = request["payload"]
        content, reasoning, calls = good_answer(payload)
        return Endpoint.answer(payload, content, reasoning, calls, "length" if payload["max_tokens"] <= 64 else None)

    check = run(hook, probes=["thinking"], streams="whole", repeat=1, max_tokens=64)[0]["thinking.whole"]
    assert check["status"] == "pass" and check["notes"] == ["needed more than 64 tokens"]
    check = run(hook, probes=["thinking"], streams="whole", repeat=1, max_tokens=64, retry_truncated=False)[0]["thinking.whole"]
    assert (check["reason"], check["evidence"]) == ("truncated", "max_tokens 64 was used up")


def test_waiting_for_readiness_ends_when_all_are_ready():
    calls = []

    def hook(request):
        if request["path"] == "/health":
            calls.append(1)
            return Reply(503) if len(calls) < 3 else None
        return None

    with Endpoint(hook) as endpoint:
        made = probes.Suite(probes.Options(base_url=endpoint.url, model=NAME, probes=["models"], ready_timeout=30,
                                           workers=[{"name": "decode", "url": endpoint.url}]), sleep=lambda seconds: None)
        assert [c["status"] for c in made.run()] == ["pass", "pass"]
    assert len(calls) == 3


def test_wording_may_differ_between_whole_and_streamed():
    one = verdict.judge_arithmetic(exchange(whole("The product is 391", tokens=6)), False, 391)
    two = verdict.judge_arithmetic(exchange(sse(streamed("17 * 23 = 391", tokens=7))), True, 391)
    assert verdict.compare(one.answer, two.answer) is None
    assert "worded otherwise" in two.answer.notes[0]


def exchange(body):
    return chat_client.Exchange("POST", "x", 200, {}, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(("text", "numbers"), [
    ("17 \u00d7 23 = **391**.", [17, 23, 391]), ("1,081", [1081]), ("1\u202f081", [1081]), ("1{,}081", [1081]), ("\\boxed{391}", [391]), ("-391", [-391]),
    ("= \u2212391", [-391]), ("400-9", [400, 9]), ("391.0", [391]), ("3.91", [3.91]), ("391st a1b2 v3", []), ("\u7b54\u6848\u662f391\u3002", [391]),
    ("391", [391]), ("", []), ("\uff13\uff19\uff11", [391]),
])
def test_numbers(text, numbers):
    assert verdict.numbers_in(text) == numbers


@pytest.mark.parametrize(("text", "garbage"), [
    ("!!!!!!!!", True), ("! ! ! ! ! ! ! !", True), ("foo " * 40, True), ("\u7684\u662f" * 30, True), ("391", False), ("1111111", False),
    ("The answer is 391. " * 2, False), ("aaaa", False), (None, False),
])
def test_garbage(text, garbage):
    assert bool(verdict.is_garbage(text)) == garbage


@pytest.mark.parametrize("text", [
    "17 < 23 and 391 > 2", "I think it is 391.", "Use `a | b`.", "x <= y", "the thinking hat", "if a<b then c", "[1] calls", "function of x",
])
def test_ordinary_text_leaks_nothing(text):
    assert verdict.find_leaks(text, "content") == []
