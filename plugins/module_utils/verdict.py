# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From raw bytes to a verdict: pure functions, no network, no Ansible.

The first cause wins. Everything that is wrong with an answer is collected as a problem of a stage; the
problem of the earliest stage names the verdict and the others are listed beside it, so an aborted answer
is never called a wrong number and a truncated one never a leak.
"""

from __future__ import annotations

import json
import re

from ansible_collections.blackwell.dsv4.plugins.module_utils.chat_client import parse_sse

PASS, FAIL, FLAKY, INCONCLUSIVE, SKIPPED = "pass", "fail", "flaky", "inconclusive", "skipped"

(TRANSPORT, STATUS, BODY, CHOICES, ABORT, GARBAGE, LENGTH, SHAPE, LEAK, VALUE, COMPARE) = range(11)

#: Reasons that say something about the question or the moment and nothing about the deployment.
INCONCLUSIVE_REASONS = frozenset((
    "truncated", "request_rejected", "probe_aimed_at_half", "model_name_mismatch", "rate_limited",
    "key_missing", "waiting",
))

FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "abort")

EVIDENCE_LIMIT = 600

_BAR = "[\uff5c|\u2502]"
#: A bar directly before the name is enough for DSML: an opened and never closed marker is a leak too.
_DSML = re.compile(r"<?\s*/?\s*%s\s*DSML\s*(?:%s|\b)\s*(\w*)" % (_BAR, _BAR), re.IGNORECASE)
_V31 = re.compile(r"<?\s*%s\s*(?:/\s*)?tool[\u2581_ ](?:calls?|sep|outputs?)\b[^<>\n]{0,40}>?" % _BAR, re.IGNORECASE)
_XML_CALL = re.compile(r"</?\s*(?:tool_calls?|function_calls?|invoke\s+name\s*=|parameter\s+name\s*=|function\s*=)", re.IGNORECASE)
_BRACKET_CALL = re.compile(r"\[/?TOOL_CALLS?\]")
_THINK = re.compile(r"<\s*/?\s*think(?:ing)?\b", re.IGNORECASE)
_SPECIAL = re.compile(r"<\s*[\uff5c|]\s*[^<>\uff5c|]{1,40}\s*[\uff5c|]\s*>")
_TOKEN_ID = re.compile(r"(?<!\d)12882[12](?!\d)")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.,])([-\u2212]?)(\d{1,3}(?:(?:,|\u00a0|\u202f|\{,\}|\\,)\d{3})+|\d+)(\.\d+)?(?![A-Za-z0-9_])")

_HINTS = {
    "connection_refused": "nothing listens there: systemctl status {units}; journalctl -u {router_unit}",
    "connection_reset": "the server dropped the connection: journalctl -u {router_unit} -u {unit}",
    "connection_closed": "the server closed the connection without an answer: journalctl -u {router_unit} -u {unit}",
    "connection_failed": "check address, route and firewall of the base_url",
    "name_resolution": "the host name of base_url does not resolve on the target",
    "tls_error": "check ca_path and the proxy's certificate",
    "http_protocol_error": "the port does not speak HTTP/1.1: is base_url the router's port?",
    "timeout_no_bytes": "accepted and never answered, typically a KV transfer that never arrives: journalctl -u {unit} "
                        "(KVPoll, bootstrap, WaitingForInput); compare SGLANG_DISAGGREGATION_WAITING_TIMEOUT with the probe's timeout",
    "timeout": "the answer began and did not end in time: journalctl -u {unit}; raise timeout if the host is only slow",
    "body_cut": "the answer broke off: journalctl -u {unit}; a worker that died shows in systemctl show -p NRestarts {unit}",
    "stream_incomplete": "the stream ended without its [DONE]: journalctl -u {unit}; sglang-router 0.3.2 also ends a stream early "
                         "when an answer holds the text of the end marker",
    "body_too_large": "the server sends without end: journalctl -u {unit}",
    "unauthorized": "the key that was sent is refused: mend verification_api_key or the file that verification_api_key_file names; "
                    "router and workers must have the same key",
    "key_missing": "the endpoint wants a key: verification_api_key or verification_api_key_file",
    "request_rejected": "the probe's own request was refused; the server's message says why",
    "model_name_mismatch": "ask for the served name: compare GET /v1/models with --served-model-name on {unit}",
    "rate_limited": "the endpoint is busy: run again, or look at --max-concurrent-requests of {router_unit}",
    "probe_aimed_at_half": "a half of the pair cannot answer alone: aim base_url at the router",
    "not_found": "no chat route at this address: is base_url the router's port?",
    "service_unavailable": "the router has no ready pair: GET /readiness and /workers on {router_unit}; journalctl -u {unit}",
    "server_error": "journalctl -u {router_unit} -u {unit} around this time",
    "redirected": "something stands before the endpoint: aim base_url at the router itself",
    "body_not_json": "the answer is no JSON: is a proxy's error page in the way? journalctl -u {router_unit}",
    "event_not_json": "a stream event is no JSON: journalctl -u {router_unit}",
    "invalid_utf8": "bytes of a character were lost or split: look at what stands between client and {unit}",
    "error_object": "the server reported an error inside a 200: journalctl -u {unit}",
    "no_choices": "an answer without choices: journalctl -u {unit}",
    "aborted": "the request was aborted, in a pair mostly by the KV transfer: journalctl -u {unit} (KVPoll, transfer, bootstrap)",
    "garbage_output": "wrong data reaches the model: check peer-to-peer copies and the IOMMU mode (preflight's copy test), and the "
                      "kernels in use (DSV4_SM120_KERNELS on {unit})",
    "truncated": "max_tokens was too small for this answer: raise max_tokens of the probe",
    "reasoning_field_name": "clients read reasoning_content: this engine names the field otherwise; check its version",
    "content_null_reasoning_filled": "the reasoning parser does not match the model: --reasoning-parser {reasoning_parser} on {unit}",
    "answer_only_in_reasoning": "the closing think tag was not seen: --reasoning-parser {reasoning_parser} on {unit}",
    "reasoning_in_content": "--reasoning-parser {reasoning_parser} on {unit}",
    "think_tag_in_content": "--reasoning-parser {reasoning_parser} on {unit}; look at journalctl -u {unit}",
    "think_tag_in_reasoning": "--reasoning-parser {reasoning_parser} on {unit}; look at journalctl -u {unit}",
    "special_token_leak": "--reasoning-parser {reasoning_parser} and --tool-call-parser {tool_call_parser} on {unit}",
    "token_id_in_text": "token ids reach the text: skip_special_tokens and the parsers on {unit}",
    "replacement_character": "a character was split between chunks: look at the detokenizer of {unit} and at proxies",
    "control_character": "raw control bytes in the text: look at the detokenizer of {unit}",
    "tool_markup_in_content": "the tool-call parser does not match the template: --tool-call-parser {tool_call_parser} on {unit}",
    "tool_call_as_text": "the model fell out of the tool channel: look at sampling settings and the prompt; not the parser",
    "no_tool_calls": "no call came: --tool-call-parser {tool_call_parser} on {unit}, and the model's effort setting",
    "too_few_tool_calls": "parallel calls were lost: --tool-call-parser {tool_call_parser} on {unit}",
    "too_many_tool_calls": "more calls than asked for: --tool-call-parser {tool_call_parser} on {unit}",
    "parallel_calls_same_index": "clients merge calls by index: the engine's stream numbers them wrongly; check its version on {unit}",
    "tool_calls_merged": "two calls were glued together: --tool-call-parser {tool_call_parser} on {unit}",
    "arguments_not_string": "a layer decodes the arguments too early: compare {unit} directly with the router's answer",
    "arguments_invalid_json": "--tool-call-parser {tool_call_parser} on {unit}",
    "arguments_wrapped": "the history was rendered with object arguments: check the template of {unit}",
    "finish_reason_wrong": "agents stop on this: --tool-call-parser {tool_call_parser} on {unit}; check the engine's version",
    "no_reasoning": "thinking was asked for and did not happen: --reasoning-parser {reasoning_parser} with --tool-call-parser "
                    "{tool_call_parser} on {unit}, the template's switch (chat_template_kwargs), and whether the router keeps the field",
    "reasoning_when_disabled": "thinking must be opt-in: --default-chat-template-kwargs and SGLANG_DEFAULT_THINKING on {unit}; smg turns it on by itself",
    "wrong_answer": "run again; if it stays, look at kernels (DSV4_SM120_KERNELS), peer-to-peer copies and the staged model",
    "empty_content": "an answer without text: --reasoning-parser {reasoning_parser} on {unit}",
    "cross_talk": "an answer belongs to another request: stop serving; journalctl -u {unit}",
    "crash_under_concurrency": "the engine dies under load: journalctl -u {unit} (illegal memory access, Scheduler hit an exception); try speculation none",
    "errors_under_concurrency": "some of the parallel requests failed: journalctl -u {unit} -u {router_unit}",
    "stream_differs": "streamed and whole answers disagree: check the streaming parsers of {unit}",
    "stream_lost_text": "the stream lost text on its way: look at what stands between client and {unit}",
    "stream_reordered": "the stream's pieces came in another order: look at what stands between client and {unit}",
    "needle_missed": "long prompts lose text: check context length, sparse attention kernels (DSV4_SM120_KERNELS) and KV transfer on {unit}",
    "structured_invalid": "the grammar backend did not hold the schema: --grammar-backend on {unit}",
    "text_changed": "characters changed on their way: look at the detokenizer of {unit}",
    "slot_not_freed": "a client that left still holds its slot: journalctl -u {unit}; sglang:num_running_reqs of the worker",
    "unknown_model_unexpected": "compare with the router's table in the README",
    "not_refused": "the endpoint accepted what it should refuse: journalctl -u {unit}",
    "auth_open": "the endpoint answers without a key: --api-key on {router_unit}",
    "unhealthy_after": "the endpoint did not survive the probe: journalctl -u {unit} -u {router_unit}",
    "waiting": "a unit is loading, or does not run: systemctl status {units}; run again when all are ready",
    "model_not_listed": "another release or model serves: GET /v1/models, systemctl status {units}",
}


class Hints:
    """Names of units and flags that hints speak of."""

    def __init__(self, unit="sglang-dsv4-decode", router_unit="sglang-dsv4-router", units=None,
                 reasoning_parser="deepseek-v4", tool_call_parser="deepseekv4"):
        self.names = {
            "unit": unit,
            "router_unit": router_unit,
            "units": units or "sglang-dsv4-prefill sglang-dsv4-decode sglang-dsv4-router",
            # With the variable that sets it.
            "reasoning_parser": reasoning_parser + " (dsv4_topology.reasoning_parser)",
            "tool_call_parser": tool_call_parser + " (dsv4_topology.tool_call_parser)",
        }

    def of(self, reason):
        text = _HINTS.get(reason, "journalctl -u {unit} around this time")
        return text.format(**self.names)


class Problem:
    """One thing that is wrong, with the stage in which it is seen."""

    __slots__ = ("stage", "reason", "detail")

    def __init__(self, stage, reason, detail=""):
        self.stage = stage
        self.reason = reason
        self.detail = detail


class Answer:
    """What a client would have read, and everything odd about the way it came."""

    def __init__(self, stream=False):
        self.stream = stream
        self.content = None
        self.reasoning = None
        self.reasoning_field = None
        self.calls = []
        self.finish = None
        self.model = None
        self.usage = None
        self.chunks = 0
        self.first_token = None
        self.problems = []
        self.notes = []

    def problem(self, stage, reason, detail=""):
        self.problems.append(Problem(stage, reason, detail))

    @property
    def tokens(self):
        return (self.usage or {}).get("completion_tokens")


class Verdict:
    """The outcome of one attempt."""

    __slots__ = ("status", "reason", "detail", "also", "notes", "answer", "excerpt")

    def __init__(self, status, reason, detail="", also=(), notes=(), answer=None, excerpt=""):
        self.status = status
        self.reason = reason
        self.detail = detail
        self.also = list(also)
        self.notes = list(notes)
        self.answer = answer
        self.excerpt = excerpt


def clip(text, limit=EVIDENCE_LIMIT):
    """One line, bounded, with the middle left out."""
    text = re.sub(r"\s+", " ", text).strip()
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return text[:half] + " ... " + text[-half:]


class Redactor:
    """Takes the key, and whatever looks like one, out of a text."""

    _PATTERNS = (
        (re.compile(r"(?i)(bearer\s+)[\w.~+/=-]{4,}"), r"\1<redacted>"),
        (re.compile(r"(?i)((?:x-api-key|api[_-]?key|authorization|token|password|secret)[\"']?\s*[:=]\s*[\"']?)(?!bearer\b)[^\s\"',;}]{4,}"), r"\1<redacted>"),
        (re.compile(r"\b(?:sk|hf|ghp|glpat|xox[bp])[-_][A-Za-z0-9_-]{8,}"), "<redacted>"),
        (re.compile(r"(--(?:admin-)?api-key[= ])\S+"), r"\1<redacted>"),
    )

    def __init__(self, secrets=()):
        self.secrets = sorted((s for s in secrets if s and not is_placeholder(s)), key=len, reverse=True)

    def __call__(self, text):
        for secret in self.secrets:
            text = text.replace(secret, "<redacted>")
            escaped = json.dumps(secret)[1:-1]
            if escaped != secret:
                text = text.replace(escaped, "<redacted>")
        for pattern, by in self._PATTERNS:
            text = pattern.sub(by, text)
        return text


PLACEHOLDER_KEYS = frozenset((
    "empty", "none", "null", "dummy", "test", "changed", "changeme", "secret", "password", "key", "apikey",
    "api_key", "api-key", "token", "default", "example", "deepseek", "sglang", "no-key", "nokey", "unused",
))


def is_placeholder(key):
    """True for keys that protect nothing, and whose masking would censor ordinary words and numbers."""
    return len(key) < 8 or key.lower() in PLACEHOLDER_KEYS or key.isdigit() or len(set(key)) < 4


# --------------------------------------------------------------------------- reading an exchange


def _excerpt(exchange):
    return exchange.body[:4096].decode("utf-8", "replace")


def _message_of_error(document):
    """The human sentence in one of the error shapes of SGLang and the routers."""
    if isinstance(document, dict):
        error = document.get("error", document)
        if isinstance(error, dict):
            for key in ("message", "detail", "error", "code", "type"):
                if error.get(key):
                    return str(error[key])
            return json.dumps(error, ensure_ascii=False)
        return str(error)
    return str(document)


def status_problem(exchange, with_key=True):
    """The problem that an HTTP status is, or None for 200."""
    status = exchange.status
    if status == 200:
        return None
    text = _excerpt(exchange)
    document = exchange.json()
    if document is None and text.startswith("data:"):
        text = text[5:].strip()
    message = _message_of_error(document) if document is not None else text
    detail = "HTTP %s: %s" % (status, clip(message, 300) or "(empty body)")
    lowered = message.lower()
    if "bootstrap room" in lowered or "boostrap room" in lowered or "disaggregated request" in lowered:
        return Problem(STATUS, "probe_aimed_at_half", detail)
    if status in (401, 403):
        return Problem(STATUS, "unauthorized" if with_key else "key_missing", detail)
    if status in (400, 404) and re.search(r"model\b.{0,80}(?:not (?:found|exist|served|available)|does not exist|unknown|unsupported)"
                                          r"|unknown model|model_not_found|no such model", lowered):
        return Problem(STATUS, "model_name_mismatch", detail)
    if status == 404:
        return Problem(STATUS, "not_found", detail)
    if status in (408, 429):
        return Problem(STATUS, "rate_limited", detail)
    if 400 <= status < 500:
        return Problem(STATUS, "request_rejected", detail)
    if status == 503:
        return Problem(STATUS, "service_unavailable", detail)
    if 300 <= status < 400:
        return Problem(STATUS, "redirected", detail)
    return Problem(STATUS, "server_error", detail)


def read_exchange(exchange, stream, with_key=True):
    """An Answer, with the problems found on the way. When nothing could be read of it its only problem
    says why, and ``content`` stays None."""
    answer = Answer(stream)
    if exchange.error and exchange.status is None:
        answer.problem(TRANSPORT, exchange.error, exchange.error_text)
        return answer
    if exchange.status is not None and exchange.status != 200 and not (exchange.error and not exchange.body):
        found = status_problem(exchange, with_key)
        if found:
            answer.problems.append(found)
            return answer
    if exchange.error or not exchange.complete:
        answer.problem(TRANSPORT, exchange.error or "body_cut", exchange.error_text or "the body is not complete")
        return answer
    try:
        if stream:
            _read_stream(answer, exchange)
        else:
            _read_whole(answer, exchange)
    except UnicodeDecodeError as exc:
        answer.problems = [Problem(BODY, "invalid_utf8", "byte %d: %s" % (exc.start, exc.reason))]
    except RecursionError:
        answer.problems = [Problem(BODY, "body_not_json", "nested too deeply")]
    return answer


def _strict_json(text):
    def refuse(name):
        raise ValueError("%s is no JSON" % name)

    return json.loads(text, parse_constant=refuse)


def _error_in(document):
    if isinstance(document, dict):
        if document.get("error") not in (None, False, ""):
            return _message_of_error(document)
        if document.get("object") == "error":
            return _message_of_error(document)
    return None


def _head(answer, document, wanted_object):
    """Fields beside the choices, equal for whole answers and chunks."""
    if document.get("object") not in (None, wanted_object):
        answer.problem(SHAPE, "object_wrong", "object is %s" % clip(json.dumps(document["object"]), 60))
    for key in ("id", "model"):
        if document.get(key) is not None and not isinstance(document[key], str):
            answer.problem(SHAPE, "%s_type" % key, "%s is a %s" % (key, type(document[key]).__name__))
    usage = document.get("usage")
    if usage is not None:
        if not isinstance(usage, dict):
            answer.problem(SHAPE, "usage_type", "usage is a %s" % type(usage).__name__)
        else:
            for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
                value = usage.get(key)
                if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                    answer.problem(SHAPE, "usage_type", "usage.%s is %s" % (key, clip(json.dumps(value), 40)))
                    break
            else:
                answer.usage = usage
    if isinstance(document.get("model"), str):
        answer.model = document["model"]


def _text_field(answer, holder, key, reason):
    value = holder.get(key)
    if value is None or isinstance(value, str):
        return value
    answer.problem(SHAPE, reason, "%s is a %s" % (key, type(value).__name__))
    return None


def _join(old, new):
    if new is None:
        return old
    return new if old is None else old + new


def _reasoning(answer, both):
    """Settle the two names that engines use for the thought text."""
    wanted, other = both
    if other is not None and other.strip():
        if wanted is None or not wanted.strip():
            answer.reasoning, answer.reasoning_field = other, "reasoning"
            return
        if other != wanted:
            answer.problem(SHAPE, "reasoning_fields_differ", "reasoning and reasoning_content hold different texts")
        else:
            answer.notes.append("reasoning is repeated in the field `reasoning`")
    answer.reasoning = wanted
    if wanted is not None:
        answer.reasoning_field = "reasoning_content"


def _finish(answer, value):
    if value is None:
        return
    if not isinstance(value, str):
        answer.problem(SHAPE, "finish_reason_type", "finish_reason is a %s" % type(value).__name__)
        return
    if answer.finish is not None and answer.finish != value:
        answer.problem(SHAPE, "finish_reason_twice", "%s, then %s" % (answer.finish, clip(value, 40)))
    answer.finish = value
    if value == "abort":
        answer.problem(ABORT, "aborted", "finish_reason abort")
    elif value == "length":
        answer.problem(LENGTH, "truncated", "finish_reason length")
    elif value not in FINISH_REASONS:
        answer.problem(SHAPE, "finish_reason_unknown", "finish_reason %s" % clip(value, 40))


def _read_whole(answer, exchange):
    text = exchange.body.decode("utf-8")
    try:
        document = _strict_json(text)
    except ValueError as exc:
        answer.problem(BODY, "body_not_json", str(exc))
        return
    if not isinstance(document, dict):
        answer.problem(BODY, "body_not_json", "the body is a JSON %s" % type(document).__name__)
        return
    error = _error_in(document)
    if error is not None:
        answer.problem(BODY, "error_object", clip(error, 300))
        return
    choices = document.get("choices")
    if not isinstance(choices, list) or not choices:
        answer.problem(CHOICES, "no_choices", "choices is %s" % clip(json.dumps(choices), 60))
        return
    _head(answer, document, "chat.completion")
    if len(choices) > 1:
        answer.problem(SHAPE, "extra_choices", "%d choices for n = 1" % len(choices))
    choice = choices[0]
    if not isinstance(choice, dict):
        answer.problem(SHAPE, "choice_type", "a choice is a %s" % type(choice).__name__)
        return
    _choice_index(answer, choice)
    _finish(answer, choice.get("finish_reason"))
    if answer.finish is None and not any(p.reason == "finish_reason_type" for p in answer.problems):
        answer.problem(SHAPE, "finish_reason_missing", "finish_reason is null or absent")
    message = choice.get("message")
    if not isinstance(message, dict):
        answer.problem(SHAPE, "message_missing", "message is %s" % clip(json.dumps(message), 60))
        return
    if message.get("role") != "assistant":
        answer.problem(SHAPE, "role_wrong", "role is %s" % clip(json.dumps(message.get("role")), 40))
    if "content" not in message:
        answer.problem(SHAPE, "content_missing", "message has no content, only %s" % clip(", ".join(sorted(message)), 120))
    answer.content = _text_field(answer, message, "content", "content_type")
    _reasoning(answer, (_text_field(answer, message, "reasoning_content", "reasoning_type"),
                        _text_field(answer, message, "reasoning", "reasoning_type")))
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        answer.problem(SHAPE, "tool_calls_type", "tool_calls is a %s" % type(calls).__name__)
        calls = None
    for position, call in enumerate(calls or []):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            answer.problem(SHAPE, "tool_call_type", "tool_calls[%d] is no call object" % position)
            continue
        function = call["function"]
        if call.get("type") not in (None, "function"):
            answer.problem(SHAPE, "tool_call_type", "tool_calls[%d].type is %s" % (position, clip(json.dumps(call.get("type")), 40)))
        answer.calls.append({
            "index": position, "id": call.get("id"), "name": function.get("name"),
            "arguments": function.get("arguments"), "has_arguments": "arguments" in function,
        })
    _check_calls(answer)


def _choice_index(answer, choice):
    index = choice.get("index", 0)
    if isinstance(index, bool) or index != 0:
        answer.problem(SHAPE, "choice_index", "index is %s" % clip(json.dumps(index), 40))


def _read_stream(answer, exchange):
    events, rest = parse_sse(exchange.body)
    done = False
    seen_id = None
    role = None
    content = wanted = other = None
    calls, order = {}, []
    chunks = 0
    for dummy, data, offset in events:
        if done:
            answer.problem(SHAPE, "data_after_done", clip(data, 120))
            break
        if data == "[DONE]":
            done = True
            continue
        try:
            chunk = _strict_json(data)
        except ValueError as exc:
            answer.problem(BODY, "event_not_json", "event %d: %s" % (chunks + 1, exc))
            return
        chunks += 1
        if not isinstance(chunk, dict):
            answer.problem(BODY, "event_not_json", "event %d is a JSON %s" % (chunks, type(chunk).__name__))
            return
        error = _error_in(chunk)
        if error is not None:
            answer.problem(BODY, "error_object", "in the stream: " + clip(error, 300))
            return
        _head(answer, chunk, "chat.completion.chunk")
        if isinstance(chunk.get("id"), str):
            if seen_id is not None and chunk["id"] != seen_id:
                answer.problem(SHAPE, "chunk_id_changes", "%s, then %s" % (clip(seen_id, 60), clip(chunk["id"], 60)))
            seen_id = chunk["id"]
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            answer.problem(CHOICES, "no_choices", "event %d: choices is %s" % (chunks, clip(json.dumps(choices), 60)))
            return
        if not choices:
            if chunk.get("usage") is None:
                answer.notes.append("a chunk with neither choices nor usage")
            continue
        if len(choices) > 1:
            answer.problem(SHAPE, "extra_choices", "%d choices in a chunk" % len(choices))
        choice = choices[0]
        if not isinstance(choice, dict):
            answer.problem(SHAPE, "choice_type", "a choice is a %s" % type(choice).__name__)
            return
        _choice_index(answer, choice)
        delta = choice.get("delta")
        if delta is None:
            answer.problem(SHAPE, "delta_missing", "event %d has no delta" % chunks)
            delta = {}
        if not isinstance(delta, dict):
            answer.problem(SHAPE, "delta_missing", "event %d: delta is a %s" % (chunks, type(delta).__name__))
            return
        if delta.get("role") is not None:
            if delta["role"] != "assistant":
                answer.problem(SHAPE, "role_wrong", "role is %s" % clip(json.dumps(delta["role"]), 40))
            role = delta["role"]
        pieces = (
            _text_field(answer, delta, "content", "content_type"),
            _text_field(answer, delta, "reasoning_content", "reasoning_type"),
            _text_field(answer, delta, "reasoning", "reasoning_type"),
        )
        parts = delta.get("tool_calls")
        if parts is not None and not isinstance(parts, list):
            answer.problem(SHAPE, "tool_calls_type", "tool_calls is a %s" % type(parts).__name__)
            parts = None
        if answer.finish is not None and (any(pieces) or parts):
            answer.problem(SHAPE, "delta_after_finish", "text or calls after finish_reason %s" % answer.finish)
        if (any(pieces) or parts) and answer.first_token is None:
            answer.first_token = exchange.time_of(offset)
        content, wanted, other = _join(content, pieces[0]), _join(wanted, pieces[1]), _join(other, pieces[2])
        for part in parts or []:
            _merge_call(answer, calls, order, part)
        _finish(answer, choice.get("finish_reason"))
    answer.chunks = chunks
    if not done or rest.strip():
        if done:
            answer.problem(SHAPE, "data_after_done", clip(rest, 120))
        else:
            answer.problem(TRANSPORT, "stream_incomplete", "%d events, then the end without [DONE]" % chunks)
    if not chunks and done:
        answer.problem(CHOICES, "no_choices", "only [DONE]")
    answer.content = content
    _reasoning(answer, (wanted, other))
    answer.calls = [calls[key] for key in order]
    if chunks and answer.finish is None and done:
        answer.problem(SHAPE, "finish_reason_missing", "no chunk has a finish_reason")
    if chunks and role is None:
        answer.problem(SHAPE, "role_wrong", "no chunk names the role")
    _check_calls(answer)
    numbers = sorted(set(call["index"] for call in answer.calls if isinstance(call["index"], int)))
    if numbers and numbers != list(range(len(numbers))):
        answer.problem(SHAPE, "tool_index_gap", "indices %s" % numbers)


def _merge_call(answer, calls, order, part):
    if not isinstance(part, dict):
        answer.problem(SHAPE, "tool_call_type", "a part of tool_calls is a %s" % type(part).__name__)
        return
    index = part.get("index")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        answer.problem(SHAPE, "tool_index_missing", "index is %s" % clip(json.dumps(index), 40))
        index = -1
    function = part.get("function")
    if function is None:
        function = {}
    if not isinstance(function, dict):
        answer.problem(SHAPE, "tool_call_type", "function is a %s" % type(function).__name__)
        return
    if part.get("type") not in (None, "function"):
        answer.problem(SHAPE, "tool_call_type", "type is %s" % clip(json.dumps(part.get("type")), 40))
    identity = part.get("id")
    key = next((k for k in reversed(order) if calls[k]["index"] == index), None)
    if key is not None and identity and calls[key]["id"] and identity != calls[key]["id"]:
        # Two calls under one number. Kept apart so that the message can say what was meant.
        answer.problem(SHAPE, "parallel_calls_same_index",
                       "index %s carries the ids %s and %s" % (index, clip(str(calls[key]["id"]), 40), clip(str(identity), 40)))
        key = None
    if key is None:
        key = len(order)
        order.append(key)
        calls[key] = {"index": index, "id": identity, "name": None, "arguments": None, "has_arguments": False}
    call = calls[key]
    if call["id"] is None and identity:
        call["id"] = identity
    name = function.get("name")
    if name is not None:
        if isinstance(name, str) and isinstance(call["name"], str) and name != call["name"]:
            call["name"] = call["name"] + name
        else:
            call["name"] = name
    if "arguments" in function and function["arguments"] is not None:
        call["has_arguments"] = True
        piece = function["arguments"]
        if isinstance(piece, str) and isinstance(call["arguments"], (str, type(None))):
            call["arguments"] = (call["arguments"] or "") + piece
        else:
            call["arguments"] = piece


def _check_calls(answer):
    """What a call must have whatever was asked. Parsed arguments go to ``call['parsed']``."""
    seen = set()
    for call in answer.calls:
        call["parsed"] = None
        identity = call["id"]
        if not isinstance(identity, str) or not identity:
            answer.problem(SHAPE, "tool_call_id_missing", "id is %s" % clip(json.dumps(identity), 40))
        elif identity in seen:
            answer.problem(SHAPE, "duplicate_tool_call_id", "id %s twice" % clip(identity, 40))
        else:
            seen.add(identity)
        if not isinstance(call["name"], str) or not call["name"]:
            answer.problem(SHAPE, "tool_name_missing", "name is %s" % clip(json.dumps(call["name"]), 40))
        arguments = call["arguments"]
        if arguments is None:
            answer.problem(SHAPE, "arguments_missing", "no arguments")
            continue
        if not isinstance(arguments, str):
            answer.problem(SHAPE, "arguments_not_string", "arguments is a JSON %s, the contract says string" % type(arguments).__name__)
            continue
        try:
            parsed, end = json.JSONDecoder().raw_decode(arguments.lstrip())
        except (ValueError, RecursionError) as exc:
            if answer.finish != "length":
                answer.problem(SHAPE, "arguments_invalid_json", "%s: %s" % (exc, clip(arguments, 120)))
            continue
        rest = arguments.lstrip()[end:].strip()
        if rest:
            merged = rest[0] in "{[,"
            answer.problem(SHAPE, "tool_calls_merged" if merged else "arguments_invalid_json",
                           "after the first object comes %s" % clip(rest, 120))
            continue
        if not isinstance(parsed, dict):
            answer.problem(SHAPE, "arguments_not_object", "arguments hold a JSON %s" % type(parsed).__name__)
            continue
        call["parsed"] = parsed


# --------------------------------------------------------------------------- leaks and garbage


def find_leaks(text, where):
    """[(reason, detail)] for markup and tokens that a client must never see in ``text``."""
    found = []
    if not text:
        return found
    dsml = _DSML.search(text)
    v31 = _V31.search(text)
    call = _XML_CALL.search(text) or _BRACKET_CALL.search(text)
    if dsml:
        # The first word may be an inner one (invoke, parameter): look for the block's own name anywhere.
        words = set(m.group(1).lower() for m in _DSML.finditer(text))
        family = "V3.2 <DSML function_calls>" if "function_calls" in words else "V4 <DSML tool_calls>"
        found.append(("tool_markup_in_content", "%s: %s markup, %s" % (where, family, _around(text, dsml))))
    elif v31:
        found.append(("tool_markup_in_content", "%s: V3.1 <tool_calls_begin> markup, %s" % (where, _around(text, v31))))
    elif call:
        found.append(("tool_markup_in_content", "%s: tool markup of another family, %s" % (where, _around(text, call))))
    think = _THINK.search(text)
    if think:
        found.append(("think_tag_in_%s" % ("reasoning" if where == "reasoning" else "content"), "%s: %s" % (where, _around(text, think))))
    elif _open_tag_at_end(text):
        found.append(("think_tag_in_%s" % ("reasoning" if where == "reasoning" else "content"), "%s ends in a broken tag: %s" % (where, clip(text[-40:]))))
    rest = _V31.sub(" ", _DSML.sub(" ", text))
    special = _SPECIAL.search(rest)
    if special:
        found.append(("special_token_leak", "%s: %s" % (where, _around(rest, special))))
    elif "\uff5c" in rest and not dsml and not v31:
        at = rest.index("\uff5c")
        found.append(("special_token_leak", "%s: a bar U+FF5C, %s" % (where, clip(rest[max(0, at - 30):at + 50]))))
    token = _TOKEN_ID.search(text)
    if token:
        found.append(("token_id_in_text", "%s: %s" % (where, _around(text, token))))
    if "\ufffd" in text:
        found.append(("replacement_character", "%s: U+FFFD at %d" % (where, text.index("\ufffd"))))
    control = _CONTROL.search(text)
    if control:
        found.append(("control_character", "%s: U+%04X at %d" % (where, ord(control.group(0)), control.start())))
    return found


def _around(text, match):
    return clip(text[max(0, match.start() - 20):match.end() + 40])


def _open_tag_at_end(text):
    tail = text.rstrip()[-8:].lower()
    return any(tail.endswith(tag[:length]) for tag in ("<think>", "</think>") for length in range(4, len(tag)))


def is_garbage(text):
    """One character, or one short unit, repeated over the whole text."""
    packed = re.sub(r"\s+", "", text or "")
    if len(packed) >= 8 and len(set(packed)) == 1:
        return "the character %r %d times" % (packed[0], len(packed))
    if len(packed) >= 48:
        for size in range(2, 17):
            unit = packed[:size]
            if (unit * (len(packed) // size + 1))[:len(packed)] == packed:
                return "%r %d times" % (unit, len(packed) // size)
    return None


def _common(answer, tool_names=()):
    """Problems that any generated answer can have."""
    garbage = is_garbage(answer.content) or is_garbage(answer.reasoning)
    if garbage:
        answer.problem(GARBAGE, "garbage_output", garbage)
    for text, where in ((answer.content, "content"), (answer.reasoning, "reasoning")):
        for reason, detail in find_leaks(text, where):
            answer.problem(LEAK, reason, detail)
    for call in answer.calls:
        for text in (call["name"], call["arguments"]):
            if isinstance(text, str):
                for reason, detail in find_leaks(text, "a tool call"):
                    answer.problem(LEAK, "special_token_leak" if reason != "think_tag_in_content" else reason, detail)
    for name in tool_names:
        if answer.content and re.search(r"\b%s\b[\"'`]?\s*[(:,]?\s*(?:[\"']?(?:arguments|parameters)[\"']?\s*:\s*)?\{" % re.escape(name), answer.content):
            answer.problem(LEAK, "tool_call_as_text", "the call stands in content: %s" % clip(answer.content, 160))
            break
    reasoning, content = (answer.reasoning or "").strip(), answer.content or ""
    if len(reasoning) >= 24 and reasoning in content:
        answer.problem(LEAK, "reasoning_in_content", "the whole thought text is in content too")
    if answer.finish == "content_filter":
        answer.problem(VALUE, "content_filtered", "finish_reason content_filter")


def _blank(text):
    return text is None or not text.strip()


# --------------------------------------------------------------------------- judges, one per kind of probe


def numbers_in(text):
    """Every number stated in a text, in order, thousands separators and LaTeX taken away."""
    found = []
    for match in _NUMBER.finditer(text or ""):
        sign, digits, fraction = match.groups()
        value = float(re.sub(r"\D", "", digits) + (fraction or ""))
        before = text[:match.start()].rstrip()[-1:]
        if sign and not (before and (before.isalnum() or before in ")]}")):
            value = -value
        found.append(int(value) if value.is_integer() else value)
    return found


def judge_arithmetic(exchange, stream, expected, thinking=False, with_key=True):
    """``thinking``: whether reasoning must (True) or must not (False) be there."""
    answer = read_exchange(exchange, stream, with_key)
    if _readable(answer):
        _common(answer)
        _judge_thinking(answer, thinking, lambda text: expected in numbers_in(text))
        if answer.calls:
            answer.problem(VALUE, "unexpected_tool_calls", "%d calls without tools offered" % len(answer.calls))
        elif answer.finish not in ("stop", "length", "abort", "content_filter", None):
            answer.problem(VALUE, "finish_reason_wrong", "got %s, want stop" % answer.finish)
        if not _blank(answer.content):
            stated = numbers_in(answer.content)
            if not stated or stated[-1] != expected:
                answer.problem(VALUE, "wrong_answer", "want %d, the last number stated is %s" % (expected, stated[-1] if stated else "absent"))
    return conclude(answer, exchange)


def _judge_thinking(answer, thinking, in_reasoning):
    reasoning = not _blank(answer.reasoning)
    if answer.reasoning_field == "reasoning" and reasoning:
        answer.problem(SHAPE, "reasoning_field_name", "found `reasoning`, the contract is `reasoning_content`")
    if answer.finish == "length":
        return
    if _blank(answer.content) and not answer.calls:
        if reasoning and not thinking:
            answer.problem(SHAPE, "content_null_reasoning_filled", "content is %s, reasoning_content holds the answer" % json.dumps(answer.content))
        elif reasoning and in_reasoning(answer.reasoning):
            answer.problem(SHAPE, "answer_only_in_reasoning", "the answer is in reasoning_content, content is empty")
        else:
            answer.problem(VALUE, "empty_content", "content is %s" % json.dumps(answer.content))
    if thinking and not reasoning:
        answer.problem(VALUE, "no_reasoning", "thinking was asked for, reasoning_content is %s, content is %s" % (
            json.dumps(answer.reasoning), json.dumps(clip(answer.content or "", 120), ensure_ascii=False)))
    if not thinking and reasoning:
        answer.problem(VALUE, "reasoning_when_disabled", "reasoning_content: %s" % clip(answer.reasoning, 120))


def judge_text(exchange, stream, check=None, thinking=False, tool_names=(), with_key=True):
    """A text without calls. ``check(content)`` gives None, or (reason, detail)."""
    answer = read_exchange(exchange, stream, with_key)
    if _readable(answer):
        _common(answer, tool_names)
        _judge_thinking(answer, thinking, lambda text: True)
        if answer.calls:
            answer.problem(VALUE, "unexpected_tool_calls", ", ".join(clip(str(c["name"]), 40) for c in answer.calls))
        elif answer.finish not in ("stop", "length", "abort", "content_filter", None):
            answer.problem(VALUE, "finish_reason_wrong", "got %s, want stop" % answer.finish)
        if check is not None and not _blank(answer.content) and answer.finish != "length":
            found = check(answer.content)
            if found:
                answer.problem(VALUE, found[0], found[1])
    return conclude(answer, exchange)


def judge_tools(exchange, stream, tools, expected, with_key=True):
    """``expected``: a list of (tool name, label, predicate on the parsed arguments), in any order."""
    answer = read_exchange(exchange, stream, with_key)
    if _readable(answer):
        schemas = dict((t["function"]["name"], t["function"].get("parameters") or {}) for t in tools)
        _common(answer, tuple(schemas))
        if answer.reasoning_field == "reasoning" and not _blank(answer.reasoning):
            answer.problem(SHAPE, "reasoning_field_name", "found `reasoning`, the contract is `reasoning_content`")
        elif not _blank(answer.reasoning):
            answer.problem(VALUE, "reasoning_when_disabled", "reasoning_content: %s" % clip(answer.reasoning, 120))
        _judge_calls(answer, schemas, expected)
    return conclude(answer, exchange)


def _judge_calls(answer, schemas, expected):
    if not answer.calls:
        kind = "an empty turn" if _blank(answer.content) else "prose instead: %s" % clip(answer.content, 120)
        answer.problem(VALUE, "no_tool_calls", "%s, finish_reason %s" % (kind, answer.finish))
        return
    for call in answer.calls:
        name, parsed = call["name"], call["parsed"]
        if not isinstance(name, str) or not name:
            continue
        if name not in schemas:
            answer.problem(VALUE, "unknown_tool_name", "%s was not offered" % clip(name, 60))
            continue
        if parsed is None:
            continue
        fault = schema_fault(parsed, schemas[name])
        if fault is None:
            continue
        inner = _unwrap(parsed, schemas[name])
        if inner:
            answer.problem(VALUE, "arguments_wrapped", "the arguments are one level deep under %r" % inner)
        else:
            answer.problem(VALUE, "arguments_schema", "%s: %s" % (name, fault))
    left = list(answer.calls)
    missing = []
    for name, label, predicate in expected:
        hit = next((c for c in left if c["name"] == name and isinstance(c["parsed"], dict) and predicate(c["parsed"])), None)
        if hit is None:
            missing.append(label)
        else:
            left.remove(hit)
    got, want = len(answer.calls), len(expected)
    lack = " (missing %s)" % ", ".join(missing) if missing else ""
    if got < want:
        answer.problem(VALUE, "too_few_tool_calls", "expected %d, got %d%s" % (want, got, lack))
    elif got > want:
        answer.problem(VALUE, "too_many_tool_calls", "expected %d, got %d%s" % (want, got, lack))
    elif missing:
        answer.problem(VALUE, "wrong_tool_arguments", "got %s%s" % (
            clip("; ".join(str(c["arguments"]) for c in answer.calls), 200), lack))
    if answer.finish != "tool_calls" and answer.finish not in ("length", "abort", None):
        answer.problem(VALUE, "finish_reason_wrong", "got %s, want tool_calls" % answer.finish)


def _unwrap(parsed, schema):
    properties = schema.get("properties") or {}
    if len(parsed) != 1:
        return None
    (key, inner), = parsed.items()
    if key in properties:
        return None
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except ValueError:
            return None
    if isinstance(inner, dict) and schema_fault(inner, schema) is None:
        return key
    return None


_TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "integer": lambda v: (isinstance(v, int) and not isinstance(v, bool)) or (isinstance(v, float) and v.is_integer()),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
}


def schema_fault(value, schema, path="$"):
    """Where ``value`` breaks the part of JSON Schema that the probes use, or None."""
    kind = schema.get("type")
    if kind is not None and not _TYPES[kind](value):
        return "%s is no %s" % (path, kind)
    if "enum" in schema and value not in schema["enum"]:
        return "%s is none of %s" % (path, schema["enum"])
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        for name in schema.get("required") or []:
            if name not in value:
                return "%s lacks %s" % (path, name)
        for name, inner in value.items():
            if name in properties:
                fault = schema_fault(inner, properties[name], "%s.%s" % (path, name))
                if fault:
                    return fault
            elif schema.get("additionalProperties", True) is False:
                return "%s has an unknown %s" % (path, clip(name, 40))
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for position, inner in enumerate(value):
            fault = schema_fault(inner, schema["items"], "%s[%d]" % (path, position))
            if fault:
                return fault
    return None


def _readable(answer):
    """False when no answer could be read at all, so that later stages have nothing to look at."""
    return not any(p.stage in (TRANSPORT, STATUS, BODY, CHOICES) for p in answer.problems)


def conclude(answer, exchange):
    """The verdict: the earliest stage's first problem."""
    excerpt = _excerpt(exchange)
    if not answer.problems:
        return Verdict(PASS, "ok", _seen(answer), notes=answer.notes, answer=answer, excerpt=excerpt)
    ranked = sorted(answer.problems, key=lambda p: p.stage)
    first = ranked[0]
    also = []
    for problem in ranked[1:]:
        if problem.reason != first.reason and problem.reason not in also:
            also.append(problem.reason)
    status = INCONCLUSIVE if first.reason in INCONCLUSIVE_REASONS else FAIL
    return Verdict(status, first.reason, first.detail, also=also, notes=answer.notes, answer=answer, excerpt=excerpt)


