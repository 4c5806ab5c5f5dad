# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chat, stream and the other routes of one engine, as a client sees them."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import rehearsal_engine as support

THINK = {"chat_template_kwargs": {"thinking": True}}
PLAIN = {"chat_template_kwargs": {"thinking": False}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TRIP = {
    "type": "function",
    "function": {
        "name": "book_trip",
        "parameters": {
            "type": "object",
            "required": ["traveller", "stops", "cabin", "refundable"],
            "properties": {
                "traveller": {"type": "object", "required": ["name", "age"], "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
                "stops": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["city", "nights"],
                        "properties": {"city": {"type": "string"}, "nights": {"type": "integer", "minimum": 1}},
                    },
                },
                "cabin": {"type": "string", "enum": ["economy", "business"]},
                "refundable": {"type": "boolean"},
            },
        },
    },
}
MARKUP = ("<think>", "</think>", "DSML", "\uff5c", "<|")
ASK = "What is the weather in Paris and Tokyo?"


def test_arithmetic_without_thinking(single):
    answer = single.chat("What is 17*23?", **PLAIN)
    assert "391" in answer.message["content"]
    assert answer.message["reasoning_content"] is None
    assert "tool_calls" not in answer.message
    assert answer.choice["finish_reason"] == "stop"
    assert answer.json["usage"]["prompt_tokens"] == 11


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(THINK, id="kwargs"),
        pytest.param({"reasoning_effort": "high"}, id="effort"),
        pytest.param({"reasoning": {"enabled": True}}, id="reasoning"),
    ],
)
def test_thinking_is_split_off(single, body):
    message = single.chat("What is 17*23?", **body).message
    assert "340" in message["reasoning_content"]
    assert "391" in message["content"]
    assert not any(mark in message["content"] + message["reasoning_content"] for mark in MARKUP)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({}, id="default"),
        pytest.param({"reasoning_effort": "none"}, id="effort-none"),
        pytest.param({"enable_thinking": True, "thinking": True}, id="keys-without-effect"),
    ],
)
def test_thinking_is_opt_in(single, body):
    assert single.chat("What is 17*23?", **body).message["reasoning_content"] is None


@pytest.mark.parametrize("thinking", [False, True])
def test_parallel_tool_calls_and_second_turn(single, thinking):
    body = {"tools": [WEATHER], "chat_template_kwargs": {"thinking": thinking}}
    choice = single.chat(ASK, **body).choice
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Paris"}, {"city": "Tokyo"}]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert choice["message"]["content"] == ""
    history = [{"role": "user", "content": ASK}, {"role": "assistant", "content": None, "tool_calls": calls}]
    history += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, ("18 C", "22 C"))]
    choice = single.chat(history, **body).choice
    assert choice["finish_reason"] == "stop"
    assert "Paris: 18 C" in choice["message"]["content"]
    assert "Tokyo: 22 C" in choice["message"]["content"]


def test_nested_schema(single):
    (call,) = single.chat("Please book a trip for Alice, age 41, in business cabin to Rome for 3 nights, refundable.", tools=[TRIP]).message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {
        "traveller": {"name": "Alice", "age": 41},
        "stops": [{"city": "Rome", "nights": 3}],
        "cabin": "business",
        "refundable": True,
    }


def test_tools_that_the_question_does_not_need(single):
    assert "tool_calls" not in single.chat("What is 6*7?", tools=[WEATHER]).message
    assert "tool_calls" not in single.chat(ASK, tools=[WEATHER], tool_choice="none").message
    assert single.chat("Hello", tools=[WEATHER], tool_choice="required").choice["finish_reason"] == "tool_calls"


def test_structured_output(single):
    schema = {"type": "object", "required": ["product", "unit"], "properties": {"product": {"type": "integer"}, "unit": {"enum": ["one", "two"]}}}
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    assert json.loads(single.chat("The product of 17*23 as JSON", **body).message["content"]) == {"product": 391, "unit": "one"}
    assert json.loads(single.chat("JSON please", response_format={"type": "json_object"}).message["content"]) == {}


