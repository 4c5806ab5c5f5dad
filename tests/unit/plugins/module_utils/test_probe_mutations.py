# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Good answers, spoiled: none may pass that should not, none may crash the judge.

Three ways: sixty named mutations, every cut of a stream, and hypothesis choosing what to spoil.
"""

from __future__ import annotations

import copy
import json
import pathlib
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from endpoint import Endpoint, Reply, call, sse, streamed, whole  # noqa: E402

from ansible_collections.blackwell.dsv4.plugins.module_utils import probes, verdict  # noqa: E402
from ansible_collections.blackwell.dsv4.plugins.module_utils.chat_client import Exchange  # noqa: E402

BAR = "\uff5c"
REASONING = "First 17 times 20 is 340, then 17 times 3 is 51."
CALLS = [call("get_weather", {"city": "Paris"}, 0), call("get_weather", {"city": "Tokyo"}, 1)]


def answer_of(body, **more):
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    exchange = Exchange("POST", "http://x/v1/chat/completions", 200, {}, data)
    for name, value in more.items():
        setattr(exchange, name, value)
    return exchange


def thinking(body, stream=False, **more):
    return verdict.judge_arithmetic(answer_of(body, **more), stream, 391, True)


def plain(body, stream=False, **more):
    return verdict.judge_arithmetic(answer_of(body, **more), stream, 391, False)


def tools(body, stream=False, **more):
    expected = [probes.Suite._city("Paris"), probes.Suite._city("Tokyo")]
    return verdict.judge_tools(answer_of(body, **more), stream, [probes.WEATHER], expected)


def good(kind):
    return {
        "thinking": lambda: whole("17 * 23 = 391", REASONING),
        "plain": lambda: whole("17 * 23 = 391"),
        "tools": lambda: whole("", None, copy.deepcopy(CALLS)),
        "thinking stream": lambda: streamed("17 * 23 = 391", REASONING),
        "plain stream": lambda: streamed("17 * 23 = 391", piece=2),
        "tools stream": lambda: streamed(None, None, copy.deepcopy(CALLS)),
    }[kind]()


JUDGES = {"thinking": thinking, "plain": plain, "tools": tools}


def judge(kind, body):
    name, dummy, stream = kind.partition(" ")
    if stream and isinstance(body, list):
        body = sse(body)
    return JUDGES[name](body, bool(stream))


@pytest.mark.parametrize("kind", ["thinking", "plain", "tools", "thinking stream", "plain stream", "tools stream"])
def test_the_good_answers_pass(kind):
    found = judge(kind, good(kind))
    assert (found.status, found.also) == ("pass", []), (found.reason, found.detail)


def message(body):
    return body["choices"][0]["message"]


def put(body, path, value):
    for key in path[:-1]:
        body = body[key]
    if value is DROP:
        del body[path[-1]]
    else:
        body[path[-1]] = value


DROP = object()
CHOICE = ("choices", 0)
MESSAGE = ("choices", 0, "message")
FIRST = MESSAGE + ("tool_calls", 0)


def text_of(chunks, key="content"):
    return [n for n, c in enumerate(chunks) if c["choices"] and c["choices"][0]["delta"].get(key)]


def with_delta(chunks, key, number, value):
    chunks[text_of(chunks, key)[number]]["choices"][0]["delta"][key] = value


def firsts(chunks):
    return [c["choices"][0] for c in chunks if c["choices"]]


def call_parts(chunks):
    return [part for choice in firsts(chunks) for part in choice["delta"].get("tool_calls") or []]


def cut_done(chunks):
    return sse(chunks, done=False)


def merge_two(chunks):
    """Two answers' chunks in one stream."""
    other = copy.deepcopy(chunks)
    for chunk in other:
        chunk["id"] = "c-2"
    mixed = [c for pair in zip(chunks, other) for c in pair]
    return sse(mixed)


