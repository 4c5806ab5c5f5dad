# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP routes of SGLang 0.5.23 that an operator, a router or a client meets."""
from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import time
from datetime import UTC, datetime

from aiohttp import web

import sglang
from sglang.rehearsal import chat, transfer
from sglang.rehearsal.encoding import BadRequest, Prompt
from sglang.rehearsal.engine import Abort, Engine, Job
from sglang.rehearsal.faults import Unknown
from sglang.rehearsal.resolve import switch

log = logging.getLogger("sglang")
ADMIN = ("/flush_cache", "/set_internal_state", "/freeze_gc", "/pd_role_switch", "/start_profile", "/stop_profile", "/abort_request")
LOOPBACK = ("127.0.0.1", "::1")


class Server:
    def __init__(self, engine: Engine):
        self.engine = engine
        self.args = engine.args
        self.health_time = 0.0

    # ---- frame

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.frame], client_max_size=1 << 30)
        route = app.router
        route.add_get("/ready", self.ready)
        for path in ("/health", "/health_generate"):
            route.add_get(path, self.health)
        for path, handler in (("/model_info", self.model_info), ("/server_info", self.server_info)):
            route.add_get(path, handler)
            route.add_get("/get_" + path[1:], self.deprecated(path, handler))
        route.add_get("/v1/models", self.models)
        route.add_get("/v1/loads", self.loads)
        route.add_route("*", "/flush_cache", self.flush_cache)
        route.add_post("/freeze_gc", self.freeze_gc)
        route.add_post("/v1/chat/completions", self.chat)
        route.add_post("/v1/completions", self.completions)
        route.add_post("/generate", self.generate)
        if self.args["enable_metrics"]:
            route.add_get("/metrics", self.metrics)
        route.add_get("/_rehearsal/fault", self.fault)
        route.add_post("/_rehearsal/fault", self.fault)
        return app

    @web.middleware
    async def frame(self, request: web.Request, handler):
        """Keys, error bodies, one access line for each request."""
        status = 500
        try:
            refused = self.refuse(request)
            if refused is not None:
                status = refused
                return web.json_response({"error": "Unauthorized" if refused == 401 else "Forbidden"}, status=refused)
            answer = await handler(request)
            status = answer.status
            return answer
        except web.HTTPException as error:
            status = error.status
            return web.json_response({"detail": error.reason}, status=status)
        except (BadRequest, Unknown) as error:
            status = 400
            return web.json_response(chat.error_body(str(error), 400), status=400)
        except Abort as error:
            status = error.status
            kind = "BadRequest" if status == 400 else str(status)
            return web.json_response(chat.error_body(error.message, status, kind), status=status)
        except asyncio.CancelledError:
            status = 499
            raise
        except ConnectionError:
            status = 499
            raise
        finally:
            if self.args["log_level"] in ("info", "debug"):
                print('INFO:     %s - "%s %s HTTP/1.1" %d' % (request.remote, request.method, request.path_qs, status), flush=True)

    def refuse(self, request: web.Request) -> int | None:
        """The status for a request without the right key, or None."""
        path = request.path
        if path.startswith("/_rehearsal"):
            return None if request.remote in LOOPBACK else 403
        if request.method == "OPTIONS" or path.startswith(("/health", "/ready", "/metrics")):
            return None
        key, admin = self.args["api_key"], self.args["admin_api_key"]
        wanted = admin or key if path in ADMIN else key
        if not wanted:
            return None
        scheme, _space, given = request.headers.get("Authorization", "").partition(" ")
        return None if scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), wanted.encode()) else 401

    @staticmethod
    def deprecated(path: str, handler):
        async def call(request: web.Request) -> web.Response:
            log.warning("Endpoint '/get_%s' is deprecated and will be removed in a future version. Please use '%s' instead.", path[1:], path)
            return await handler(request)

        return call

    # ---- health

    async def ready(self, _request) -> web.Response:
        return web.Response(status=200 if self.engine.status == "Up" and not self.engine.stopping else 503)

    async def health(self, request: web.Request) -> web.Response:
        engine = self.engine
        if engine.stopping or engine.status == "Starting":
            return web.Response(status=503)
        fault = engine.faults.get("health")
        await asyncio.sleep(float(engine.faults.get("health_delay", 0)))
        if request.path == "/health" and not switch("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", True):
            return web.Response(status=fault or 200)
        await asyncio.sleep(1)  # SGLang looks once a second whether the one-token request was answered
        if fault:
            return web.Response(status=int(fault))
        engine.status = "Up"
        return web.Response(status=200)

    # ---- about the server

    async def model_info(self, _request) -> web.Response:
        args, config = self.args, self.args["model_config"]
        return web.json_response({
            "model_path": args["model_path"], "served_model_name": args["served_model_name"], "tokenizer_path": args["tokenizer_path"],
            "is_generation": True, "preferred_sampling_params": args["preferred_sampling_params"], "weight_version": args["weight_version"],
            "load_format": args["load_format"], "reasoning_parser": args["reasoning_parser"], "tool_call_parser": args["tool_call_parser"],
            "disaggregation_mode": args["disaggregation_mode"], "has_image_understanding": False, "has_audio_understanding": False,
            "model_type": config.get("model_type"), "architectures": config.get("architectures"),
        })

    async def server_info(self, _request) -> web.Response:
        engine = self.engine
        shown = {name: value for name, value in self.args.items() if name not in ("model_config", "launch_command")}
        return web.json_response({
            **shown,
            "launch_command": self.args["launch_command"],
            "status": "ready",
            "max_total_num_tokens": engine.kv_tokens,
            "max_req_input_len": self.args["context_length"] - 6,
            "startup_time": round(time.time() - engine.started, 3),
            "internal_states": [{
                "last_gen_throughput": engine.last_throughput,
                "memory_usage": {"token_capacity": engine.kv_tokens},
                "effective_max_running_requests_per_dp": self.args["max_running_requests"],
                "num_running_reqs": len(engine.running),
            }],
            "version": sglang.__version__,
            "frontend": "python",
        }, dumps=lambda value: json.dumps(value, default=str))

    async def models(self, _request) -> web.Response:
        name = self.args["served_model_name"]
        return web.json_response({"object": "list", "data": [{
            "id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": name, "parent": None,
            "max_model_len": self.args["context_length"],
        }]})

    async def loads(self, _request) -> web.Response:
        return web.json_response({
            "timestamp": datetime.now(UTC).isoformat(), "version": sglang.__version__, "accelerator": "rehearsal",
            "num_accelerators": self.args["tp_size"] * self.args["pp_size"], "loads": [self.engine.load()],
        })

    async def flush_cache(self, _request) -> web.Response:
        if self.engine.running or self.engine.waiting:
            return web.Response(text="Flush cache failed.\n", status=400)
        self.engine.cache.seen.clear()
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
                                 "the operation will not be performed.)\n")

    async def freeze_gc(self, _request) -> web.Response:
        return web.Response(text="Garbage collection frozen.\n")

    async def metrics(self, _request) -> web.Response:
        engine, count = self.engine, self.engine.counters
        load = engine.load()
        label = '{engine_type="%s",model_name="%s",pp_rank="0",tp_rank="0"}' % (
            {"null": "unified"}.get(engine.mode, engine.mode), self.args["served_model_name"])
        lines = []

        def emit(name: str, kind: str, value, help_text: str) -> None:
            lines.extend(("# HELP sglang:%s %s" % (name, help_text), "# TYPE sglang:%s %s" % (name, kind), "sglang:%s%s %s" % (name, label, float(value))))

        emit("prompt_tokens_total", "counter", count["prompt_tokens_total"], "Number of prefill tokens processed.")
        emit("generation_tokens_total", "counter", count["generation_tokens_total"], "Number of generation tokens processed.")
        if count["spec_verify_calls_total"]:  # as Prometheus has it: a counter with labels is there from its first step on
            emit("spec_verify_calls_total", "counter", count["spec_verify_calls_total"], "Number of speculative decoding verification calls.")
        emit("cached_tokens_total", "counter", count["cached_tokens_total"], "Number of cached prompt tokens.")
        emit("num_requests_total", "counter", count["num_requests_total"], "Number of requests processed.")
        emit("num_aborted_requests_total", "counter", count["num_aborted_requests_total"], "Number of requests aborted.")
        emit("num_running_reqs", "gauge", load["num_running_reqs"], "The number of running requests.")
        emit("num_queue_reqs", "gauge", load["num_waiting_reqs"], "The number of requests in the waiting queue.")
        emit("num_used_tokens", "gauge", load["num_used_tokens"], "The number of used tokens.")
        emit("token_usage", "gauge", load["token_usage"], "The token usage.")
        emit("gen_throughput", "gauge", load["gen_throughput"], "The generation throughput (token/s).")
        emit("cache_hit_rate", "gauge", count["cached_tokens_total"] / max(1, count["prompt_tokens_total"]), "The prefix cache hit rate.")
        emit("max_total_num_tokens", "gauge", engine.kv_tokens, "Tokens of the KV pool.")
        emit("context_len", "gauge", self.args["context_length"], "The context length.")
        emit("page_size", "gauge", self.args["page_size"], "The page size.")
        emit("num_bootstrap_failed_reqs_total", "counter", count["num_bootstrap_failed_reqs_total"], "Requests that failed to bootstrap.")
        emit("num_transfer_failed_reqs_total", "counter", count["num_transfer_failed_reqs_total"], "Requests whose transfer failed.")
        emit("time_to_first_token_seconds_sum", "counter", count["ttft_seconds_sum"], "Seconds to the first token, summed up.")
        emit("time_to_first_token_seconds_count", "counter", count["ttft_count"], "Requests with a first token.")
        return web.Response(text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # ---- faults

    async def fault(self, request: web.Request) -> web.Response:
        engine = self.engine
        if request.method == "POST":
            engine.faults.set(await self.body(request))
            log.warning("rehearsal: faults set to %s", engine.faults.values)
            if engine.faults.get("zombie") and not engine.zombie:
                engine.zombie = True
                engine.ranks.kill_schedulers()
            if engine.faults.get("exit_after") is not None:
                asyncio.get_running_loop().call_later(float(engine.faults.get("exit_after")), engine.crash, "RuntimeError: rehearsal fault exit_after")
        return web.json_response({"faults": engine.faults.values, "times": engine.faults.times})

    # ---- generation

    @staticmethod
    async def body(request: web.Request):
        raw = await request.read()
        try:
            return json.loads(raw)
        except ValueError as error:
            raise BadRequest("JSON decode error: %s" % error) from None

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self.body(request)
        asked = await asyncio.get_running_loop().run_in_executor(None, chat.Request, self.engine, body)
        if not asked.stream:
            return web.json_response(await chat.answer(asked), dumps=lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        return await self.send(request, chat.Stream(asked).events(), asked.faults)

    async def send(self, request: web.Request, events, faults) -> web.StreamResponse:
        """Server-sent events; the headers go out with the first of them, as in SGLang."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        started, sent = False, 0
        try:
            async for event in events:
                if not started:
                    await response.prepare(request)
                    started = True
                await response.write(event)
                sent += 1
                if faults.get("die_after") and sent >= faults.get("die_after"):
                    request.transport.abort()
                    return response
                if faults.get("exit_after_chunks") and sent >= faults.get("exit_after_chunks"):
                    self.engine.ranks.stop()
                    os._exit(9)
        finally:
            await events.aclose()
        await response.write_eof()
        return response

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.body(request)
        if not isinstance(body, dict):
            raise BadRequest("Input should be a valid dictionary")
        sampling = body.get("sampling_params") or {}
        ids = body.get("input_ids")
        job = chat.plain_job(self.engine, {**sampling, **{key: body.get(key) for key in ("bootstrap_room", "bootstrap_host", "bootstrap_port")}},
                             ids if ids is not None else body.get("text"), sampling.get("max_new_tokens", 128))
        steps = chat.generate_steps(self.engine, job)
        if body.get("stream"):
            return await self.send(request, self.sse(steps), job.faults)
        last = None
        async for last in steps:
            pass
        return web.json_response(last)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.body(request)
        if not isinstance(body, dict):
            raise BadRequest("Input should be a valid dictionary")
        job = chat.plain_job(self.engine, body, body.get("prompt"), body.get("max_tokens", 16))
        steps = chat.completion_steps(self.engine, job, body)
        if body.get("stream"):
            tail = bool((body.get("stream_options") or {}).get("include_usage"))
            return await self.send(request, self.sse(steps, job if tail else None), job.faults)
        text, last = "", None
        async for last in steps:
            text += last["choices"][0]["text"]
        last["choices"][0]["text"] = text
        return web.json_response({**last, "usage": chat.usage(self.engine, [job])})

    async def sse(self, steps, job: Job | None = None):
        async for step in steps:
            yield chat.data(step)
        if job is not None:
            yield chat.data({"id": job.rid, "object": "text_completion", "created": int(time.time()), "model": "default", "choices": [],
                             "usage": chat.usage(self.engine, [job])})
        yield b"data: [DONE]\n\n"


async def warm_up(engine: Engine) -> None:
    """The first request: over the fake bootstrap in a half, so it proves nothing about the pair."""
    job = Job(prompt=Prompt("", [10, 11, 12, 13], []), text="warm", max_new=8, faults=engine.faults.__class__(), room=0,
              host=transfer.FAKE_HOST)
    async for _step in engine.run(job):
        pass
