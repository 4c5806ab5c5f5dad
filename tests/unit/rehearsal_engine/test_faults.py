# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Misbehaviour on demand: each case of the public reports that concerns a client can be shown live."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import rehearsal_engine as support

THINK = {"chat_template_kwargs": {"thinking": True}}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
TOOLS = {"tools": [WEATHER]}
ASK = "What is the weather in Paris and Tokyo?"
SUM = "What is 17*23?"


def arguments(message):
    return [call["function"]["arguments"] for call in message["tool_calls"]]


@pytest.mark.parametrize(
    ("faults", "question", "body", "check"),
    [
        pytest.param(
            {"never_close": True},
            SUM,
            THINK,
            lambda c, s: (
                "391" in c["message"]["reasoning_content"]
                and c["message"]["content"] == ""
                and "end\u2581of\u2581sentence" in c["message"]["reasoning_content"]
                and c["finish_reason"] == "stop"
                and s["content"] == ""
            ),
            id="API-01-engine",
        ),
        pytest.param(
            {"content_in_reasoning": True},
            SUM,
            {},
            lambda c, s: (
                c["message"]["content"] is None and "391" in c["message"]["reasoning_content"] and "391" in s["reasoning_content"] and s["content"] == ""
            ),
            id="API-02-engine",
        ),
        pytest.param(
            {"parser_unaware": True},
            SUM,
            THINK,
            lambda c, s: c["message"]["reasoning_content"] is None and "340" in c["message"]["content"] and "340" in s["content"],
            id="API-03-engine",
        ),
        pytest.param(
            {"text": "We need 17*23, sum 391.\n<think>391"},
            SUM,
            {},
            lambda c, s: "<think>" in c["message"]["content"] and "<think>" in s["content"],
            id="API-03-open",
        ),
        pytest.param(
            {"reasoning_field": True}, SUM, THINK, lambda c, s: "340" in c["message"]["reasoning"] and "reasoning_content" not in c["message"],
            id="API-05-engine",
        ),
        pytest.param({"reasoning_field": "both"}, SUM, THINK, lambda c, s: c["message"]["reasoning"] == c["message"]["reasoning_content"], id="API-05-both"),
        pytest.param(
            {}, SUM, {**THINK, "max_tokens": 8}, lambda c, s: c["finish_reason"] == s["finish_reason"] == "length" and not c["message"]["content"],
            id="API-06-engine",
        ),
        pytest.param(
            {"call_as_text": True},
            ASK,
            TOOLS,
            lambda c, s: (
                'get_weather({"city": "Paris"})' in s["content"] and c["message"]["content"] == s["content"] and "tool_calls" not in c["message"]
            ),
            id="API-08-engine",
        ),
        pytest.param(
            {"ascii_markup": True},
            ASK,
            TOOLS,
            lambda c, s: "<|DSML|tool_calls>" in c["message"]["content"] and "tool_calls" not in c["message"],
            id="API-10-ascii",
        ),
        pytest.param(
            {"bare_invoke": True}, ASK, TOOLS, lambda c, s: "invoke name=" in c["message"]["content"] and "tool_calls" not in c["message"], id="API-10-bare"
        ),
        pytest.param(
            {"cut_markup": True}, ASK, TOOLS, lambda c, s: c["message"]["content"].endswith("<|DSML|inv") and "tool_calls" not in c["message"], id="API-10-cut"
        ),
        pytest.param(
            {"same_index": True},
            ASK,
            TOOLS,
            lambda c, s: [call["index"] for call in c["message"]["tool_calls"]] == [0, 0] and len(s["calls"]) == 1,
            id="API-11-engine",
        ),
        pytest.param(
            {"merged_calls": True},
            ASK,
            TOOLS,
            lambda c, s: arguments(c["message"]) == ['{"city": "Paris"}{"city": "Tokyo"}'] == [s["calls"][0]["arguments"]],
            id="API-12-engine",
        ),
        pytest.param(
            {"arguments_object": True}, ASK, TOOLS, lambda c, s: arguments(c["message"]) == [{"city": "Paris"}, {"city": "Tokyo"}],
            id="API-15-engine",
        ),
        pytest.param(
            {"finish_stop": True},
            ASK,
            TOOLS,
            lambda c, s: c["finish_reason"] == s["finish_reason"] == "stop" and len(c["message"]["tool_calls"]) == 2,
            id="API-17-engine",
        ),
        pytest.param(
            {"no_call": True, "null_content": True},
            ASK,
            {**TOOLS, **THINK},
            lambda c, s: c["message"]["content"] is None and "tool_calls" not in c["message"] and "get_weather" in c["message"]["reasoning_content"],
            id="API-19-engine",
        ),
        pytest.param(
            {"think": "off"}, SUM, THINK, lambda c, s: c["message"]["reasoning_content"] is None and "391" in c["message"]["content"],
            id="API-21-engine",
        ),
        pytest.param({"bold": True, "null_content": True}, SUM, {}, lambda c, s: "**391**" in c["message"]["content"], id="API-23-engine"),
        pytest.param({"repeat_id": True}, ASK, TOOLS, lambda c, s: len(s["calls"]) == 2, id="API-24-engine"),
        pytest.param(
            {"one_call": True}, ASK, TOOLS, lambda c, s: arguments(c["message"]) == ['{"city": "Paris"}'] and len(s["calls"]) == 1,
            id="API-26-engine",
        ),
        pytest.param(
            {"same_call": True}, ASK, TOOLS, lambda c, s: len(set(arguments(c["message"]))) == 1 and len(c["message"]["tool_calls"]) == 2, id="API-26-same"
        ),
        pytest.param({"extra_call": True}, ASK, TOOLS, lambda c, s: len(c["message"]["tool_calls"]) == len(s["calls"]) == 3, id="API-26-three"),
        pytest.param(
            {"duplicate_ids": True},
            ASK,
            TOOLS,
            lambda c, s: len({call["id"] for call in c["message"]["tool_calls"]}) == 1 and s["calls"][0]["id"] == s["calls"][1]["id"],
            id="API-26-ids",
        ),
        pytest.param(
            {"think": "on"}, SUM, {"chat_template_kwargs": {"thinking": False}}, lambda c, s: c["message"]["reasoning_content"] is not None, id="API-31-on"
        ),
        pytest.param({"garbage": True}, SUM, {"max_tokens": 50}, lambda c, s: set(c["message"]["content"]) == set(s["content"]) == {"!"}, id="FAB-04-engine"),
        pytest.param({"empty": True}, SUM, {}, lambda c, s: c["message"]["content"] == s["content"] == "" and c["finish_reason"] == "stop", id="empty"),
        pytest.param({"wrong_number": True}, SUM, {}, lambda c, s: "392" in c["message"]["content"] and "392" in s["content"], id="wrong-number"),
        pytest.param(
            {"abort": True}, SUM, {}, lambda c, s: c["finish_reason"] == s["finish_reason"] == "abort" and not c["message"]["content"],
            id="PD-06-engine",
        ),
    ],
)
def test_answers(single, faults, question, body, check):
    single.fault(**faults)
    choice = single.chat(question, **body).choice
    stream = single.chat(question, stream=True, **body).joined()
    assert check(choice, stream), (choice, stream)