# name: (kind, change in place or a new body, reasons that may come first)
MUTATIONS = {
    # drop
    "drop choices": ("plain", lambda b: put(b, ("choices",), DROP), {"no_choices"}),
    "drop message": ("plain", lambda b: put(b, MESSAGE, DROP), {"message_missing"}),
    "drop content": ("plain", lambda b: put(b, MESSAGE + ("content",), DROP), {"content_missing"}),
    "drop role": ("plain", lambda b: put(b, MESSAGE + ("role",), DROP), {"role_wrong"}),
    "drop finish_reason": ("plain", lambda b: put(b, CHOICE + ("finish_reason",), DROP), {"finish_reason_missing"}),
    "drop reasoning": ("thinking", lambda b: put(b, MESSAGE + ("reasoning_content",), DROP), {"no_reasoning"}),
    "drop a call": ("tools", lambda b: message(b)["tool_calls"].pop(), {"too_few_tool_calls"}),
    "drop all calls": ("tools", lambda b: put(b, MESSAGE + ("tool_calls",), DROP), {"no_tool_calls"}),
    "drop a call's id": ("tools", lambda b: put(b, FIRST + ("id",), DROP), {"tool_call_id_missing"}),
    "drop a call's name": ("tools", lambda b: put(b, FIRST + ("function", "name"), DROP), {"tool_name_missing"}),
    "drop arguments": ("tools", lambda b: put(b, FIRST + ("function", "arguments"), DROP), {"arguments_missing"}),
    "drop the number": ("plain", lambda b: put(b, MESSAGE + ("content",), "It is."), {"wrong_answer"}),
    "drop the finish chunk": ("plain stream", lambda c: c.pop(-2), {"finish_reason_missing"}),
    "drop a text chunk": ("plain stream", lambda c: c.pop(text_of(c)[-1]), {"wrong_answer"}),
    "drop an arguments chunk": ("tools stream", lambda c: c.pop(text_of(c, "tool_calls")[2]), {"arguments_invalid_json"}),
    "drop [DONE]": ("plain stream", cut_done, {"stream_incomplete"}),
    # rename
    "rename content": ("plain", lambda b: message(b).update(text=message(b).pop("content")), {"content_missing"}),
    "rename reasoning_content": ("thinking", lambda b: message(b).update(reasoning=message(b).pop("reasoning_content")), {"reasoning_field_name"}),
    "rename tool_calls": ("tools", lambda b: message(b).update(function_calls=message(b).pop("tool_calls")), {"no_tool_calls"}),
    "rename arguments": ("tools", lambda b: message(b)["tool_calls"][0]["function"].update(parameters=message(b)["tool_calls"][0]["function"].pop("arguments")),
                         {"arguments_missing"}),
    "rename a parameter": ("tools", lambda b: put(b, FIRST + ("function", "arguments"), '{"town": "Paris"}'), {"arguments_schema"}),
    "rename the tool": ("tools", lambda b: put(b, FIRST + ("function", "name"), "weather"), {"unknown_tool_name"}),
    "rename finish_reason's value": ("plain", lambda b: put(b, CHOICE + ("finish_reason",), "eos"), {"finish_reason_unknown"}),
    "rename delta": ("plain stream", lambda c: [x.update(message=x.pop("delta")) for x in firsts(c)] and None, {"delta_missing"}),
    # retype
    "choices an object": ("plain", lambda b: put(b, ("choices",), {"0": b["choices"][0]}), {"no_choices"}),
    "choice a string": ("plain", lambda b: put(b, CHOICE, "391"), {"choice_type"}),
    "message a string": ("plain", lambda b: put(b, MESSAGE, "391"), {"message_missing"}),
    "content a number": ("plain", lambda b: put(b, MESSAGE + ("content",), 391), {"content_type"}),
    "content a list": ("plain", lambda b: put(b, MESSAGE + ("content",), [{"type": "text", "text": "391"}]), {"content_type"}),
    "reasoning a list": ("thinking", lambda b: put(b, MESSAGE + ("reasoning_content",), [REASONING]), {"reasoning_type"}),
    "tool_calls an object": ("tools", lambda b: put(b, MESSAGE + ("tool_calls",), {"0": CALLS[0]}), {"tool_calls_type"}),
    "arguments an object": ("tools", lambda b: put(b, FIRST + ("function", "arguments"), {"city": "Paris"}), {"arguments_not_string"}),
    "arguments a list in a string": ("tools", lambda b: put(b, FIRST + ("function", "arguments"), '["Paris"]'), {"arguments_not_object"}),
    "city a number": ("tools", lambda b: put(b, FIRST + ("function", "arguments"), '{"city": 75}'), {"arguments_schema"}),
    "finish_reason a list": ("plain", lambda b: put(b, CHOICE + ("finish_reason",), ["stop"]), {"finish_reason_type"}),
    "usage a string": ("plain", lambda b: put(b, ("usage",), "20"), {"usage_type"}),
    "tokens a string": ("plain", lambda b: put(b, ("usage", "completion_tokens"), "9"), {"usage_type"}),
    "call's function a string": ("tools", lambda b: put(b, FIRST + ("function",), "get_weather"), {"tool_call_type"}),
    "delta's content an object": ("plain stream", lambda c: with_delta(c, "content", -1, {"text": "391"}), {"content_type"}),
    "delta's index a string": ("tools stream", lambda c: [x.update(index="0") for x in call_parts(c)] and None, {"tool_index_missing"}),
    # truncate
    "body cut": ("plain", lambda b: json.dumps(b).encode()[:-20], {"body_not_json"}),
    "number cut": ("plain", lambda b: put(b, MESSAGE + ("content",), "17 * 23 = 39"), {"wrong_answer"}),
    "finish length": ("plain", lambda b: put(b, CHOICE + ("finish_reason",), "length"), {"truncated"}),
    "arguments cut": ("tools", lambda b: put(b, FIRST + ("function", "arguments"), '{"city": "Pa'), {"arguments_invalid_json"}),
    "markup cut": ("plain", lambda b: put(b, MESSAGE + ("content",), "391 <%sDSM" % BAR), {"special_token_leak"}),
    "think tag cut": ("plain", lambda b: put(b, MESSAGE + ("content",), "391</thin"), {"think_tag_in_content"}),
    # reorder
    "text reordered": ("plain stream", lambda c: c.__setitem__(slice(None), c[:-4] + [c[-3], c[-4]] + c[-2:]), {"wrong_answer", "delta_after_finish"}),
    "finish before the text": ("plain stream", lambda c: c.insert(1, c.pop(-2)), {"delta_after_finish"}),
    "text after [DONE]": ("plain stream", lambda c: sse(c) + b'data: {"choices": []}\n\n', {"data_after_done"}),
    "one index for all calls": ("tools stream", lambda c: [x.update(index=0) for x in call_parts(c)] and None, {"parallel_calls_same_index"}),
    # leak
    "opening tag": ("thinking", lambda b: put(b, MESSAGE + ("content",), "<think>391"), {"think_tag_in_content"}),
    "closing tag in the thought": ("thinking", lambda b: put(b, MESSAGE + ("reasoning_content",), REASONING + "</think>"), {"think_tag_in_reasoning"}),
    "end token": ("plain", lambda b: put(b, MESSAGE + ("content",), "391<%send\u2581of\u2581sentence%s>" % (BAR, BAR)), {"special_token_leak"}),
    "token id": ("plain", lambda b: put(b, MESSAGE + ("content",), "<128822> 391"), {"token_id_in_text"}),
    "thought in content": ("thinking", lambda b: put(b, MESSAGE + ("content",), REASONING + " 391"), {"reasoning_in_content"}),
    "markup beside calls": ("tools", lambda b: put(b, MESSAGE + ("content",), "<%sDSML%stool_calls>" % (BAR, BAR)), {"tool_markup_in_content"}),
    "token in arguments": ("tools", lambda b: put(b, FIRST + ("function", "arguments"), '{"city": "Paris<%sDSML%s"}' % (BAR, BAR)), {"special_token_leak"}),
    "broken character": ("plain", lambda b: put(b, MESSAGE + ("content",), "391 \ufffd"), {"replacement_character"}),
    "thought without being asked": ("plain", lambda b: put(b, MESSAGE + ("reasoning_content",), REASONING), {"reasoning_when_disabled"}),
    # merge
    "two bodies": ("plain", lambda b: json.dumps(b).encode() * 2, {"body_not_json"}),
    "two calls in one": ("tools", lambda b: put(b, MESSAGE + ("tool_calls",), [dict(CALLS[0], function={
        "name": "get_weather", "arguments": '{"city": "Paris"}{"city": "Tokyo"}'})]), {"tool_calls_merged"}),
    "two streams": ("plain stream", merge_two, {"chunk_id_changes"}),
    "two ids equal": ("tools", lambda b: put(b, MESSAGE + ("tool_calls", 1, "id"), CALLS[0]["id"]), {"duplicate_tool_call_id"}),
    "another's number": ("plain", lambda b: put(b, MESSAGE + ("content",), "391 or 408"), {"wrong_answer"}),
    # and what else a server may say
    "error object in a 200": ("plain", lambda b: json.dumps({"error": {"message": "boom"}}).encode(), {"error_object"}),
    "error in the stream": ("plain stream", lambda c: sse(c[:3])[:-14] + b'data: {"error": {"message": "boom"}}\n\n', {"error_object"}),
    "no JSON event": ("plain stream", lambda c: c.insert(2, b"{'id': 1}"), {"event_not_json"}),
    "NaN": ("plain", lambda b: json.dumps(b).replace('"created": 1', '"created": NaN').encode(), {"body_not_json"}),
    "abort": ("tools", lambda b: put(b, CHOICE + ("finish_reason",), "abort"), {"aborted"}),
    "a page": ("plain", lambda b: b"<html>502 Bad Gateway</html>", {"body_not_json"}),
    "nothing": ("plain", lambda b: b"", {"body_not_json"}),
    "no UTF-8": ("plain", lambda b: json.dumps(b).encode().replace(b"391", b"39\xff1"), {"invalid_utf8"}),
}


