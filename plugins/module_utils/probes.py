# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The probes: what is asked of an endpoint, how often, and how attempts become one check.

A probe asks; ``verdict`` judges. Numbers, codes and temperatures are new in every run, so an answer
out of a cache cannot pass.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import threading
import time
from urllib.parse import urlsplit

from ansible_collections.blackwell.dsv4.plugins.module_utils import verdict as V
from ansible_collections.blackwell.dsv4.plugins.module_utils.chat_client import Client, parse_sse

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of one city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city, without the country."}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

ORDER = {
    "type": "function",
    "function": {
        "name": "create_order",
        "description": "Enter an order.",
        "parameters": {
            "type": "object",
            "properties": {
                "customer": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "address": {
                            "type": "object",
                            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
                            "required": ["city", "zip"],
                        },
                    },
                    "required": ["name", "address"],
                },
                "items": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"sku": {"type": "string"}, "quantity": {"type": "integer"}},
                        "required": ["sku", "quantity"],
                    },
                },
                "express": {"type": "boolean"},
            },
            "required": ["customer", "items", "express"],
        },
    },
}

#: Letters of two to four bytes, a combining accent, and an emoji made of three code points.
UNICODE_TEXT = "Z\u00fcrich \u2013 \u6771\u4eac \u041c\u043e\u0441\u043a\u0432\u0430 \U0001f680 \U0001f469\u200d\U0001f680 e\u0301"

#: Probes in the order in which they run and are reported. True: asked both whole and streamed.
PROBES = (
    ("models", False), ("auth", False),
    ("arithmetic", True), ("thinking", True), ("thinking_default", True), ("effort_none", True), ("effort_high", True),
    ("tools", True), ("tools_answer", True), ("tools_again", True), ("tools_nested", True), ("no_tools", True),
    ("structured", True), ("unicode", True), ("long_prompt", True), ("concurrent", True),
    ("cancel", False), ("bad_json", False), ("too_long", False), ("unknown_model", False), ("healthy", False),
)
NAMES = tuple(name for name, dummy in PROBES)

#: The three that every deployment must pass; they are asked ``repeat`` times whatever comes.
BASE = ("arithmetic", "thinking", "tools")

#: Asked whole and streamed at the same time. The first attempts of the basic three have the endpoint for themselves, so that a
#: fault seen there is never one of load.
SIDE_BY_SIDE = BASE + (
    "thinking_default", "effort_none", "effort_high", "tools_answer", "tools_again", "tools_nested", "no_tools", "structured", "unicode", "long_prompt",
)

#: What a router answers to a model name that nobody serves (see the router table in the README).
UNKNOWN_MODEL = {"sglang-router": (200,), "smg": (503,), "none": (200, 400, 404)}

_JOURNAL = re.compile(
    r"KVPoll|transfer failed|Failed to (?:send|transfer|register)|bootstrap.*(?:fail|timed? ?out|refused)|Scheduler hit an exception"
    r"|illegal memory access|out of memory|CUDA error|NCCL.*(?:error|abort|timeout)|Traceback|Segmentation fault|disaggregation warmup failed",
    re.IGNORECASE)


class Options:
    """Arguments of a run, with the defaults that the module documents."""

    DEFAULTS = {
        "base_url": None, "model": None, "api_key": None, "probes": None, "streams": "both", "repeat": 3, "concurrency": 8,
        "timeout": 120.0, "ca_path": None, "max_tokens": 2048, "retry_truncated": True, "long_prompt_tokens": 8192,
        "context_length": None, "router": "sglang-router", "thinking_key": "thinking", "role_ports": None, "workers": None,
        "readiness_path": None, "ready_timeout": 0.0, "direct_url": None, "journal_units": None, "seed": None,
        "unit": "sglang-dsv4-decode", "router_unit": "sglang-dsv4-router",
        "reasoning_parser": "deepseek-v4", "tool_call_parser": "deepseekv4",
    }

    def __init__(self, **given):
        unknown = set(given) - set(self.DEFAULTS)
        if unknown:
            raise TypeError("unknown options: %s" % ", ".join(sorted(unknown)))
        for name, default in self.DEFAULTS.items():
            value = given.get(name)
            setattr(self, name, default if value is None else value)


class Check(dict):
    """One line of the report."""

    def __init__(self, identity, status, reason, evidence="", hint="", **more):
        super().__init__(
            id=identity, status=status, reason=reason, evidence=evidence, hint=hint,
            excerpt="", seconds=0.0, ttft=None, tokens=None, attempts=0, passed=0, finish=None, also=[], notes=[], overhead=0.0)
        self.update(more)


def skipped_checks(options, reason, evidence):
    """The whole list as it would be reported, nothing sent."""
    return [Check(identity, V.SKIPPED, reason, evidence) for identity in check_ids(options)]


def check_ids(options):
    wanted = set(options.probes or NAMES)
    ids = ["endpoint"]
    for name, both in PROBES:
        if name not in wanted:
            continue
        if not both:
            ids.append(name)
            continue
        for mode in modes(options):
            ids.append("%s.%s" % (name, "stream" if mode else "whole"))
    return ids


