# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each real router does with DeepSeek-V4 in prefill/decode mode.

A must is required of the default router and asserted for it; what the other one
does is asserted as well, so that a new version that behaves differently is
noticed. The table at the end of the run is the one of the README.
"""
from __future__ import annotations

import json
import signal
import socket
import threading
import time

import pytest
import rehearsal_engine as support

THINK = {"chat_template_kwargs": {"thinking": True}}
PLAIN = {"chat_template_kwargs": {"thinking": False}}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


def test_thinking_is_opt_in(setup, name, seen):
    """Must. smg asks for thinking by itself."""
    message = setup[0].chat("What is 17*23?").message
    assert "391" in message["content"]
    thinks = message["reasoning_content"] is not None
    seen("thinks unasked" if thinks else "yes")
    assert thinks == (name == "smg")


def test_thinking_on_request(setup, seen):
    """Must: chat_template_kwargs arrives at both halves."""
    on = setup[0].chat("What is 17*23?", **THINK).message
    off = setup[0].chat("What is 17*23?", **PLAIN).message
    assert on["reasoning_content"]
    assert off["reasoning_content"] is None
    seen("kept")


def test_top_level_reasoning_field(setup, name, seen):
    """`reasoning: {enabled: true}` is one of SGLang's own controls."""
    thought = setup[0].chat("What is 17*23?", reasoning={"enabled": True}).message["reasoning_content"]
    seen("kept" if thought else "dropped")
    assert bool(thought) == (name == "smg")


def test_stream_equals_whole(setup, seen):
    for body in (THINK, PLAIN):
        whole = setup[0].chat("Repeat exactly: \U0001f600 \U0001f1e9\U0001f1ea end", **body).message
        stream = setup[0].chat("Repeat exactly: \U0001f600 \U0001f1e9\U0001f1ea end", stream=True, stream_options={"include_usage": True}, **body).joined()
        assert stream["content"] == whole["content"] == "\U0001f600 \U0001f1e9\U0001f1ea end"
        assert stream["reasoning_content"] == (whole["reasoning_content"] or "")
        assert stream["usage"]["completion_tokens"] > 1
        assert stream["done"]
    seen("equal")


def test_tool_calls(setup, seen):
    for stream in (False, True):
        answer = setup[0].chat("What is the weather in Paris and Tokyo?", tools=[WEATHER], stream=stream, **PLAIN)
        if stream:
            cities = [json.loads(call["arguments"])["city"] for call in answer.joined()["calls"]]
        else:
            cities = [json.loads(call["function"]["arguments"])["city"] for call in answer.message["tool_calls"]]
        assert cities == ["Paris", "Tokyo"]
    seen("both calls, both ways")


def test_done_inside_an_answer(setup, name, seen):
    """An answer about server-sent events holds the text that ends a stream. Token by token it passes; in one chunk, as with
    --stream-interval or speculation, sglang_router takes it for the end."""
    router, _prefill, decode = setup
    text = "send data: [DONE] last, then close the connection and count to twenty"
    single = router.chat("Repeat exactly: " + text, stream=True, **PLAIN).joined()["content"]
    decode.fault(burst=8)
    try:
        burst = router.chat("Repeat exactly: " + text, stream=True, **PLAIN).joined()["content"]
    finally:
        decode.fault()
    seen("whole" if burst == text else "cut in a chunk of 8 tokens")
    assert single == text
    assert (burst == text) == (name == "smg")


def test_wrong_model_name(setup, name, seen):
    answer = setup[0].chat("What is 2*3?", model="no-such-model", **PLAIN)
    seen(str(answer.status))
    assert answer.status == (200 if name == "sglang_router" else 503)


def test_bad_requests_leave_it_healthy(setup, seen):
    router = setup[0]
    statuses = [support.call(router.port, "POST", "/v1/chat/completions", b"{").status, router.chat("word " * 70000, **PLAIN).status]
    assert all(400 <= status < 500 for status in statuses), statuses
    assert "391" in router.chat("What is 17*23?", **PLAIN).message["content"]
    seen("%d, %d" % tuple(statuses))


def test_64_parallel_streams(setup, seen):
    """Must."""
    router, prefill, decode = setup
    answers, errors = {}, []

    def ask(number):
        try:
            answers[number] = router.chat("What is %d*7?" % (100 + number), stream=True, **(THINK if number % 2 else PLAIN)).joined()
        except Exception as error:  # noqa: BLE001 - told by the assertion
            errors.append(repr(error))

    before = [half.metric("num_requests_total") for half in (prefill, decode)]
    began = time.monotonic()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [number for number in range(64) if str((100 + number) * 7) not in answers[number]["content"] or not answers[number]["done"]] == []
    assert [half.metric("num_requests_total") for half in (prefill, decode)] == [count + 64 for count in before]
    seen("64 right in %.1f s" % (time.monotonic() - began))