def test_there_are_sixty():
    assert len(MUTATIONS) >= 60


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_no_mutation_passes(name):
    kind, change, reasons = MUTATIONS[name]
    body = good(kind)
    changed = change(body)
    found = judge(kind, changed if isinstance(changed, bytes) else body)
    assert found.status != "pass"
    assert found.reason in reasons, (found.reason, found.detail)


def harmless(body):
    """Changes that a client would not notice."""
    body["system_fingerprint"] = "fp"
    body.pop("created", None)
    body.pop("usage", None)
    message(body)["refusal"] = None
    body["choices"][0]["stop_reason"] = None
    return body


@pytest.mark.parametrize("kind", ["thinking", "plain", "tools"])
def test_harmless_changes_pass(kind):
    assert judge(kind, harmless(good(kind))).status == "pass"


@pytest.mark.parametrize("kind", ["thinking stream", "plain stream", "tools stream"])
def test_a_stream_cut_at_any_byte_never_passes(kind):
    """Once as a clean end of the body, once as a broken connection."""
    data = sse(good(kind))
    assert len(data) > 2000
    for length in range(len(data)):
        found = judge(kind, data[:length])
        assert found.status == "fail", (length, found.reason)
        assert found.reason in ("stream_incomplete", "invalid_utf8", "no_choices"), (length, found.reason)
        cut = JUDGES[kind.split()[0]](data[:length], True, error="body_cut", complete=False)
        assert (cut.status, cut.reason) == ("fail", "body_cut")
    assert judge(kind, data).status == "pass"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_line_ends_and_keep_alives_of_the_standard_are_understood(newline):
    data = sse(good("plain stream")).replace(b"data: ", b": ping\n\ndata: ", 3).replace(b"\n", newline)
    assert judge("plain stream", data).status == "pass"