def test_needle_in_a_long_prompt(single):
    filler = "Nothing of note happened on that day. " * 1200
    for depth in (0, len(filler) // 2, len(filler)):
        prompt = filler[:depth] + "The secret number is 48213. " + filler[depth:] + "\nWhat is the secret number?"
        answer = single.chat(prompt)
        assert "48213" in answer.message["content"]
        assert answer.json["usage"]["prompt_tokens"] > 8000


TEXTS = [
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "日本語のテキスト",
    "é e\u0301 ß Ω",
    'a <b> & "c" \\n {d}',
    "data: [DONE]",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("thinking", [False, True])
def test_unicode_stream_equals_whole(single, text, thinking):
    body = {"chat_template_kwargs": {"thinking": thinking}}
    whole = single.chat("Repeat exactly: " + text, **body)
    stream = single.chat("Repeat exactly: " + text, stream=True, stream_options={"include_usage": True}, **body).joined()
    assert whole.message["content"] == stream["content"] == text
    assert (whole.message["reasoning_content"] or "") == stream["reasoning_content"]
    assert stream["done"]
    assert stream["finish_reason"] == "stop"
    assert stream["usage"] == whole.json["usage"]


def test_stream_of_calls(single):
    answer = single.chat(ASK, tools=[WEATHER], stream=True, **THINK)
    stream = answer.joined()
    assert [(call["name"], json.loads(call["arguments"])) for call in stream["calls"]] == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Tokyo"}),
    ]
    assert stream["finish_reason"] == "tool_calls"
    assert stream["reasoning_content"]
    first = answer.events[0]["choices"][0]["delta"]
    assert (first["role"], first["content"]) == ("assistant", "")
    assert answer.headers["Content-Type"].startswith("text/event-stream")


def test_limit_of_tokens(single):
    answer = single.chat("What is 17*23?", max_tokens=5, **THINK)
    assert answer.choice["finish_reason"] == "length"
    assert answer.message["content"] == ""
    assert answer.json["usage"]["completion_tokens"] == answer.json["usage"]["reasoning_tokens"] == 5
    assert single.chat("Count to 50", max_completion_tokens=7, stream=True).joined()["finish_reason"] == "length"


def test_stop_and_ignore_eos(single):
    choice = single.chat("Count to 9", stop=["5"]).choice
    assert (choice["message"]["content"], choice["finish_reason"], choice["matched_stop"]) == ("1 2 3 4 ", "stop", "5")
    assert single.chat("Say hi", ignore_eos=True, max_tokens=120).json["usage"]["completion_tokens"] == 120


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"{", id="json"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'{"model": "m"}', id="no-messages"),
        pytest.param(b'{"messages": []}', id="empty-messages"),
        pytest.param(b'{"messages": [{"role": "robot", "content": "x"}]}', id="role"),
        pytest.param(b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', id="max-tokens"),
        pytest.param(b'{"messages": [{"role": "user", "content": "x"}], "reasoning_effort": true}', id="effort"),
        pytest.param(b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', id="no-tools"),
        pytest.param(b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 65536}', id="beyond-context"),
    ],
)
def test_bad_request(single, body):
    answer = support.call(single.port, "POST", "/v1/chat/completions", body)
    assert (answer.status, answer.json["object"], answer.json["code"]) == (400, "error", 400)
    assert single.chat("What is 2*3?").status == 200


def test_prompt_beyond_the_context(single):
    answer = single.chat("word " * 70000)
    assert answer.status == 400
    assert "longer than the model's context length (65536 tokens)" in answer.json["message"]


def test_model_name_is_echoed_not_checked(single):
    answer = single.chat("What is 2*3?", model="somebody-else")
    assert answer.json["model"] == "somebody-else"
    models = support.call(single.port, "GET", "/v1/models").json["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [(support.NAME, 65536)]


def test_cancelled_stream_frees_its_slot(single):
    def running():
        return support.call(single.port, "GET", "/v1/loads").json["loads"][0]["num_running_reqs"]

    body = json.dumps({"messages": [{"role": "user", "content": "Count to 5000"}], "stream": True}).encode()
    client = socket.create_connection(("127.0.0.1", single.port))
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert client.recv(200).startswith(b"HTTP/1.1 200")
    assert running() == 1
    client.close()
    deadline = time.monotonic() + 3
    while running() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running() == 0


def test_many_at_once_without_cross_talk(single):
    answers = {}

    def ask(number):
        answers[number] = single.chat("What is %d*7?" % (100 + number), stream=True, **(THINK if number % 2 else PLAIN)).joined()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(str((100 + number) * 7) in answers[number]["content"] for number in range(64))
    assert all(answers[number]["done"] for number in range(64))


def test_counters_move(single):
    names = ("prompt_tokens_total", "generation_tokens_total", "num_requests_total")
    before = [single.metric(name) for name in names]
    usage = single.chat("What is 17*23?").json["usage"]
    after = [single.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after)] == [usage["prompt_tokens"], usage["completion_tokens"], 1]