def test_API_13_arguments_wrapped_in_the_second_turn(single):
    single.fault(wrap_arguments=True)
    message = single.chat("What is the weather in Paris?", **TOOLS).message
    assert json.loads(arguments(message)[0]) == {"city": "Paris"}
    history = [
        {"role": "user", "content": "What is the weather in Paris?"},
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "18 C"},
        {"role": "assistant", "content": "18 C"},
        {"role": "user", "content": "And the weather in Tokyo?"},
    ]
    assert json.loads(arguments(single.chat(history, **TOOLS).message)[0]) == {"arguments": {"city": "Tokyo"}}


def test_API_29_refused_tool_choice(single):
    single.fault(reject_tool_choice=True)
    answer = single.chat(ASK, **TOOLS, **THINK)
    assert answer.status == 400
    assert "does not support this tool_choice" in answer.json["message"]


def test_PD_12_first_request_fails_then_all_is_well(single):
    single.fault(status=500, message="Stream error from decode server", times=1)
    first = single.chat(SUM)
    assert (first.status, first.json["message"]) == (500, "Stream error from decode server")
    assert "391" in single.chat(SUM).message["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_hang_and_cut(single, stream):
    single.fault(hang=True)
    with pytest.raises(TimeoutError):
        single.chat(SUM, stream=stream, timeout=0.5)
    if stream:
        single.fault(die_after=2)
        with pytest.raises(http.client.IncompleteRead):
            single.chat(SUM, stream=True)


def test_health_faults(single):
    single.fault(health=503)
    assert support.call(single.port, "GET", "/health").status == 503
    single.fault()
    assert support.call(single.port, "GET", "/health").status == 200


def test_unknown_faults_are_refused(single):
    answer = support.call(single.port, "POST", "/_rehearsal/fault", {"hangs": True})
    assert answer.status == 400
    assert "hangs" in answer.json["message"]
    assert support.call(single.port, "GET", "/_rehearsal/fault").json == {"faults": {}, "times": None}


# ---- the server itself


def state(pid):
    """The letter of a process's state, empty when it is gone."""
    try:
        return Path("/proc/%d/stat" % pid).read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_KRN_08_crash_with_many_at_once(engines):
    engine = engines(settings={"token_seconds": 0.02})
    engine.fault(crash_at=4)
    results = []

    def ask():
        try:
            results.append(engine.chat("Count to 40").status)
        except (OSError, http.client.HTTPException) as error:
            results.append(type(error).__name__)

    assert engine.chat(SUM).status == 200
    threads = [threading.Thread(target=ask) for _place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results
    assert 200 not in results
    assert engine.popen.wait(10) == -signal.SIGKILL
    assert "illegal memory access" in engine.log()


def test_KRN_12_crash_after_ready(engines):
    engine = engines(settings={"faults": {"exit_after": 0.5}})
    assert engine.popen.wait(10) == -signal.SIGKILL
    log = engine.log()
    assert log.index("fired up and ready to roll!") < log.index("Scheduler hit an exception")


def test_PD_10_schedulers_gone_health_stays(engines):
    engine = engines()
    engine.fault(zombie=True)
    assert support.call(engine.port, "GET", "/health").status == 200
    assert support.call(engine.port, "GET", "/v1/models").status == 200
    assert not [title for title in engine.children() if "scheduler" in title]
    with pytest.raises(TimeoutError):
        engine.chat(SUM, timeout=0.5)


def test_a_killed_scheduler_ends_the_server(engines):
    engine = engines()
    os.kill(engine.children()["sglang::scheduler_TP2"], signal.SIGKILL)
    assert engine.popen.wait(10) != 0
    assert "crashed" in engine.log()


def test_children_die_with_the_server(engines):
    engine = engines()
    pids = engine.children().values()
    engine.stop(signal.SIGKILL)
    time.sleep(0.2)
    assert [pid for pid in pids if state(pid) not in ("Z", "")] == []


def test_SVC_02_orphans(engines):
    engine = engines(settings={"faults": {"orphans": True}})
    pids = list(engine.children().values())
    engine.stop(signal.SIGKILL)
    try:
        time.sleep(0.2)
        assert [state(pid) for pid in pids] == ["S"] * 5
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def test_never_ready(engines):
    engine = engines(settings={"faults": {"never_ready": True}}, wait=False)
    engine.wait_for(engine.port, "/health", status=503)
    assert support.call(engine.port, "GET", "/ready").status == 503
    assert "fired up" not in engine.log()


def test_failed_warm_up_prints_the_ready_line(engines):
    engine = engines("prefill", settings={"faults": {"warmup_failed": True}}, wait=False)
    engine.wait_for(engine.port, "/v1/models")
    deadline = time.monotonic() + 10
    while "fired up" not in engine.log() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "Disaggregation warmup failed (mode=prefill)" in engine.log()
    assert "fired up" in engine.log()
    assert support.call(engine.port, "GET", "/ready").status == 503
    assert support.call(engine.port, "GET", "/health").status == 200
    assert support.call(engine.port, "GET", "/ready").status == 200


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        pytest.param("no_kernel", "no kernel image is available", id="KRN-03-engine"),
        pytest.param("shared_memory", "0xc980 bytes, 0xc000 max", id="KRN-07-engine"),
        pytest.param("oom", "CUDA out of memory", id="KRN-10-engine"),
        pytest.param("unsupported_arch", "Unsupported architecture", id="KRN-01-engine"),
        pytest.param("numa", "set_mempolicy: Operation not permitted", id="FAB-12-engine"),
    ],
)
def test_start_errors(engines, kind, line):
    engine = engines(settings={"faults": {"start_error": kind}}, wait=False)
    assert engine.popen.wait(20) == 1
    assert line in engine.log()


def test_a_draft_of_which_nothing_is_accepted_shows_in_the_counters_alone(engines):
    """What verification computes: tokens that came neither from prefill nor from a verifying step came from the draft."""
    engine = engines("null", "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
                     "--speculative-num-draft-tokens", "4")
    answers, accepted = [], []
    for faults in ({}, {"accepted": 0}, {"accepted": 3}):
        engine.fault(**faults)
        before = [engine.metric(name) if answers else 0.0 for name in ("generation_tokens_total", "spec_verify_calls_total", "num_requests_total")]
        answers.append(engine.chat("Count from 1 to 50, separated by commas.").message["content"])
        tokens, steps, requests = (engine.metric(name) - old for name, old in
                                   zip(("generation_tokens_total", "spec_verify_calls_total", "num_requests_total"), before))
        accepted.append((tokens - steps - requests) / steps)
    assert len(set(answers)) == 1
    assert accepted[1] == 0 and 0.9 < accepted[0] <= 1 and 2.7 < accepted[2] <= 3
