# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Misbehaviour on demand.

Faults are names with a value. They come from the settings file at start
(/etc/rehearsal/engine.json, see Settings) or, while the engine runs, from
`POST /_rehearsal/fault` with the same object ({} clears them). "times": N ends
all of them after N generation requests. README.md has the list with the cases
each of them stands for.
"""
from __future__ import annotations

import json
import os
from pathlib import Path
from types import MappingProxyType

SETTINGS_PATH = "/etc/rehearsal/engine.json"

# name -> what it does; a name that is not here is refused, so that a test cannot pass by a typo.
KNOWN = {
    # start
    "start_error": "ends with the log of a known failure: " "oom, other_process, no_kernel, unsupported_arch, shared_memory, numa, corrupt_shard, traceback",
    "start_hang": "loads for ever",
    "never_ready": "HTTP is up, the warm-up never ends",
    "warmup_failed": "the warm-up fails, the ready line is printed all the same",
    "exit_after": "seconds after ready: the scheduler hits an exception and the server ends",
    "orphans": "scheduler processes outlive the server and keep their GPUs",
    "gpu_zero": "every rank sits on the first GPU",
    # health
    "health": "status of /health",
    "health_delay": "seconds before /health answers",
    # generation, before the answer
    "status": "HTTP status of generation requests",
    "message": "message of that status",
    "hang": "no answer at all",
    "delay": "seconds before an answer starts",
    "abort": "200 with finish_reason abort and no text",
    "crash_at": "number of requests at once at which the server dies",
    "zombie": "scheduler processes are gone, health stays good, requests hang",
    "no_transfer": "prefill never hands over the KV of a request",
    "prefill_error": "HTTP status that prefill answers with, without telling decode",
    "reject_tool_choice": "400 for tools while thinking",
    # generation, while streaming
    "die_after": "chunks after which the connection is dropped",
    "exit_after_chunks": "chunks after which the process dies",
    "chunk_delay": "seconds between chunks",
    "accepted": "drafted tokens accepted in each step, with speculation (1 without this)",
    "burst": "tokens in one chunk (as with --stream-interval, or accepted drafts)",
    # what the model says
    "text": "this raw text instead of an answer",
    "garbage": "one token for ever",
    "empty": "nothing but the end token",
    "wrong_number": "results of arithmetic are off by one",
    "bold": "formatted but right answers",
    "think": "on or off, whatever the request says",
    "parser_unaware": "the output parser believes that thinking is off",
    "never_close": "thinking is never closed, the answer is inside it, the end token is text",
    "one_call": "only the first of several tool calls",
    "same_call": "every call has the arguments of the first",
    "extra_call": "one call more than asked for",
    "no_call": "reasoning about the tool, then nothing",
    "call_as_text": "calls as prose",
    "ascii_markup": "tool markup with ASCII bars",
    "bare_invoke": "tool markup with ASCII bars and without its outer wrapper (with the real bars the parser takes it)",
    "cut_markup": "tool markup (ASCII bars) that breaks off; the real parser drops one with the real bars",
    "wrap_arguments": "arguments one level too deep once the history has a call",
    # the shape of the answer
    "reasoning_field": "the thought in `reasoning` instead of `reasoning_content`; both: in both",
    "content_in_reasoning": "the answer in reasoning_content, content null",
    "null_content": "content null instead of empty",
    "arguments_object": "arguments as an object",
    "merged_calls": "arguments of all calls in one string",
    "same_index": "every call at index 0",
    "duplicate_ids": "every call with the same id",
    "repeat_id": "the call id in every chunk (allowed)",
    "finish_stop": "finish_reason stop beside calls",
}


class Unknown(ValueError):
    """A fault nobody knows."""


class Faults:
    def __init__(self, values: dict | None = None):
        self.values: dict = {}
        self.times: int | None = None
        self.set(values or {})

    def set(self, values: dict) -> None:
        values = dict(values)
        times = values.pop("times", None)
        unknown = sorted(set(values) - set(KNOWN))
        if unknown:
            raise Unknown("unknown fault(s): %s" % ", ".join(unknown))
        self.values, self.times = values, times

    def get(self, name: str, default=None):
        assert name in KNOWN, name
        return self.values.get(name, default)

    def take(self) -> Faults:
        """The faults for one generation request; counts `times` down."""
        taken = Faults(self.values)
        if self.times is not None:
            self.times -= 1
            if self.times <= 0:
                self.values, self.times = {}, None
        return taken


class Settings:
    """The settings file; `prefill`, `decode`, `null` hold overrides by mode.

    drain_delay_seconds: SGLang looks for SIGTERM every 5 s (0 to 5 s pass), and only then drains.
    """

    DEFAULTS = MappingProxyType({"load_seconds": 3.0, "warmup_seconds": 1.0, "token_seconds": 0.008, "drain_delay_seconds": 0.0, "faults": {}})

    def __init__(self, mode: str, path: str | None = None):
        path = path or os.environ.get("REHEARSAL_ENGINE_SETTINGS", SETTINGS_PATH)
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = {}
        merged = {**self.DEFAULTS, **found, **found.get(mode, {})}
        self.load_seconds = float(merged["load_seconds"])
        self.warmup_seconds = float(merged["warmup_seconds"])
        self.token_seconds = float(merged["token_seconds"])
        self.drain_delay_seconds = float(merged["drain_delay_seconds"])
        self.faults = Faults(merged["faults"])