def test_server_info(single):
    info = support.call(single.port, "GET", "/server_info").json
    assert info["version"] == "0.5.23+rehearsal"
    assert (info["attention_backend"], info["moe_runner_backend"], info["speculative_algorithm"]) == ("dsv4", "flashinfer_mxfp4", None)
    assert (info["reasoning_parser"], info["tool_call_parser"]) == ("deepseek-v4", "deepseekv4")
    assert 2_500_000 < info["max_total_num_tokens"] < 2_700_000
    assert info["internal_states"]
    assert "--port %d" % single.port in info["launch_command"]
    assert support.call(single.port, "GET", "/get_server_info").json["port"] == single.port
    assert support.call(single.port, "GET", "/model_info").json["model_type"] == "deepseek_v4"


def test_health_takes_a_second(single):
    answer = support.call(single.port, "GET", "/health")
    assert answer.status == 200
    assert answer.seconds >= 1
    assert support.call(single.port, "GET", "/ready").status == 200
    assert support.call(single.port, "GET", "/no_such_route").status == 404


def test_native_and_plain_routes(single):
    answer = support.call(single.port, "POST", "/generate", {"text": "The capital city of France is", "sampling_params": {"max_new_tokens": 8}})
    assert "Paris" in answer.json["text"]
    assert answer.json["meta_info"]["finish_reason"]["type"] == "stop"
    answer = support.call(single.port, "POST", "/v1/completions", {"prompt": "What is 6*7?", "max_tokens": 16})
    assert "42" in answer.json["choices"][0]["text"]
    stream = support.call(single.port, "POST", "/v1/completions", {"prompt": "What is 6*7?", "stream": True})
    assert stream.events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in stream.events[:-1]) == answer.json["choices"][0]["text"]
    assert support.call(single.port, "POST", "/flush_cache").status == 200


def test_processes_have_their_names(single):
    assert sorted(single.children()) == ["sglang::detokenizer"] + ["sglang::scheduler_TP%d" % rank for rank in range(4)]


# ---- what is seen when a flag is missing


def test_without_parsers_everything_leaks(engines):
    engine = engines(parsers=False)
    message = engine.chat("What is 17*23?", **THINK).message
    assert message["reasoning_content"] is None
    assert "</think>" in message["content"]
    choice = engine.chat(ASK, tools=[WEATHER]).choice
    assert "<\uff5cDSML\uff5ctool_calls>" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert "</think>" in engine.chat("What is 17*23?", stream=True, **THINK).joined()["content"]


def test_without_the_reasoning_parser(engines):
    engine = engines("null", "--tool-call-parser", "deepseekv4", parsers=False)
    message = engine.chat("What is 17*23?", **THINK).message
    assert message["reasoning_content"] is None
    assert "340" in message["content"]
    assert engine.chat(ASK, tools=[WEATHER]).choice["finish_reason"] == "tool_calls"


def test_without_the_tool_parser(engines):
    engine = engines("null", "--reasoning-parser", "deepseek-v4", parsers=False)
    assert "340" in engine.chat("What is 17*23?", **THINK).message["reasoning_content"]
    choice = engine.chat(ASK, tools=[WEATHER]).choice
    assert "DSML" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_parser_of_the_former_generation(engines):
    engine = engines("null", "--tool-call-parser", "deepseekv32", "--reasoning-parser", "deepseek-v4", parsers=False)
    choice = engine.chat(ASK, tools=[WEATHER]).choice
    assert "tool_calls" not in choice["message"]
    assert "DSML" in choice["message"]["content"]
    assert engine.chat("What is 17*23?", **THINK).json["usage"]["prompt_tokens"] < 20  # no effort preamble: another prompt


def test_keys(engines, tmp_path):
    config = tmp_path / "keys.yaml"
    config.write_text("api-key: user-key\nadmin-api-key: admin-key\n", encoding="utf-8")
    engine = engines("null", "--config", str(config))

    def status(method, path, key=None):
        headers = {"Authorization": "Bearer " + key} if key else {}
        return support.call(engine.port, method, path, headers=headers).status

    assert [status("GET", path) for path in ("/health", "/ready", "/metrics", "/health_generate")] == [200] * 4
    assert [status("GET", "/v1/models", key) for key in (None, "wrong", "admin-key", "user-key")] == [401, 401, 401, 200]
    assert [status("POST", "/flush_cache", key) for key in (None, "user-key", "admin-key")] == [401, 401, 200]
    assert engine.chat("What is 2*3?").json == {"error": "Unauthorized"}
    assert "6" in engine.chat("What is 2*3?", headers={"Authorization": "Bearer user-key"}).message["content"]