def test_a_stream_cut_at_a_few_bytes_over_the_wire():
    """The same through sockets and chunked encoding."""
    data = sse(streamed("17*23 = 391"))
    for length in range(0, len(data), 97):
        with Endpoint(lambda r, n=length: Reply(body=data, kind="text/event-stream", chunked=True, cut=n) if r["number"] is not None else None) as endpoint:
            suite = probes.Suite(probes.Options(base_url=endpoint.url, model="deepseek-v4-flash", probes=["arithmetic"], streams="stream", repeat=1, timeout=5))
            check = suite.run()[-1]
        assert (check["status"], check["reason"]) == ("fail", "body_cut"), (length, check)


# ------------------------------------------------------------------- hypothesis spoils what it likes

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8)

#: Places without which, or with another type in which, the answer is not the one asked for.
VITAL = {
    "thinking": [("choices",), CHOICE, CHOICE + ("finish_reason",), MESSAGE, MESSAGE + ("role",), MESSAGE + ("content",), MESSAGE + ("reasoning_content",)],
    "plain": [("choices",), CHOICE, CHOICE + ("finish_reason",), MESSAGE, MESSAGE + ("role",), MESSAGE + ("content",)],
    "tools": [("choices",), CHOICE, CHOICE + ("finish_reason",), MESSAGE, MESSAGE + ("role",), MESSAGE + ("tool_calls",), FIRST, FIRST + ("id",),
              FIRST + ("function",), FIRST + ("function", "name"), FIRST + ("function", "arguments"), MESSAGE + ("tool_calls", 1)],
}