def modes(options):
    return {"both": (False, True), "whole": (False,), "stream": (True,)}[options.streams]


class Suite:
    """Runs the probes against one endpoint."""

    def __init__(self, options, journal=None, sleep=time.sleep):
        self.o = options
        self.client = Client(options.base_url, options.api_key, options.timeout, options.ca_path)
        self.hints = V.Hints(options.unit, options.router_unit, reasoning_parser=options.reasoning_parser,
                             tool_call_parser=options.tool_call_parser)
        self.redact = V.Redactor([options.api_key] if options.api_key else [])
        self.journal = journal
        self.sleep = sleep
        self.random = random.Random(options.seed)
        self.checks = []
        self.requests = 0
        self.lock = threading.Lock()
        self.local = threading.local()
        self.whole_done = {}
        self.first = {}
        # SGLang's idle scheduler renews its gauges every 30 s.
        self.slot_wait = 40.0
        self.dead = None
        self.timeouts = 0
        self.answers = {}
        self.facts = self._new_facts()

    # ----------------------------------------------------------------- run

    def run(self):
        """All checks, in stable order."""
        begun = time.monotonic()
        self.local.waited = 0.0
        gate = self._endpoint()
        self.checks.append(gate)
        wanted = set(self.o.probes or NAMES)
        for name, both in PROBES:
            if name not in wanted:
                continue
            todo = [("%s.%s" % (name, "stream" if stream else "whole"), stream) for stream in modes(self.o)] if both else [(name, False)]
            if gate["status"] != V.PASS:
                self.checks += [Check(identity, V.SKIPPED, "not_started", gate["reason"]) for identity, dummy in todo]
            elif name in SIDE_BY_SIDE and len(todo) == 2 and not self.dead:
                self._pair(name, todo)
            else:
                for identity, stream in todo:
                    if self.dead:
                        self.checks.append(Check(identity, V.SKIPPED, self.dead[0], self.dead[1]))
                    else:
                        self.checks.append(self._one(name, identity, stream))
                        self._watch_endpoint(self.checks[-1])
        self.seconds = time.monotonic() - begun
        return self.checks

    def summary(self):
        return summarize(self.checks, requests=self.requests, seconds=round(self.seconds, 3),
                         overhead=round(sum(c["overhead"] for c in self.checks), 3),
                         overhead_most=round(max(c["overhead"] for c in self.checks), 3))

    def _one(self, name, identity, stream):
        begun = time.monotonic()
        self.local.waited = self.local.idle = 0.0
        check = getattr(self, "_probe_" + name)(identity, stream)
        # Waiting for the other way of asking is no time of this check.
        seconds = time.monotonic() - begun - self.local.idle
        check["seconds"] = round(seconds, 3)
        check["overhead"] = round(max(0.0, seconds - self.local.waited), 4)
        return check

    def _pair(self, name, todo):
        """Ask whole and streamed at the same time. The streamed answer waits for the whole one only to be compared."""
        found = [None, None]
        faults = []
        done = self.whole_done[name] = threading.Event()
        if name in BASE:
            self.first[name] = {False: threading.Event(), True: threading.Event()}

        def ask(position):
            identity, stream = todo[position]
            try:
                found[position] = self._one(name, identity, stream)
            except Exception as exc:
                faults.append(exc)
            finally:
                if not stream:
                    done.set()
                if name in self.first:
                    self.first[name][stream].set()

        self._parallel(ask, 2)
        if faults:
            raise faults[0]
        for check in found:
            self.checks.append(check)
            self._watch_endpoint(check)

    def _watch_endpoint(self, check):
        """Stop asking an endpoint that is gone, or that lets every request run into its limit."""
        if check["status"] == V.FAIL and check["reason"].startswith("timeout"):
            self.timeouts += 1
            if self.timeouts >= 2:
                self.dead = ("endpoint_hangs", "%s and the check before it ran into the limit of %.0f s" % (check["id"], self.o.timeout))
        else:
            self.timeouts = 0
        if check["status"] == V.FAIL and (check["reason"].startswith("connection_") or check["reason"] == "crash_under_concurrency"):
            again = self._send("GET", "/v1/models", timeout=min(5.0, self.o.timeout))
            if again.error and again.status is None:
                self.dead = ("endpoint_down", "after %s: %s" % (check["id"], again.error_text))

    # ------------------------------------------------------------ the gate

    def _endpoint(self):
        """Is this the right address, and is everything behind it ready? No question is asked before both."""
        begun = time.monotonic()
        url = urlsplit(self.o.base_url)
        for role, port in sorted((self.o.role_ports or {}).items()):
            if int(port) == self.client.port:
                check = Check("endpoint", V.INCONCLUSIVE, "probe_aimed_at_half",
                              "%d is the %s role, and %s:%s is what was to be probed" % (self.client.port, role, url.hostname, self.client.port))
                check["hint"] = self.hints.of("probe_aimed_at_half")
                return check
        end = begun + float(self.o.ready_timeout)
        while True:
            waiting = self._not_ready()
            if not waiting or time.monotonic() >= end:
                break
            self.sleep(min(2.0, max(0.1, end - time.monotonic())))
        seconds = round(time.monotonic() - begun, 3)
        if waiting:
            return Check("endpoint", V.INCONCLUSIVE, "waiting", self._evidence(", ".join(waiting)), self.hints.of("waiting"), seconds=seconds)
        parts = [w["name"] for w in self.o.workers or []] + (["router"] if self.o.readiness_path else [])
        return Check("endpoint", V.PASS, "ok", "ready: %s" % (", ".join(parts) or "not asked"), seconds=seconds)

    def _not_ready(self):
        targets = [(w["name"], Client(w["url"], self.o.api_key, min(30.0, self.o.timeout), self.o.ca_path), w.get("health_path") or "/health")
                   for w in self.o.workers or []]
        if self.o.readiness_path:
            targets.append(("router", self.client, self.o.readiness_path))
        found = [None] * len(targets)

        def ask(position):
            name, client, path = targets[position]
            got = client.get(path, timeout=min(30.0, self.o.timeout))
            if got.error and got.status is None:
                found[position] = "%s not ready (%s)" % (name, got.error.replace("_", " "))
            elif got.status != 200:
                found[position] = "%s not ready (HTTP %s)" % (name, got.status)

        self._parallel(ask, len(targets))
        return [text for text in found if text]

    @staticmethod
    def _parallel(call, count):
        threads = [threading.Thread(target=call, args=(position,), daemon=True) for position in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # -------------------------------------------------- parts of a question

    def _send(self, method, path, payload=None, timeout=None, key=True, until=None, client=None):
        exchange = (client or self.client).request(method, path, payload, timeout=timeout, key=key, until=until)
        self._wait(exchange.seconds)
        return exchange

    def _wait(self, seconds):
        """Time that was the endpoint's; each thread has its own account."""
        self.local.waited = getattr(self.local, "waited", 0.0) + seconds

    def _until(self, event):
        began = time.monotonic()
        event.wait()
        self.local.idle = getattr(self.local, "idle", 0.0) + time.monotonic() - began

    def _evidence(self, *parts):
        return V.clip(self.redact("; ".join(part for part in parts if part)))

    def _payload(self, messages, stream, **more):
        payload = {"model": self.o.model, "messages": messages, "temperature": 0, "max_tokens": int(self.o.max_tokens)}
        for name, value in more.items():
            if value is not None:
                payload[name] = value
        if stream:
            payload["stream"] = True
            payload["stream_options"] = {"include_usage": True}
        return payload

    def _kwargs(self, thinking):
        return {self.o.thinking_key: bool(thinking)}

    def _new_facts(self):
        """What differs from run to run."""
        rnd = self.random
        products = [(17, 23)]
        while len(products) < 64:
            pair = (rnd.randint(12, 97), rnd.randint(12, 97))
            if pair[0] * pair[1] not in [a * b for a, b in products] and pair[0] != pair[1]:
                products.append(pair)
        warm, cold = rnd.sample(range(11, 39), 2)
        codes = rnd.sample(range(10000, 99999), 3)
        return {
            "products": products, "paris": warm, "tokyo": cold, "codes": codes,
            "quantity": rnd.randint(2, 90), "express": rnd.random() < 0.5, "nonce": "%08x" % rnd.getrandbits(32),
        }

    # -------------------------------------------------- attempts to a check

    def _attempt(self, payload, stream, judge):
        """One question; asked once more with room when the limit was too small."""
        exchange = self._send("POST", "/v1/chat/completions", payload)
        verdict = judge(exchange, stream)
        if verdict.reason == "truncated":
            limit = payload["max_tokens"]
            verdict.detail = "max_tokens %d was used up" % limit
            if self.o.retry_truncated:
                wider = dict(payload, max_tokens=limit * 4)
                again = self._send("POST", "/v1/chat/completions", wider)
                second = judge(again, stream)
                if second.reason == "truncated":
                    second.detail = "max_tokens %d and %d were used up" % (limit, limit * 4)
                else:
                    second.notes.append("needed more than %d tokens" % limit)
                exchange, verdict = again, second
        if exchange.status == 200:
            with self.lock:
                self.requests += 1
        return exchange, verdict

    def _repeat(self, identity, stream, ask, always):
        """``ask(number)`` -> (payload, judge). Base probes are always asked ``repeat`` times; others only
        until one attempt passes. Mixed outcomes are flaky, and the first fault is kept."""
        name = identity.replace(".whole", "").replace(".stream", "")
        runs = []
        first = self.first.get(name)
        for number in range(max(1, int(self.o.repeat))):
            if first and number == (0 if stream else 1):
                self._until(first[not stream])
            payload, judge = ask(number)
            exchange, verdict = self._attempt(payload, stream, judge)
            if first:
                first[stream].set()
            if not stream and verdict.status == V.PASS:
                self.answers[(name, number)] = verdict.answer
            if stream and not always:
                verdict = self._compare(name, number, verdict)
            runs.append((exchange, verdict))
            if verdict.reason.startswith("timeout"):
                break
            if verdict.status == V.PASS and not always:
                break
            if verdict.reason in ("request_rejected", "probe_aimed_at_half", "model_name_mismatch", "unauthorized", "key_missing"):
                break
        if stream and always:
            runs = [(exchange, self._compare(name, number, verdict)) for number, (exchange, verdict) in enumerate(runs)]
        return self._settle(identity, stream, runs)

    def _compare(self, name, number, verdict):
        """The verdict on a streamed answer once it was held against the whole one."""
        if verdict.status != V.PASS:
            return verdict
        done = self.whole_done.get(name.split(".")[0])
        if done is not None:
            self._until(done)
        problem = V.compare(self.answers.get((name, number)), verdict.answer)
        if problem:
            return V.Verdict(V.FAIL, problem.reason, problem.detail, answer=verdict.answer, excerpt=verdict.excerpt)
        verdict.notes = verdict.answer.notes
        return verdict

    def _settle(self, identity, stream, runs):
        passed = [v for dummy, v in runs if v.status == V.PASS]
        bad = [(e, v) for e, v in runs if v.status != V.PASS]
        times = [v.answer.first_token for dummy, v in runs if stream and v.answer and v.answer.first_token is not None]
        tokens = [v.answer.tokens for dummy, v in runs if v.answer and v.answer.tokens is not None]
        notes = []
        for dummy, verdict in runs:
            notes.extend(n for n in verdict.notes if n not in notes)
        base = {
            "attempts": len(runs), "passed": len(passed),
            "ttft": round(statistics.median(times), 4) if times else None,
            "tokens": int(statistics.median(tokens)) if tokens else None,
            "notes": [self.redact(V.clip(n, 160)) for n in notes],
        }
        if not bad:
            first = runs[0][1]
            return Check(identity, V.PASS, "ok", self._evidence(first.detail), finish=first.answer.finish if first.answer else None, **base)
        exchange, first = next(((e, v) for e, v in bad if v.status == V.FAIL), bad[0])
        base["finish"] = first.answer.finish if first.answer else None
        base["also"] = first.also
        status = first.status
        count = ""
        if passed:
            status = V.FLAKY
            count = "%d of %d failed, the first with %s" % (len(bad), len(runs), first.reason)
        elif len(runs) > 1:
            count = "%d of %d" % (len(bad), len(runs))
        journal = self._journal_line(first)
        also = "also %s" % ", ".join(first.also) if first.also else ""
        excerpt = self.redact(V.clip(first.excerpt)) if first.excerpt else ""
        return Check(identity, status, first.reason, self._evidence(count, first.detail, also, journal), self.hints.of(first.reason),
                     excerpt=excerpt, **base)

    def _journal_line(self, verdict):
        """What the units' journal says about a request that died inside the server."""
        inside = verdict.reason in ("aborted", "server_error", "service_unavailable", "body_cut", "stream_incomplete", "error_object",
                                    "crash_under_concurrency", "errors_under_concurrency")
        if not self.journal or not self.o.journal_units or not (inside or verdict.reason.startswith(("timeout", "connection_"))):
            return ""
        for unit in self.o.journal_units:
            lines = [line for line in self.journal(unit) if _JOURNAL.search(line)]
            if lines:
                return "journal of %s: %s" % (unit, V.clip(lines[-1], 240))
        return ""

    # -------------------------------------------------------------- probes

    def _probe_models(self, identity, stream):
        exchange = self._send("GET", "/v1/models")
        return self._judge_models(identity, exchange)

    def _judge_models(self, identity, exchange):
        problem = None
        if exchange.error and exchange.status is None:
            problem = V.Problem(V.TRANSPORT, exchange.error, exchange.error_text)
        else:
            problem = V.status_problem(exchange, bool(self.o.api_key))
        if problem is None:
            document = exchange.json()
            listed = None
            if isinstance(document, dict) and isinstance(document.get("data"), list):
                listed = [m.get("id") for m in document["data"] if isinstance(m, dict)]
            if listed is None:
                problem = V.Problem(V.BODY, "body_not_json", "no model list in the body")
            elif self.o.model not in listed:
                problem = V.Problem(V.VALUE, "model_not_listed", "want %s, listed: %s" % (self.o.model, ", ".join(str(m) for m in listed) or "nothing"))
            else:
                return Check(identity, V.PASS, "ok", self._evidence("listed: %s" % ", ".join(str(m) for m in listed)), attempts=1, passed=1)
        return self._from_problem(identity, problem, exchange)

    def _from_problem(self, identity, problem, exchange):
        verdict = V.Verdict(V.INCONCLUSIVE if problem.reason in V.INCONCLUSIVE_REASONS else V.FAIL, problem.reason, problem.detail,
                            excerpt=exchange.body[:400].decode("utf-8", "replace"))
        return self._settle(identity, False, [(exchange, verdict)])

    def _probe_auth(self, identity, stream):
        if not self.o.api_key:
            return Check(identity, V.SKIPPED, "no_key", "no key is configured: the endpoint is open to whoever reaches it")
        payload = self._payload([{"role": "user", "content": "Say yes."}], False, chat_template_kwargs=self._kwargs(False))
        payload["max_tokens"] = 4
        exchange = self._send("POST", "/v1/chat/completions", payload, key=False)
        if exchange.error and exchange.status is None:
            problem = V.Problem(V.TRANSPORT, exchange.error, exchange.error_text)
        elif exchange.status in (401, 403):
            return Check(identity, V.PASS, "ok", "HTTP %d without the key" % exchange.status, attempts=1, passed=1)
        elif exchange.status == 200:
            problem = V.Problem(V.STATUS, "auth_open", "HTTP 200 without the key")
        else:
            problem = V.Problem(V.STATUS, "auth_unexpected", "HTTP %s without the key, 401 expected" % exchange.status)
        return self._from_problem(identity, problem, exchange)

    def _question(self, number):
        a, b = self.facts["products"][number % len(self.facts["products"])]
        return [{"role": "user", "content": "What is %d*%d? Answer with the number only." % (a, b)}], a * b

    def _arithmetic(self, identity, stream, thinking, always, **extra):
        def ask(number):
            messages, product = self._question(number)
            return self._payload(messages, stream, **extra), lambda e, s: V.judge_arithmetic(e, s, product, thinking, bool(self.o.api_key))

        return self._repeat(identity, stream, ask, always)

    def _probe_arithmetic(self, identity, stream):
        return self._arithmetic(identity, stream, False, True, chat_template_kwargs=self._kwargs(False))

    def _probe_thinking(self, identity, stream):
        check = self._arithmetic(identity, stream, True, True, chat_template_kwargs=self._kwargs(True))
        if check["reason"] == "no_reasoning" and self.o.direct_url:
            check["evidence"] = self._evidence(self._direct(stream), check["evidence"])
        return check

    def _direct(self, stream):
        """For diagnosis only: does the worker itself keep thinking apart?"""
        client = Client(self.o.direct_url, self.o.api_key, self.o.timeout, self.o.ca_path)
        if client.port in [int(p) for p in (self.o.role_ports or {}).values()]:
            return "direct_url is a half of the pair and was not asked"
        messages, product = self._question(0)
        exchange = self._send("POST", "/v1/chat/completions", self._payload(messages, stream, chat_template_kwargs=self._kwargs(True)), client=client)
        if V.judge_arithmetic(exchange, stream, product, True).status == V.PASS:
            return "the worker separates reasoning, the router path does not: field dropped"
        return "the worker does not separate reasoning either"

    def _probe_thinking_default(self, identity, stream):
        return self._arithmetic(identity, stream, False, False)

    def _probe_effort_none(self, identity, stream):
        return self._arithmetic(identity, stream, False, False, reasoning_effort="none")

    def _probe_effort_high(self, identity, stream):
        return self._arithmetic(identity, stream, True, False, reasoning_effort="high")

    @staticmethod
    def _city(name):
        return ("get_weather", "city %s" % name, lambda args: name.lower() in str(args.get("city", "")).lower())

    def _tools(self, identity, stream, messages, tools, expected, always):
        def ask(dummy):
            payload = self._payload(messages, stream, tools=tools, tool_choice="auto", chat_template_kwargs=self._kwargs(False))
            return payload, lambda e, s: V.judge_tools(e, s, tools, expected, bool(self.o.api_key))

        return self._repeat(identity, stream, ask, always)

    def _weather_question(self):
        return [{"role": "user", "content": "What is the weather in Paris and in Tokyo? Call get_weather once for each city."}]

    def _weather_history(self):
        calls, results = [], []
        for position, (city, degrees) in enumerate((("Paris", self.facts["paris"]), ("Tokyo", self.facts["tokyo"]))):
            identity = "call_%s%02d" % (self.facts["nonce"], position)
            calls.append({"id": identity, "type": "function",
                          "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}})
            results.append({"role": "tool", "tool_call_id": identity,
                            "content": json.dumps({"city": city, "temperature_c": degrees})})
        return self._weather_question() + [{"role": "assistant", "content": "", "tool_calls": calls}] + results

    def _probe_tools(self, identity, stream):
        return self._tools(identity, stream, self._weather_question(), [WEATHER], [self._city("Paris"), self._city("Tokyo")], True)

    def _probe_tools_answer(self, identity, stream):
        want = (self.facts["paris"], self.facts["tokyo"])

        def check(content):
            lacking = [str(n) for n in want if n not in numbers_of(content)]
            return ("wrong_answer", "the answer lacks %s of the tool results" % ", ".join(lacking)) if lacking else None

        def ask(dummy):
            payload = self._payload(self._weather_history(), stream, tools=[WEATHER], tool_choice="auto", chat_template_kwargs=self._kwargs(False))
            return payload, lambda e, s: V.judge_text(e, s, check, False, ("get_weather",), bool(self.o.api_key))

        return self._repeat(identity, stream, ask, False)

    def _probe_tools_again(self, identity, stream):
        messages = self._weather_history() + [
            {"role": "assistant", "content": "It is %d degrees in Paris and %d in Tokyo." % (self.facts["paris"], self.facts["tokyo"])},
            {"role": "user", "content": "And what is the weather in Rome? Call get_weather."},
        ]
        return self._tools(identity, stream, messages, [WEATHER], [self._city("Rome")], False)

    def _probe_tools_nested(self, identity, stream):
        count, express = self.facts["quantity"], self.facts["express"]
        text = ('Create an order with create_order: customer name "Ada Lovelace", city "Paris", zip "75001", one item with sku "A-100" and '
                'quantity %d, %s.' % (count, "by express" if express else "no express"))

        def right(args):
            try:
                address = args["customer"]["address"]
                return (args["items"] == [{"sku": "A-100", "quantity": count}] and args["express"] is express
                        and args["customer"]["name"] == "Ada Lovelace" and address["city"] == "Paris" and address["zip"] == "75001")
            except (KeyError, TypeError):
                return False

        return self._tools(identity, stream, [{"role": "user", "content": text}], [ORDER], [("create_order", "the order as asked", right)], False)

    def _text(self, identity, stream, content, check, **extra):
        def ask(dummy):
            payload = self._payload([{"role": "user", "content": content}], stream, chat_template_kwargs=self._kwargs(False), **extra)
            return payload, lambda e, s: V.judge_text(e, s, check, False, (), bool(self.o.api_key))

        return self._repeat(identity, stream, ask, False)

    def _probe_no_tools(self, identity, stream):
        return self._text(identity, stream, "You have no tools. In one sentence, what does a weather service do?", None)

    def _probe_structured(self, identity, stream):
        a, b = self.facts["products"][5]
        schema = {
            "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "product": {"type": "integer"}},
            "required": ["a", "b", "product"], "additionalProperties": False,
        }

        def check(content):
            try:
                value = json.loads(content)
            except ValueError as exc:
                return ("structured_invalid", "content is no JSON: %s" % exc)
            fault = V.schema_fault(value, schema)
            if fault:
                return ("structured_invalid", fault)
            if value != {"a": a, "b": b, "product": a * b}:
                return ("wrong_answer", "want the product %d, got %s" % (a * b, V.clip(content, 80)))
            return None

        return self._text(identity, stream, "What is %d*%d? Answer as JSON with a = %d, b = %d and the product." % (a, b, a, b), check,
                          response_format={"type": "json_schema", "json_schema": {"name": "product", "strict": True, "schema": schema}})

    def _probe_unicode(self, identity, stream):
        text = "%s %s" % (UNICODE_TEXT, self.facts["nonce"])

        def check(content):
            return None if text in content else ("text_changed", "want %s, got %s" % (text, V.clip(content, 120)))

        return self._text(identity, stream, "Repeat the following text exactly, and nothing else: %s" % text, check)

    def long_prompt(self):
        """Lines without meaning, three of which carry a code, and those codes with their depths."""
        # A line is about 13 tokens; the number at its head is what makes lines differ.
        count = max(12, int(self.o.long_prompt_tokens) // 13)
        needles = list(zip(("RED", "GREEN", "BLUE"), (0.05, 0.5, 0.92), self.facts["codes"]))
        places = dict((int(count * depth), "The code of box %s is %d." % (name, code)) for name, depth, code in needles)
        lines = []
        for number in range(count):
            if number in places:
                lines.append(places[number])
            lines.append("Line %06d: the archive holds nothing of note here." % number)
        return "\n".join(lines), needles

    def _probe_long_prompt(self, identity, stream):
        """One document, a question for each depth. Every depth must be found; a second try makes it flaky."""
        text, needles = self.long_prompt()
        checks = []
        for name, depth, code in needles:
            def check(content, name=name, depth=depth, code=code):
                if code in numbers_of(content):
                    return None
                return ("needle_missed", "%s at %d %% of about %d tokens: want %d, got %s" % (
                    name, round(depth * 100), self.o.long_prompt_tokens, code, V.clip(content, 80)))

            part = self._text("%s.%s" % (identity, name), stream, "%s\nWhat is the code of box %s?" % (text, name), check)
            checks.append(part)
            if part["reason"].startswith("timeout") or part["status"] == V.INCONCLUSIVE:
                break
        worst = max(checks, key=lambda c: _RANK[c["status"]])
        merged = Check(identity, worst["status"], worst["reason"], worst["evidence"], worst["hint"])
        for key in ("finish", "also", "notes", "excerpt"):
            merged[key] = worst[key]
        for key in ("attempts", "passed"):
            merged[key] = sum(c[key] for c in checks)
        for key in ("ttft", "tokens"):
            values = [c[key] for c in checks if c[key] is not None]
            merged[key] = max(values) if values else None
        if worst["status"] == V.PASS:
            merged["evidence"] = "found at %s of about %d tokens" % (
                ", ".join("%d %%" % round(depth * 100) for dummy, depth, dummy2 in needles), self.o.long_prompt_tokens)
        return merged

    def _probe_concurrent(self, identity, stream):
        count = max(1, int(self.o.concurrency))
        pairs = [self._question(8 + number) for number in range(min(count, 56))]
        pairs += [self._question(8 + number) for number in range(count - len(pairs))]
        runs = [None] * count

        def ask(position):
            messages, product = pairs[position]
            payload = self._payload(messages, stream, chat_template_kwargs=self._kwargs(False))
            exchange = self._send("POST", "/v1/chat/completions", payload)
            runs[position] = (exchange, V.judge_arithmetic(exchange, stream, product, False, bool(self.o.api_key)))

        began = time.monotonic()
        self._parallel(ask, count)
        took = time.monotonic() - began
        self._wait(took)
        self.requests += sum(1 for exchange, dummy in runs if exchange.status == 200)
        bad = [(e, v) for e, v in runs if v.status != V.PASS]
        if not bad:
            check = self._settle(identity, stream, runs)
            check["evidence"] = "%d answers, each its own, %.2f s" % (count, took)
            return check
        products = [product for dummy, product in pairs]
        exchange, first = bad[0]
        for dummy, verdict in bad:
            stated = V.numbers_in(verdict.answer.content or "") if verdict.answer else []
            if verdict.reason == "wrong_answer" and stated and stated[-1] in products:
                first = V.Verdict(V.FAIL, "cross_talk", verdict.detail + ", the product of another request", answer=verdict.answer, excerpt=verdict.excerpt)
                return self._all_of(identity, stream, exchange, first, len(bad), count)
        broken = [v for e, v in bad if e.error or (e.status or 0) >= 500 or v.reason in ("aborted", "stream_incomplete")]
        if broken:
            health = self._send("GET", "/health", timeout=min(10.0, self.o.timeout))
            gone = health.error is not None and health.status is None
            reason = "crash_under_concurrency" if gone else "errors_under_concurrency"
            detail = "%d of %d at once failed, the first with %s (%s)%s" % (
                len(bad), count, broken[0].reason, broken[0].detail, "; afterwards the endpoint refuses: %s" % health.error_text if gone else "")
            first = V.Verdict(V.FAIL, reason, detail, answer=None, excerpt="")
        return self._all_of(identity, stream, exchange, first, len(bad), count)

    def _all_of(self, identity, stream, exchange, verdict, bad, count):
        check = self._settle(identity, stream, [(exchange, verdict)])
        check["attempts"], check["passed"] = count, count - bad
        if "at once" not in check["evidence"]:
            check["evidence"] = self._evidence("%d of %d at once failed" % (bad, count), check["evidence"])
        return check

    # ----------------------------------------------- probes of bad manners

    def _running(self, worker):
        """How many requests a worker runs now: its live report, else its metrics (which may lag)."""
        client = Client(worker["url"], self.o.api_key, 10.0, self.o.ca_path)
        got = self._send("GET", "/v1/loads", client=client)
        document = got.json() if got.status == 200 else None
        if isinstance(document, dict) and isinstance(document.get("loads"), list):
            values = [load.get("num_running_reqs") for load in document["loads"] if isinstance(load, dict)]
            if values and all(isinstance(v, (int, float)) for v in values):
                return sum(values)
        got = self._send("GET", "/metrics", client=client)
        if got.status == 200:
            text = got.body.decode("utf-8", "replace")
            values = [float(m.group(1)) for m in re.finditer(r"(?m)^sglang:num_running_reqs(?:\{[^}]*\})?\s+([0-9.eE+-]+)", text)]
            if values:
                return sum(values)
        return None

    def _probe_cancel(self, identity, stream):
        payload = self._payload([{"role": "user", "content": "Count from 1 to 2000, separated by commas."}], True,
                                chat_template_kwargs=self._kwargs(False))
        payload["max_tokens"] = 8192
        workers = [w for w in self.o.workers or [] if w["name"] != "prefill"]
        before = dict((w["name"], self._running(w)) for w in workers)
        exchange = self._send("POST", "/v1/chat/completions", payload, until=has_text)
        if not exchange.cancelled:
            verdict = V.conclude(V.read_exchange(exchange, True, bool(self.o.api_key)), exchange)
            if verdict.status != V.PASS and verdict.reason != "truncated":
                return self._settle(identity, True, [(exchange, verdict)])
            return Check(identity, V.INCONCLUSIVE, "ended_too_soon", "the answer was over before it could be cut", attempts=1)
        left = {}
        end = time.monotonic() + self.slot_wait
        for worker in workers:
            name = worker["name"]
            while before[name] is not None:
                now = self._running(worker)
                if now is None or now <= before[name]:
                    break
                if time.monotonic() > end:
                    left[name] = now
                    break
                self._wait(0.05)
                self.sleep(0.05)
        messages, product = self._question(7)
        again, verdict = self._attempt(self._payload(messages, False, chat_template_kwargs=self._kwargs(False)), False,
                                       lambda e, s: V.judge_arithmetic(e, s, product, False, bool(self.o.api_key)))
        if left:
            detail = "%.0f s after the cut: %s" % (self.slot_wait, ", ".join("%s runs %d" % item for item in left.items()))
            return self._from_problem(identity, V.Problem(V.VALUE, "slot_not_freed", detail), exchange)
        if verdict.status != V.PASS:
            verdict.detail = "after the cut: " + verdict.detail
            return self._settle(identity, False, [(again, verdict)])
        counted = [name for name, value in before.items() if value is not None]
        check = self._settle(identity, False, [(again, verdict)])
        check["evidence"] = "cut after %d bytes; %s, and the next answer is right" % (
            len(exchange.body), "slots free again on %s" % ", ".join(counted) if counted else "no worker to ask for its slots")
        return check

    def _refused(self, identity, exchange, what):
        """4xx, and the endpoint lives."""
        if exchange.error and exchange.status is None:
            return self._from_problem(identity, V.Problem(V.TRANSPORT, exchange.error, exchange.error_text), exchange)
        if exchange.status in (401, 403):
            return self._from_problem(identity, V.status_problem(exchange, bool(self.o.api_key)), exchange)
        if exchange.status < 400:
            return self._from_problem(identity, V.Problem(V.STATUS, "not_refused", "HTTP %d for %s" % (exchange.status, what)), exchange)
        if exchange.status >= 500:
            return self._from_problem(identity, V.status_problem(exchange), exchange)
        messages, product = self._question(6)
        again, verdict = self._attempt(self._payload(messages, False, chat_template_kwargs=self._kwargs(False)), False,
                                       lambda e, s: V.judge_arithmetic(e, s, product, False, bool(self.o.api_key)))
        if verdict.status == V.FAIL:
            detail = "HTTP %d for %s, and afterwards %s: %s" % (exchange.status, what, verdict.reason, verdict.detail)
            return self._from_problem(identity, V.Problem(V.VALUE, "unhealthy_after", detail), again)
        return Check(identity, V.PASS, "ok", self._evidence("HTTP %d for %s, healthy after it" % (exchange.status, what)), attempts=1, passed=1)

    def _probe_bad_json(self, identity, stream):
        body = ('{"model": %s, "messages": [' % json.dumps(self.o.model)).encode("utf-8")
        return self._refused(identity, self._send("POST", "/v1/chat/completions", body), "a cut JSON body")

    def _probe_too_long(self, identity, stream):
        length = self.o.context_length
        if not length:
            return Check(identity, V.SKIPPED, "context_length_unknown", "context_length is not given")
        words = int(int(length) * 1.02) + 16
        payload = self._payload([{"role": "user", "content": "@"}], False, chat_template_kwargs=self._kwargs(False))
        payload["max_tokens"] = 4
        # A megabyte: put together as bytes, since there is nothing in it that JSON would have to escape.
        body = json.dumps(payload).encode("utf-8").replace(b'"@"', b'"' + b" a" * words + b'"')
        return self._refused(identity, self._send("POST", "/v1/chat/completions", body), "a prompt of %d words" % words)

    def _probe_unknown_model(self, identity, stream):
        messages, dummy = self._question(5)
        payload = self._payload(messages, False, chat_template_kwargs=self._kwargs(False))
        payload["model"] = "no-such-model-%s" % self.facts["nonce"]
        exchange = self._send("POST", "/v1/chat/completions", payload)
        if exchange.error and exchange.status is None:
            return self._from_problem(identity, V.Problem(V.TRANSPORT, exchange.error, exchange.error_text), exchange)
        want = UNKNOWN_MODEL[self.o.router]
        text = "HTTP %s for an unknown model name, %s expected of %s" % (exchange.status, " or ".join(str(s) for s in want), self.o.router)
        if exchange.status == 200:
            self.requests += 1
        if exchange.status in want:
            return Check(identity, V.PASS, "ok", text, attempts=1, passed=1)
        return self._from_problem(identity, V.Problem(V.STATUS, "unknown_model_unexpected", text), exchange)

    def _probe_healthy(self, identity, stream):
        check = self._probe_models(identity, stream)
        if check["status"] == V.PASS and self.o.readiness_path:
            got = self._send("GET", self.o.readiness_path)
            if got.status != 200:
                seen = "%s: %s" % (self.o.readiness_path, got.status or got.error_text)
                return self._from_problem(identity, V.Problem(V.STATUS, "unhealthy_after", seen), got)
        return check


def numbers_of(text):
    """Numbers in prose, glued to a unit or not (21C, 21 degrees)."""
    return [int(n) for n in re.findall(r"(?<!\d)\d+(?!\d)", text or "")]


def has_text(body):
    """True once a streamed answer has begun to say something."""
    if body.count(b"\n\n") < 2:
        return False
    try:
        events, dummy = parse_sse(body[:body.rfind(b"\n\n") + 2])
    except UnicodeDecodeError:
        return False
    for dummy, data, dummy2 in events:
        try:
            delta = json.loads(data)["choices"][0]["delta"]
        except (ValueError, LookupError, TypeError):
            continue
        if isinstance(delta, dict) and delta.get("content"):
            return True
    return False


#: From harmless to grave: the gravest status of all checks is the suite's.
_RANK = {V.SKIPPED: 0, V.PASS: 1, V.FLAKY: 2, V.INCONCLUSIVE: 3, V.FAIL: 4}


def summarize(checks, **more):
    """Counts, the overall status, and the checks that need eyes."""
    counts = dict((status, 0) for status in (V.PASS, V.FAIL, V.FLAKY, V.INCONCLUSIVE, V.SKIPPED))
    for check in checks:
        counts[check["status"]] += 1
    status = max((c["status"] for c in checks), key=lambda s: _RANK[s]) if checks else V.SKIPPED
    summary = {
        "status": status,
        "ok": status in (V.PASS, V.FLAKY),
        "counts": counts,
        "bad": ["%s: %s" % (c["id"], c["reason"]) for c in checks if c["status"] in (V.FAIL, V.INCONCLUSIVE, V.FLAKY)],
    }
    summary.update(more)
    return summary
