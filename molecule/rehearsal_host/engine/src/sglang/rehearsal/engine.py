# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests in flight: slots, the hand-over between the halves, token after token, counters."""
from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from sglang.rehearsal import transfer
from sglang.rehearsal.encoding import EOS, Encoder, Prompt
from sglang.rehearsal.faults import Faults, Settings
from sglang.rehearsal.ranks import Ranks

log = logging.getLogger("sglang")
FOREVER = 10**9


class Abort(RuntimeError):
    """A request that ends with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class Job:
    """One request for the engine."""

    prompt: Prompt
    text: str
    max_new: int
    faults: Faults
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    room: int | None = None
    host: str | None = None
    port: int | None = None
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    cached: int = 0
    new: int = 0  # tokens generated so far
    reasoning: int = 0


@dataclass
class Step:
    ids: list[int]
    finish: dict | None = None  # {"type": stop|length|abort, "matched": ...}


class PrefixCache:
    """Which prompt pages were seen: enough to report cached tokens."""

    def __init__(self, page: int, enabled: bool):
        self.page = page
        self.enabled = enabled
        self.seen: set[str] = set()

    def match(self, ids: list[int]) -> int:
        if not self.enabled:
            return 0
        matched, whole, state = 0, True, hashlib.sha256()
        for end in range(self.page, len(ids), self.page):
            state.update(repr(ids[end - self.page:end]).encode())
            key = state.hexdigest()
            whole = whole and key in self.seen
            matched = end if whole else matched
            self.seen.add(key)
        return matched


class Engine:
    def __init__(self, args: dict, settings: Settings, encoder: Encoder, ranks: Ranks, kv_tokens: int):
        self.args = args
        self.settings = settings
        self.encoder = encoder
        self.ranks = ranks
        self.kv_tokens = kv_tokens
        self.mode = args["disaggregation_mode"]
        self.status = "Starting"
        self.stopping = False
        self.started = time.time()
        self.running: dict[str, Job] = {}
        self.waiting = 0
        self.zombie = False
        self.counters: Counter = Counter()
        self.last_throughput = 0.0
        self.slots = asyncio.Semaphore(args["max_running_requests"])
        self.cache = PrefixCache(args["page_size"], not args["disable_radix_cache"])
        self.half = {"prefill": transfer.Prefill, "decode": transfer.Decode}.get(self.mode, lambda _args: None)(args)

    @property
    def faults(self) -> Faults:
        return self.settings.faults

    # ---- life

    def crash(self, reason: str) -> None:
        """A scheduler failed: SGLang kills its whole tree."""
        log.error("[TP0] Scheduler hit an exception: Traceback (most recent call last):\n%s", reason)
        log.error("Received sigquit from a child process. It usually means the child failed.")
        self.ranks.stop()
        os.kill(os.getpid(), signal.SIGKILL)

    # ---- requests

    @contextlib.asynccontextmanager
    async def slot(self, job: Job):
        self.waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.waiting -= 1
        self.running[job.rid] = job
        try:
            limit = self.faults.get("crash_at")
            if limit and len(self.running) >= limit:
                self.crash("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
            yield
        finally:
            del self.running[job.rid]
            self.slots.release()

    async def run(self, job: Job):
        """Steps of the answer. Raises Abort; closing the generator frees the slot."""
        faults = job.faults
        if self.mode != "null" and job.room is None and self.args["disaggregation_transfer_backend"] != "fake":
            raise self._abort(400, "Invalid request: Disaggregated request received without bootstrap room id. req.rid=%r" % job.rid)
        if faults.get("hang") or self.zombie:
            await asyncio.sleep(FOREVER)
        if faults.get("delay"):
            await asyncio.sleep(float(faults.get("delay")))
        if faults.get("status"):
            raise self._abort(int(faults.get("status")), faults.get("message", "fault"))
        async with self.slot(job):
            begun = time.monotonic()
            job.cached = self.cache.match(job.prompt.ids)
            self.counters["prompt_tokens_total"] += len(job.prompt.ids)
            self.counters["cached_tokens_total"] += job.cached
            if self.mode == "prefill":
                async for step in self._prefill(job):
                    yield step
            else:
                ids, finish = self._plan(job)
                if self.mode == "decode" and not await self._receive(job):
                    ids, finish = self._plan_garbage(job)
                if faults.get("abort"):
                    ids, finish = [], {"type": "abort", "message": "Aborted"}
                self.counters["ttft_seconds_sum"] += time.monotonic() - begun
                self.counters["ttft_count"] += 1
                async for step in self._tokens(job, ids, finish):
                    yield step
            self.counters["num_requests_total"] += 1
            self.last_throughput = round(job.new / max(time.monotonic() - begun, 1e-6), 2)

    async def _prefill(self, job: Job):
        faults = job.faults
        if faults.get("prefill_error"):
            raise self._abort(int(faults.get("prefill_error")), "prefill fault")
        await asyncio.sleep(self.settings.token_seconds)
        if job.host != transfer.FAKE_HOST:
            if faults.get("no_transfer"):
                await asyncio.sleep(FOREVER)
            try:
                await self.half.offer(job.room, job.prompt.ids)
            except transfer.TransferError as error:
                self.counters["num_bootstrap_failed_reqs_total"] += 1
                log.error("[TP0] %s", error)
                raise self._abort(500, str(error)) from None
        ids, _finish = self._plan(job)
        job.new = 1
        self.counters["generation_tokens_total"] += 1
        yield Step(ids[:1] or [EOS], {"type": "length", "length": 0})

    async def _receive(self, job: Job) -> bool:
        if job.host == transfer.FAKE_HOST:
            return True
        host = job.host or "127.0.0.1"
        port = job.port or self.args["disaggregation_bootstrap_port"]
        try:
            same = await self.half.fetch(host, int(port), job.room, job.prompt.ids)
        except transfer.LayoutError as error:
            self.crash(str(error))
            raise
        except transfer.TransferError as error:
            self.counters["num_transfer_failed_reqs_total"] += 1
            log.error("[TP0] %s", error)
            raise self._abort(500, str(error)) from None
        if not same:
            log.warning("[TP0] rehearsal: the KV of room %s belongs to another prompt or layout; a real engine would not notice", job.room)
        return same

    def _plan_garbage(self, job: Job) -> tuple[list[int], dict]:
        job.text = "!" * 400
        return self._plan(job)

    def _plan(self, job: Job) -> tuple[list[int], dict]:
        """The whole answer as ids, and how it ends."""
        text, matched = job.text, EOS
        for stop in job.stop:
            place = text.find(stop)
            if place >= 0:
                text, matched = text[:place], stop
        ids = self.encoder.tokenizer.encode(text)
        if job.ignore_eos:
            while ids and len(ids) < job.max_new:
                ids = ids + ids
        elif matched == EOS:
            ids = ids + [EOS]
        if len(ids) > job.max_new:
            return ids[:job.max_new], {"type": "length", "length": job.max_new}
        return ids, {"type": "stop", "matched": matched}

    async def _tokens(self, job: Job, ids: list[int], finish: dict):
        pause = float(job.faults.get("chunk_delay", self.settings.token_seconds))
        if job.prompt.thinking:
            closing = self.encoder.tokenizer.encode("</think>")[0]
            job.reasoning = ids.index(closing) if closing in ids else len(ids)
        if not ids:
            yield Step([], finish)
            return
        burst = int(job.faults.get("burst", self.args["stream_interval"]))
        step = 1 + int(job.faults.get("accepted", 1))
        clock, held = time.monotonic(), []
        for place, item in enumerate(ids):
            clock += pause
            await asyncio.sleep(max(0.0, clock - time.monotonic()))
            job.new = place + 1
            self.counters["generation_tokens_total"] += 1
            if self.args["speculative_algorithm"] and place and (place - 1) % step == 0:  # the first token is prefill's
                self.counters["spec_verify_calls_total"] += 1
            last = place + 1 == len(ids)
            # the end token is counted, but the detokenizer never sees it
            if not (last and finish["type"] == "stop" and finish.get("matched") == EOS and item == EOS):
                held.append(item)
            if last or place == 0 or place % burst == 0:
                yield Step(held, finish if last else None)
                held = []

    def _abort(self, status: int, message: str) -> Abort:
        self.counters["num_aborted_requests_total"] += 1
        return Abort(status, message)

    # ---- what the server says of itself

    def load(self) -> dict:
        used = sum(len(job.prompt.ids) + job.new for job in self.running.values())
        return {
            "dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": self.waiting,
            "num_total_reqs": len(self.running) + self.waiting, "num_used_tokens": used, "num_total_tokens": used,
            "max_total_num_tokens": self.kv_tokens, "token_usage": round(used / self.kv_tokens, 6),
            "gen_throughput": self.last_throughput, "cache_hit_rate": 0.0, "utilization": 0.0,
            "max_running_requests": self.args["max_running_requests"],
        }