def original(body, path):
    for key in path:
        body = body[key]
    return body


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(sorted(VITAL)), data=st.data(), value=json_values, drop=st.booleans())
def test_a_vital_place_dropped_or_filled_with_anything_else_never_passes(kind, data, value, drop):
    path = data.draw(st.sampled_from(VITAL[kind]))
    body = good(kind)
    before = original(body, path)
    if not drop and type(value) is type(before):
        # Another text may be right by chance; another type never is.
        value = {"replaced": 1} if not isinstance(before, dict) else 7
    if path == FIRST + ("id",) and isinstance(value, str) and value:
        return
    put(body, path, DROP if drop else value)
    assert judge(kind, body).status != "pass"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(["thinking", "plain", "tools", "thinking stream", "plain stream", "tools stream"]), junk=st.binary(max_size=12), data=st.data())
def test_bytes_overwritten_anywhere_never_crash_the_judge(kind, junk, data):
    body = good(kind)
    raw = sse(body) if isinstance(body, list) else json.dumps(body).encode()
    at = data.draw(st.integers(0, len(raw)))
    found = judge(kind, raw[:at] + junk + raw[at + len(junk):])
    assert found.status in ("pass", "fail", "inconclusive") and found.reason


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=400), status=st.sampled_from([200, 200, 200, 204, 301, 400, 401, 404, 422, 429, 500, 502, 503]), stream=st.booleans())
def test_any_bytes_with_any_status_get_a_verdict_and_never_pass(raw, status, stream):
    for name in JUDGES:
        assert JUDGES[name](raw, stream, status=status).status != "pass"


@settings(max_examples=300, deadline=None)
@given(value=json_values, stream=st.booleans())
def test_any_json_gets_a_verdict_and_never_passes(value, stream):
    raw = json.dumps(value).encode()
    for name in JUDGES:
        assert JUDGES[name](b"data: " + raw + b"\n\ndata: [DONE]\n\n" if stream else raw, stream).status != "pass"


@settings(max_examples=300, deadline=None)
@given(order=st.permutations(range(8)), kind=st.sampled_from(["plain stream"]))
def test_text_in_another_order_passes_only_when_the_text_is_the_same(order, kind):
    chunks = streamed("17 * 23 = 391", piece=2)
    places = text_of(chunks)[:8]
    pieces = [chunks[n]["choices"][0]["delta"]["content"] for n in places]
    shuffled = [pieces[n] for n in order[:len(pieces)] if n < len(pieces)]
    if len(shuffled) < len(pieces):
        return
    for place, piece in zip(places, shuffled):
        chunks[place]["choices"][0]["delta"]["content"] = piece
    found = judge(kind, chunks)
    base = judge("plain", good("plain"))
    if found.status == "pass":
        problem = verdict.compare(base.answer, found.answer)
        assert (problem is None) == (found.answer.content == base.answer.content)


@settings(max_examples=200, deadline=None)
@given(key=st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40), around=st.text(max_size=30))
def test_a_key_is_always_taken_out(key, around):
    if verdict.is_placeholder(key):
        return
    redact = verdict.Redactor([key])
    assert key not in redact("%s Bearer %s %s" % (around.replace(key, ""), key, json.dumps({"api_key": key})))