def test_cancelled_stream(setup, seen):
    router, _prefill, decode = setup
    decode.fault(chunk_delay=0.05)

    def running():
        return support.call(decode.port, "GET", "/v1/loads").json["loads"][0]["num_running_reqs"]

    body = json.dumps({"model": support.NAME, "messages": [{"role": "user", "content": "Count to 500"}], "stream": True, **PLAIN}).encode()
    client = socket.create_connection(("127.0.0.1", router.port))
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert client.recv(200).startswith(b"HTTP/1.1 200")
    assert running() == 1
    client.close()
    began = time.monotonic()
    while running() and time.monotonic() < began + 5:
        time.sleep(0.02)
    decode.fault()
    assert running() == 0
    seen("slot free after %.2f s" % (time.monotonic() - began))


def test_stream_cut_by_decode(setup, name, seen):
    """Decode drops the connection in mid-stream."""
    setup[2].fault(die_after=3, times=1)
    try:
        stream = setup[0].chat("Count to 50", stream=True, **PLAIN).joined()
        seen("error event" if "error" in stream else "ends early, no error")
        broken = "error" in stream or not stream["finish_reason"]
    except Exception as error:  # noqa: BLE001
        seen(type(error).__name__)
        broken = True
    assert broken
    assert "391" in setup[0].chat("What is 17*23?", **PLAIN).message["content"]


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_worker_killed_and_back(setup, half, seen, request):
    """Must: kill -9, then the first request after the worker is ready again is answered."""
    router, prefill, decode = setup
    worker = {"prefill": prefill, "decode": decode}[half]
    worker.stop(signal.SIGKILL)
    down = router.chat("What is 2*3?", timeout=60, **PLAIN)
    assert down.status >= 500
    worker.start()
    worker.wait_ready()
    began = time.monotonic()
    tries = 0
    while True:
        tries += 1
        answer = router.chat("What is 17*23?", **PLAIN)
        if answer.status == 200:
            break
        assert time.monotonic() < began + 15, answer.text
        time.sleep(0.2)
    assert "391" in answer.message["content"]
    request.node.originalname = "test_%s_killed_and_back" % half
    seen("%d in %.1f s; back: %d tries, %.1f s" % (down.status, down.seconds, tries, time.monotonic() - began))


def test_wrong_bootstrap_port(name, setup, tmp_path, seen):
    """The router hands the planned port to decode: a wrong one fails loudly."""
    _router, prefill, decode = setup
    other = support.RouterProcess(tmp_path, name, prefill, decode, bootstrap_port=support.free_port())
    try:
        other.wait_ready()
        answer = other.chat("What is 2*3?", timeout=60, **PLAIN)
        assert answer.status >= 500
        assert "KVTransferError" in answer.text
        seen("%d after %.0f s" % (answer.status, answer.seconds))
    finally:
        other.stop()


def test_workers_late(name, model, tmp_path, seen):
    """Must: the router is up first; the workers come after its first probes and are found."""
    prefill = decode = None
    ports = [support.free_port() for unused in range(3)]

    class Planned:
        def __init__(self, port, bootstrap_port=None):
            self.port, self.bootstrap_port = port, bootstrap_port

    router = support.RouterProcess(tmp_path, name, Planned(ports[0], ports[1]), Planned(ports[2]))
    try:
        router.wait_for(router.port, "/readiness", 30, status=503)
        assert router.chat("What is 2*3?", **PLAIN).status == 503
        time.sleep(4)
        prefill = support.EngineProcess(tmp_path, model, "prefill", port=ports[0], bootstrap_port=ports[1])
        assert support.call(router.port, "GET", "/readiness").status == 503  # one half is not enough
        decode = support.EngineProcess(tmp_path, model, "decode", port=ports[2])
        waited = router.wait_ready(30)
        assert "391" in router.chat("What is 17*23?", **PLAIN).message["content"]
        seen("found after %.1f s" % waited)
    finally:
        for process in (router, prefill, decode):
            if process is not None:
                process.stop()


def test_sigterm_during_a_stream(name, setup, tmp_path, seen):
    """Running streams end before the router does."""
    _router, prefill, decode = setup
    router = support.RouterProcess(tmp_path, name, prefill, decode)
    answers = []
    try:
        router.wait_ready()
        decode.fault(chunk_delay=0.02)
        thread = threading.Thread(target=lambda: answers.append(router.chat("Count to 50", stream=True, **PLAIN).joined()))
        thread.start()
        time.sleep(1)
        code = router.stop()
        thread.join()
        assert answers[0]["content"].endswith("49 50")
        assert code == 0
        seen("stream ended, exit 0")
    finally:
        decode.fault()
        router.stop()
