# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One measurement of an endpoint by SGLang's own load client, read from its JSON.

The client is one compiled module of the sglang wheel (sglang.benchmark.serving in Rust), loaded without the package
around it: neither torch nor a GPU is needed, and the same client measures every release.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess

from ansible_collections.blackwell.dsv4.plugins.module_utils import child_process

#: Runs in the client's environment. The request comes by standard input, since arguments and environment can be read
#: by others and it may hold the key; what the client prints goes to standard error, so that only JSON is left.
RUNNER = """
import ctypes, importlib.machinery, importlib.metadata, importlib.util, json, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: no load without somebody who waits for the figures
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
folder = os.path.join(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt", "rust_extensions")
spec = importlib.machinery.PathFinder.find_spec("_bench", [folder])
client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)
try:
    outcome = {"document": json.loads(client.run_config(sys.stdin.read()))}
except (RuntimeError, ValueError) as error:
    outcome = {"error": str(error)}
json.dump(dict(outcome, client=importlib.metadata.version("sglang")), answer)
"""

#: What is kept of the client's document, and the name that it has there. Everything else stays behind: the document
#: can hold the server's arguments, keys included.
FIGURES = {
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
    "tpot_ms": "median_tpot_ms",
    "output_tokens_per_s": "output_throughput",
    "requests_per_s": "request_throughput",
    "duration_s": "duration",
}


class BenchmarkError(Exception):
    """The measurement gave no figures. C(status) is V(failed) or V(timeout)."""

    def __init__(self, message, status="failed"):
        super().__init__(message)
        self.status = status


def request(base_url, model, tokenizer, run, api_key=None):
    """What the client is asked to do for one run."""
    return {
        "backend": "sglang-oai-chat",
        "base_url": base_url.rstrip("/"),
        "served_model_name": model,
        "model": tokenizer,
        "dataset_name": "random-ids",
        "random_input_len": run["input_tokens"],
        "random_output_len": run["output_tokens"],
        "random_range_ratio": 1.0,
        "num_prompts": run["requests"],
        "max_concurrency": run["streams"],
        "seed": run["seed"],
        # Its own warm-up would send the first prompt twice, and the second would come from the prefix cache.
        "warmup_requests": 0,
        "ready_check_timeout_sec": 0,
        "disable_tqdm": True,
        "output_details": True,
        "output_file": os.devnull,
        "headers": ["Authorization: Bearer %s" % api_key] if api_key else [],
        # Without usage the client would take the lengths asked for as those that came.
        "extra_request_body": json.dumps({"stream_options": {"include_usage": True}, "chat_template_kwargs": {"thinking": False}}),
    }


def call(python, wanted, timeout):
    """Run the client; returns (document, version of the client)."""
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HF_HUB_OFFLINE": "1"}
    try:
        child = child_process.start(
            [python, "-I", "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd="/"
        )
    except OSError as error:
        raise BenchmarkError("%s does not run: %s" % (python, error.strerror or error)) from error
    try:
        out, complaint = child.communicate(json.dumps(wanted).encode("utf-8"), timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError("not finished within %d s" % timeout, "timeout") from error
    finally:
        if child.poll() is None:
            child_process.end(child, signals=(signal.SIGKILL,))
    try:
        answer = json.loads(out)
    except ValueError as error:
        lines = complaint.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        raise BenchmarkError("the client ended with status %d: %s" % (child.returncode, lines[-1][:300])) from error
    if "error" in answer:
        raise BenchmarkError("the client failed: %s" % answer["error"][:300])
    return answer["document"], answer["client"]


def figures(document, requests):
    """The figures of a run from the client's document; raises when they would not be those of the load asked for."""
    try:
        kept = {name: float(document[key]) for name, key in FIGURES.items()}
        completed, errors, chunks = int(document["completed"]), document["errors"], [len(gaps) + 1 for gaps in document["itls"]]
        lengths = {"input_tokens": document["input_lens"], "output_tokens": document["output_lens"]}
        came, counted = document["total_output_tokens_retokenized"], document["total_output_tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise BenchmarkError("the client's document is not as expected: %s: %s" % (type(error).__name__, error)) from error
    failed = [error for error in errors if error]
    if completed != requests or failed:
        said = " ".join((failed or ["no reason given"])[0].split())
        raise BenchmarkError("%d of %d requests failed: %s" % (requests - completed, requests, said[:300]))
    # A stream that is cut ends without an error, and the client then takes the length asked for as the one that came.
    usual = statistics.median(chunks)
    short = sum(1 for count in chunks if count < usual / 2)
    if short or came < counted / 2:
        raise BenchmarkError("%d of %d streams were cut: %d tokens came of %d" % (short or requests, requests, came, counted))
    kept.update({name: statistics.fmean(values) for name, values in lengths.items()})
    return {name: round(value, 3) for name, value in kept.items()}


def measure(python, wanted, timeout):
    """{status, reason, figures, client} of one run; never raises for what endpoint or client do."""
    outcome = {"status": "ok", "reason": "", "figures": {}, "client": ""}
    try:
        document, outcome["client"] = call(python, wanted, timeout)
        outcome["figures"] = figures(document, wanted["num_prompts"])
    except BenchmarkError as error:
        outcome.update(status=error.status, reason=str(error))
    return outcome
