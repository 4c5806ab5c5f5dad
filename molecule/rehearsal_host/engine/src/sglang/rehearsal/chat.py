# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""OpenAI chat requests and answers, in the shapes of SGLang 0.5.23."""
from __future__ import annotations

import json
import time
import uuid

from sglang.rehearsal import script
from sglang.rehearsal.encoding import BadRequest, Delta, Prompt
from sglang.rehearsal.engine import Abort, Engine, Job, Step
from sglang.rehearsal.resolve import switch

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
CHUNK = "chat.completion.chunk"


def check(body) -> dict:
    """The request in the form the rest of this file works on, or BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("Input should be a valid dictionary")
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("messages: Field required" if messages is None else "messages: Input should be a valid list")
    if not messages:
        raise BadRequest("Messages cannot be empty.")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadRequest("messages.%d: a message needs one of the roles %s" % (place, ", ".join(ROLES)))
        if message["role"] != "assistant" and not isinstance(message.get("content"), (str, list)):
            raise BadRequest("messages.%d.content: Input should be a valid string" % place)
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadRequest("%s: Input should be greater than 0" % name)
    if not isinstance(body.get("n", 1), int) or not 1 <= body.get("n", 1) <= 64:
        raise BadRequest("n: Input should be greater than or equal to 1")
    for tool in body.get("tools") or []:
        if not isinstance(tool, dict) or not isinstance((tool.get("function") or {}).get("name"), str):
            raise BadRequest("tools: each tool needs a function with a name")
    choice = body.get("tool_choice")
    if choice == "required" and not body.get("tools"):
        raise BadRequest("Tools cannot be empty if tool choice is set to required.")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if name not in [tool["function"]["name"] for tool in body.get("tools") or []]:
            raise BadRequest("Tool '%s' not found in tools list." % name)
    return normalize_thinking(body)


def normalize_thinking(body: dict) -> dict:
    """`reasoning` and `reasoning_effort` become chat_template_kwargs where those say nothing."""
    body = dict(body)
    thinking = None
    wish = body.get("reasoning")
    if isinstance(wish, dict):
        effort = wish.get("effort", wish.get("reasoning_effort"))
        if effort is not None:
            body["reasoning_effort"] = effort
        enabled = wish.get("enabled", wish.get("enable", False))
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in ("1", "true", "yes", "y", "on")
        thinking = True if enabled else None
    effort = body.get("reasoning_effort")
    if isinstance(effort, bool):
        raise BadRequest("reasoning_effort must not be a boolean")
    if isinstance(effort, str) and effort not in EFFORTS and not effort.replace(".", "", 1).isdigit():
        raise BadRequest("reasoning_effort: invalid value %r" % effort)
    if effort is not None:
        thinking = effort != "none"
    if thinking is not None:
        kwargs = dict(body.get("chat_template_kwargs") or {})
        kwargs.setdefault("thinking", thinking)
        body["chat_template_kwargs"] = kwargs
    return body


class Request:
    """A checked chat request with its rendered prompt."""

    def __init__(self, engine: Engine, body: dict):
        self.engine = engine
        self.faults = engine.faults.take()
        defaults = engine.args.get("default_chat_template_kwargs") or {}
        self.body = check({**body, "chat_template_kwargs": {**defaults, **(body.get("chat_template_kwargs") or {})}}
                          if defaults and isinstance(body, dict) else body)
        self.model = self.body.get("model") or "default"
        self.created = int(time.time())
        self.stream = bool(self.body.get("stream"))
        options = self.body.get("stream_options") or {}
        self.include_usage = bool(options.get("include_usage"))
        self.continuous = bool(options.get("continuous_usage_stats"))
        asked = bool((self.body.get("chat_template_kwargs") or {}).get("thinking", switch("SGLANG_DEFAULT_THINKING", False)))
        self.thinking = {"on": True, "off": False}.get(self.faults.get("think"), asked)
        choice = self.body.get("tool_choice")
        if self.faults.get("reject_tool_choice") and asked and self.body.get("tools"):
            raise BadRequest("Thinking mode does not support this tool_choice")
        self.prompt: Prompt = engine.encoder.render(self.body, self.thinking)
        self.limit = limit(engine, self.prompt, self.body.get("max_completion_tokens") or self.body.get("max_tokens"))
        self.forced = choice["function"]["name"] if isinstance(choice, dict) else choice == "required"

    def job(self) -> Job:
        body = self.body
        wanted = (body.get("response_format") or {}).get("type") == "json_object"
        stop = body.get("stop") or []
        return Job(
            prompt=self.prompt, text=script.say(self.prompt, self.faults, self.forced, wanted), max_new=self.limit,
            faults=self.faults, stop=[stop] if isinstance(stop, str) else list(stop), ignore_eos=bool(body.get("ignore_eos")),
            **bootstrap(body),
        )

    def parser(self):
        thinking = False if self.faults.get("parser_unaware") else self.thinking
        return self.engine.encoder.parser(self.body, thinking)


def limit(engine: Engine, prompt: Prompt, asked: int | None) -> int:
    """How many tokens the answer may have."""
    context, given = engine.args["context_length"], len(prompt.ids)
    if given >= context:
        raise BadRequest("The input (%d tokens) is longer than the model's context length (%d tokens)." % (given, context))
    if asked is not None and given + asked > context - 1:
        raise BadRequest(
            "Requested token count exceeds the model's maximum context length of %d tokens. You requested a total of %d tokens: "
            "%d tokens from the input messages and %d tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit." % (context, given + asked, given, asked))
    return asked or context - given - 1


def bootstrap(body: dict) -> dict:
    values = {}
    for name, key in (("room", "bootstrap_room"), ("host", "bootstrap_host"), ("port", "bootstrap_port")):
        value = body.get(key)
        values[name] = value[0] if isinstance(value, list) and value else value
    return values


def usage(engine: Engine, jobs: list[Job]) -> dict:
    prompt, new, thought = len(jobs[0].prompt.ids), sum(job.new for job in jobs), sum(job.reasoning for job in jobs)
    cached = {"cached_tokens": jobs[0].cached} if engine.args["enable_cache_report"] else None
    return {
        "prompt_tokens": prompt, "total_tokens": prompt + new, "completion_tokens": new, "prompt_tokens_details": cached,
        "reasoning_tokens": thought, "completion_tokens_details": {"reasoning_tokens": thought} if thought else None,
    }


def error_body(message: str, status: int, kind: str = "BadRequest") -> dict:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


# ---- one answer


async def answer(request: Request) -> dict:
    choices, jobs = [], []
    for index in range(request.body.get("n", 1)):
        job = request.job()
        parser = request.parser()
        total, finish = Delta(), {"type": "stop"}
        async for step in request.engine.run(job):
            add(total, parser.feed(step.ids))
            finish = step.finish or finish
        add(total, parser.finish(finish["type"]))
        choices.append(choice_of(request, index, total, finish))
        jobs.append(job)
    return {
        "id": jobs[0].rid, "object": "chat.completion", "created": request.created, "model": request.model, "choices": choices,
        "usage": usage(request.engine, jobs), "metadata": {"weight_version": request.engine.args["weight_version"]},
    }


def add(total: Delta, piece: Delta) -> None:
    total.reasoning += piece.reasoning
    total.content += piece.content
    for call in piece.calls:
        if call["name"] is not None:
            total.calls.append(dict(call))
        else:
            total.calls[-1]["arguments"] += call["arguments"]


def call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def choice_of(request: Request, index: int, total: Delta, finish: dict) -> dict:
    message = {"role": "assistant", "content": total.content, "reasoning_content": total.reasoning or None}
    kind, matched = finish["type"], finish.get("matched")
    if total.calls:
        message["tool_calls"] = [
            {"id": call_id(), "index": call["index"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in total.calls
        ]
        if kind == "stop":
            kind, matched = "tool_calls", None
    choice = {"index": index, "message": message, "logprobs": None, "finish_reason": kind, "matched_stop": matched}
    return bend_choice(request, choice)


def bend_choice(request: Request, choice: dict) -> dict:
    """The faults of shape, for a whole answer."""
    faults, message = request.faults, choice["message"]
    if faults.get("content_in_reasoning") and message["content"]:
        message["reasoning_content"], message["content"] = message["content"], None
    if faults.get("null_content") and not message["content"]:
        message["content"] = None
    if faults.get("reasoning_field"):
        message["reasoning"] = message["reasoning_content"]
        if faults.get("reasoning_field") != "both":
            del message["reasoning_content"]
    calls = message.get("tool_calls")
    if calls:
        if faults.get("merged_calls"):
            calls[0]["function"]["arguments"] = "".join(call["function"]["arguments"] for call in calls)
            del calls[1:]
        if faults.get("arguments_object"):
            for call in calls:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        for call in calls:
            if faults.get("duplicate_ids"):
                call["id"] = calls[0]["id"]
            if faults.get("same_index"):
                call["index"] = 0
        if faults.get("finish_stop"):
            choice["finish_reason"] = "stop"
    return choice


# ---- a stream


class Stream:
    """Events of a streamed answer. The first is pulled before the HTTP headers go out."""

    def __init__(self, request: Request):
        self.request = request
        self.jobs: list[Job] = []
        self.ids: dict[int, str] = {}

    def event(self, index: int, delta: dict, finish: str | None = None, matched=None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": matched}
        chunk = {"id": self.jobs[-1].rid, "object": CHUNK, "created": self.request.created, "model": self.request.model, "choices": [choice]}
        if self.request.continuous:
            chunk["usage"] = usage(self.request.engine, self.jobs)
        return data(chunk)

    async def events(self):
        request = self.request
        for index in range(request.body.get("n", 1)):
            job = request.job()
            self.jobs.append(job)
            parser, first, called, finish = request.parser(), True, False, {"type": "stop"}
            self.ids.clear()
            try:
                async for step in request.engine.run(job):
                    delta = parser.feed(step.ids)
                    if step.finish:
                        finish = step.finish
                        add_tail(delta, parser.finish(finish["type"]))
                    if first:
                        first = False
                        yield self.event(index, {"role": "assistant", "content": "", "reasoning_content": None})
                    called = called or bool(delta.calls)
                    for event in self.pieces(index, delta):
                        yield event
            except Abort as error:
                name = {400: "BAD_REQUEST", 500: "INTERNAL_SERVER_ERROR"}.get(error.status, str(error.status))
                if first and request.faults.get("status"):
                    raise
                yield data({"error": error_body(error.message, error.status, name)})
                yield b"data: [DONE]\n\n"
                return
            kind, matched = finish["type"], finish.get("matched")
            if called and kind == "stop":
                kind = "stop" if request.faults.get("finish_stop") else "tool_calls"
            yield self.event(index, {"reasoning_content": None}, kind, matched)
        if request.include_usage:
            yield data({"id": self.jobs[0].rid, "object": CHUNK, "created": request.created, "model": request.model, "choices": [],
                        "usage": usage(request.engine, self.jobs)})
        yield b"data: [DONE]\n\n"

    def pieces(self, index: int, delta: Delta) -> list[bytes]:
        """One step: reasoning, then content, then a chunk for each piece of a call."""
        faults, found = self.request.faults, []
        reasoning, content = delta.reasoning, delta.content
        if faults.get("content_in_reasoning"):
            reasoning, content = reasoning + content, ""
        if reasoning:
            part = {"reasoning_content": reasoning}
            if faults.get("reasoning_field"):
                part = {"reasoning": reasoning} if faults.get("reasoning_field") != "both" else {**part, "reasoning": reasoning}
            found.append(self.event(index, part))
        if content:
            found.append(self.event(index, {"reasoning_content": None, "content": content}))
        for call in delta.calls:
            place, name, arguments = call["index"], call["name"], call["arguments"]
            if name is not None:
                self.ids[place] = self.ids.get(0, "") if faults.get("duplicate_ids") and place else call_id()
            entry = {
                "id": self.ids[place] if name is not None or faults.get("repeat_id") else None,
                "index": 0 if faults.get("same_index") or faults.get("merged_calls") else place, "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            if faults.get("merged_calls") and place and name is not None:
                continue
            found.append(self.event(index, {"role": None, "content": None, "reasoning_content": None, "tool_calls": [entry]}))
        return found


def add_tail(delta: Delta, tail: Delta) -> None:
    delta.reasoning += tail.reasoning
    delta.content += tail.content
    delta.calls += tail.calls


def data(chunk: dict) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


# ---- plain completions and the native route


def plain_job(engine: Engine, body: dict, text, asked: int | None) -> Job:
    """A job for /v1/completions and /generate: no chat template, no parsers."""
    faults = engine.faults.take()
    if isinstance(text, list) and text and isinstance(text[0], int):
        prompt = Prompt("", list(text), [])
    elif isinstance(text, str) and text:
        prompt = engine.encoder.encode_text(text)
    else:
        raise BadRequest("Either text or input_ids should be provided.")
    stop = body.get("stop") or []
    scene = Prompt("<｜User｜>" + prompt.text + "<｜Assistant｜>", prompt.ids, [])
    scene.special = [(0, 8), (8 + len(prompt.text), 8 + len(prompt.text) + 13)]
    return Job(prompt=prompt, text=" " + script.say(scene, faults), max_new=limit(engine, prompt, asked), faults=faults,
               stop=[stop] if isinstance(stop, str) else list(stop), ignore_eos=bool(body.get("ignore_eos")), **bootstrap(body))


def meta(engine: Engine, job: Job, finish: dict | None) -> dict:
    return {"id": job.rid, "finish_reason": finish, "prompt_tokens": len(job.prompt.ids), "completion_tokens": job.new,
            "cached_tokens": job.cached, "weight_version": engine.args["weight_version"]}


async def generate_steps(engine: Engine, job: Job):
    """/generate: cumulative text."""
    ids: list[int] = []
    step: Step
    async for step in engine.run(job):
        ids += step.ids
        yield {"text": engine.encoder.decode(ids), "output_ids": list(ids), "meta_info": meta(engine, job, step.finish)}


async def completion_steps(engine: Engine, job: Job, body: dict):
    """/v1/completions: pieces of text."""
    shown, ids = "", []
    base = {"id": job.rid, "object": "text_completion", "created": int(time.time()), "model": body.get("model") or "default"}
    async for step in engine.run(job):
        ids += step.ids
        text = engine.encoder.decode(ids)
        if text.endswith("\ufffd") and not step.finish:
            continue
        piece, shown = text[len(shown):], text
        yield {**base, "choices": [{"index": 0, "text": piece, "logprobs": None,
                                    "finish_reason": step.finish["type"] if step.finish else None,
                                    "matched_stop": step.finish.get("matched") if step.finish else None}]}
