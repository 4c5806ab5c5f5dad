# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two halves: who waits for whom, and what a broken pair looks like."""
from __future__ import annotations

import http.client
import json
import os
import signal
import threading

import pytest
import rehearsal_engine as support

FAKE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}


def test_pair_answers(pair):
    answers = pair.chat("What is 17*23?", chat_template_kwargs={"thinking": True})
    assert "391" in answers["decode"].message["content"]
    assert answers["decode"].message["reasoning_content"]
    assert answers["prefill"].json["usage"]["completion_tokens"] == 1
    assert answers["prefill"].choice["finish_reason"] == "length"


def test_pair_streams(pair):
    answers = pair.chat("Repeat exactly: \U0001f600 done", stream=True)
    assert answers["decode"].joined()["content"] == "\U0001f600 done"
    assert answers["decode"].joined()["finish_reason"] == "stop"
    assert answers["prefill"].events[-1] == "[DONE]"


def test_both_counters_move(pair):
    before = [half.metric("num_requests_total") for half in (pair.prefill, pair.decode)]
    pair.chat("What is 2*3?")
    assert [half.metric("num_requests_total") for half in (pair.prefill, pair.decode)] == [count + 1 for count in before]


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_PD_14_a_half_alone_refuses_a_chat(pair, half):
    engine = getattr(pair, half)
    answer = engine.chat("What is 2*3?")
    assert answer.status == 400
    assert "without bootstrap room id" in answer.json["message"]
    stream = engine.chat("What is 2*3?", stream=True)
    assert "bootstrap room" in stream.joined()["error"]["message"]
    assert engine.chat("What is 2*3?", **FAKE).status == 200  # the fake bootstrap of health checks and warm-ups
    assert support.call(engine.port, "GET", "/health").status == 200


def test_decode_waits_for_its_room(pair):
    answers = pair.chat("What is 2*3?", to_prefill=False)
    assert answers["decode"].status == 500
    assert "timed out after 2.0s in KVPoll.WaitingForInput" in answers["decode"].json["message"]
    assert answers["decode"].seconds >= 2


def test_wrong_bootstrap_port_is_no_silent_pass(pair):
    answers = pair.chat("What is 2*3?", bootstrap_port=support.free_port())
    assert answers["decode"].status == 500
    assert answers["prefill"].status == 500
    assert "Bootstrapping" in answers["prefill"].json["message"]


def test_PD_08_prefill_fails_without_telling(pair):
    pair.prefill.fault(prefill_error=503)
    answers = pair.chat("What is 2*3?")
    assert answers["prefill"].status == 503
    assert answers["decode"].status == 500
    assert pair.decode.metric("num_transfer_failed_reqs_total") >= 1


def test_PD_06_abort_is_a_200(pair):
    pair.decode.fault(abort=True)
    choice = pair.chat("What is 2*3?")["decode"].choice
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "")


def test_bootstrap_server(pair):
    port = pair.prefill.bootstrap_port
    assert support.call(port, "GET", "/health").text == "OK"
    info = support.call(port, "GET", "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1").json
    assert (info["attn_tp_size"], info["page_size"], info["kv_cache_dtype"]) == (4, 256, "fp8_e4m3")


def test_decode_opens_no_bootstrap_port(pair):
    with pytest.raises(OSError):
        support.call(pair.decode.bootstrap_port, "GET", "/health")


def test_log_of_a_half(pair):
    log = pair.prefill.log()
    for line in ("Start of pd disaggregation warmup", "End of disaggregation warmup", "max_total_num_tokens=", "fired up and ready to roll!"):
        assert line in log


MTP = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]


@pytest.mark.parametrize(("extra", "environment", "seen"), [
    pytest.param(MTP, {}, "speculative_algorithm differs", id="speculation-on-one-half"),
    pytest.param([], {"SGLANG_OPT_SM120_DIRECT_SWA_KV": "1"}, "!!!!", id="cache-layout-on-one-half"),
    pytest.param(["--tool-call-parser", "deepseekv32", "--reasoning-parser", "deepseek-v3"], {}, "!!!!", id="prompt-of-another-generation"),
])
def test_halves_that_differ(engines, pair, extra, environment, seen):
    decode = engines("decode", *extra, environment={"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "3", **environment})
    answer = type(pair)(pair.prefill, decode).chat("What is 2*3?", chat_template_kwargs={"thinking": False}, tools=[
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}])["decode"]
    assert seen in answer.text


def test_kv_dtype_that_differs_ends_decode(engines, pair):
    decode = engines("decode", "--kv-cache-dtype", "fp8_e5m2")
    with pytest.raises((OSError, http.client.HTTPException)):
        type(pair)(pair.prefill, decode).chat("What is 2*3?")
    assert decode.popen.wait(10) != 0
    assert "KV cache dtype mismatch" in decode.log()


def test_sigterm_lets_a_stream_end(engines):
    engine = engines(settings={"token_seconds": 0.01})
    answers = []
    thread = threading.Thread(target=lambda: answers.append(engine.chat("Count to 100", stream=True)))
    thread.start()
    while not json.loads(support.call(engine.port, "GET", "/v1/loads").text)["loads"][0]["num_running_reqs"]:
        pass
    assert engine.stop() == 0
    thread.join()
    assert answers[0].joined()["content"].endswith("99 100")
    assert "Gracefully exiting" in engine.log()


def test_sigterm_to_the_whole_group_cuts_everything(engines):
    """What KillMode=control-group does: the schedulers die first, and the watchdog takes that for a crash."""
    engine = engines(settings={"token_seconds": 0.02, "drain_delay_seconds": 3})
    outcome = []

    def ask():
        try:
            outcome.append(engine.chat("Count to 400", stream=True).joined()["finish_reason"])
        except (OSError, http.client.HTTPException) as error:
            outcome.append(type(error).__name__)

    thread = threading.Thread(target=ask)
    thread.start()
    while not json.loads(support.call(engine.port, "GET", "/v1/loads").text)["loads"][0]["num_running_reqs"]:
        pass
    os.killpg(engine.pid, signal.SIGTERM)
    assert engine.popen.wait(10) == -signal.SIGKILL
    thread.join()
    assert outcome == ["IncompleteRead"]
    assert "crashed" in engine.log()