def _seen(answer):
    parts = []
    if answer.calls:
        parts.append("calls " + "; ".join("%s%s" % (c["name"], c["arguments"]) for c in answer.calls))
    if answer.content:
        parts.append("content %s" % json.dumps(clip(answer.content, 120), ensure_ascii=False))
    if answer.reasoning:
        parts.append("%d characters of reasoning" % len(answer.reasoning))
    return ", ".join(parts)


def compare(whole, stream):
    """A problem when the streamed answer is not the whole one's equal, else None. Wording may differ:
    greedy decoding on a GPU is not the same bit by bit in every batch. Structure may not."""
    if whole is None or stream is None:
        return None
    if whole.finish != stream.finish:
        return Problem(COMPARE, "stream_differs", "finish_reason %s whole, %s streamed" % (whole.finish, stream.finish))
    if _blank(whole.reasoning) != _blank(stream.reasoning):
        return Problem(COMPARE, "stream_differs", "reasoning is in only one of the two")
    mine, theirs = [sorted((str(c["name"]), json.dumps(c["parsed"], sort_keys=True)) for c in a.calls) for a in (whole, stream)]
    if mine != theirs:
        return Problem(COMPARE, "stream_differs", "calls %s whole, %s streamed" % (clip(str(mine), 150), clip(str(theirs), 150)))
    for name, one, two in (("content", whole.content or "", stream.content or ""), ("reasoning", whole.reasoning or "", stream.reasoning or "")):
        if one == two:
            continue
        if len(one) == len(two) and sorted(one) == sorted(two):
            return Problem(COMPARE, "stream_reordered", "%s has the same characters in another order" % name)
        if whole.tokens and whole.tokens == stream.tokens and len(two) < len(one) and _is_subsequence(two, one):
            return Problem(COMPARE, "stream_lost_text", "%s: %d of %d characters for as many tokens" % (name, len(two), len(one)))
        stream.notes.append("%s is worded otherwise than in the whole answer" % name)
    return None


def _is_subsequence(short, long):
    letters = iter(long)
    return all(letter in letters for letter in short)
