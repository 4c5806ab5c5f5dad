# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks the servers that servers.py started. Every subcommand prints what it found and writes it to --out as JSON.

    measure.py info NAME                    what topology_check says of one server, and the log's key lines
    measure.py greedy NAME                  32 prompts, greedy, with the 20 likeliest tokens of each step
    measure.py compare ONE.json TWO.json    how two greedy runs agree (ONE with itself and --at-once 1 8: what batching alone does)
    measure.py speed NAME --context N       decode speed of one request
    measure.py profile NAME --context N     GPU time of a decode step by kernel
    measure.py pair [--quick] [--kill]      prefill, decode and router: chat_probe, topology_check, and a decode half killed in a stream
    measure.py mtp NAME                     acceptance of the draft
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import http.client
import json
import math
import os
import pathlib
import random
import re
import statistics
import sys
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import servers  # noqa: E402
from ansible_collections.blackwell.dsv4.plugins.module_utils import gpu_info, probes, topology  # noqa: E402
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import System  # noqa: E402

TOP = 20
KEY_LINES = re.compile(r"max_total_num_tokens|dsv4_sm120|dsv4_gpu_test|ready to roll|Capture cuda graph end|Load weight end|goes to the engine|Traceback|"
                       r"Error|acc(ept)?.len|KVPoll|nextn_moe|^==exit==", re.IGNORECASE)


def post(url: str, path: str, body: dict, timeout: float = 600, headers: dict | None = None):
    """Sends one JSON request; returns the answer's JSON."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text[:1] in b"{[" else text.decode()


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that no cache has seen: random, without special tokens."""
    source = random.Random(seed)
    return [0] + [source.randrange(1000, 120000) for dummy in range(length - 1)]


# --- info ----------------------------------------------------------------------------------------------------------------


class Started(topology.Host):
    """The host of topology_check where servers.py, not systemd, started the processes: it asks that for pids and logs."""

    def __init__(self, names: dict[str, str], key: str | None):
        system = System(timeout=30)

        def gpus():
            return gpu_info.gather(system, gpu_info.load_nvml("")[0], ("nvml", "nvidia-smi"), peers=False, limit=30)

        super().__init__(system, api_key=key, gpu_facts=gpus)
        self.names = names

    def units(self, names):
        return None

    def pids(self, unit, properties):
        name = self.names.get(unit)
        try:
            session = int(servers.pid_file(name).read_text()) if name else 0
        except (OSError, ValueError):
            return []
        found = []
        for entry in os.listdir(self.proc):
            if entry.isdigit():
                stat = self.read(f"{self.proc}/{entry}/stat")
                if stat and int(stat.rpartition(")")[2].split()[3]) == session:
                    found.append(int(entry))
        return sorted(found) if session else []

    def start_log(self, unit, properties):
        name = self.names.get(unit)
        return (servers.DIR / "logs" / f"{name}.log").read_text(errors="replace").splitlines() if name else None


def key_lines(name: str, most: int = 40) -> list[str]:
    """The lines of a server's log that tell what it is."""
    lines = (servers.DIR / "logs" / f"{name}.log").read_text(errors="replace").rpartition("==start==")[2].splitlines()
    found = [line[:400] for line in lines if KEY_LINES.search(line)]
    return found if len(found) <= most else [*found[:most // 2], *found[-most // 2:]]


def watch(mode: str, names: dict[str, str], plan: dict) -> topology.Topology:
    """topology_check's logic over a plan."""
    units = {plan["instances"][one]["unit"]: name for one, name in names.items()}
    return topology.Topology(plan, mode, Started(units, servers.key() if mode == "pd" else None), settle_seconds=0, min_kv_tokens=100000)


def show_checks(checks: list[dict]) -> None:
    for check in checks:
        print(f"  {check['status']:<12} {check['id']:<24} {check['reason']:<22} {check['evidence'][:200]}")


def info(given) -> dict:
    """One single server against its plan."""
    server = servers.SERVERS[given.name]
    plan = servers.plan(server)
    looked = watch("single", {"single": given.name}, plan)
    checks = [dict(check) for check in looked.check()]
    show_checks(checks)
    document, _why = looked._info("single")
    keep = ("version", "context_length", "tp_size", "mem_fraction_static", "chunked_prefill_size", "attention_backend", "moe_runner_backend",
            "fp8_gemm_runner_backend", "kv_cache_dtype", "page_size", "max_total_num_tokens", "max_running_requests", "cuda_graph_bs_decode",
            "cuda_graph_backend_decode", "reasoning_parser", "tool_call_parser", "speculative_algorithm", "sampling_backend", "dsa_topk_backend",
            "disaggregation_mode", "enable_metrics")
    seen = {key: document[key] for key in keep if document and key in document}
    print(json.dumps(seen))
    lines = key_lines(given.name)
    print("\n".join(lines))
    return {"checks": checks, "server_info": seen, "log": lines, "argv": plan["instances"]["single"]["argv"]}


# --- greedy --------------------------------------------------------------------------------------------------------------


def lengths(longest: int) -> list[int]:
    """32 prompt lengths from a few tokens to the longest: around windows and page borders, then whole prefill chunks and a rest. The
    rests repeat, because on Hopper each new number of rows makes the engine's GEMM library compile for seconds."""
    short = [5, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 700, 254, 126, 62, 510]
    chunks = [(1, 5), (1, 64), (1, 513), (2, 17), (2, 257), (3, 129), (4, 65), (5, 511), (6, 255), (8, 127), (12, 63), (15, 700), (14, 2656)]
    return [*short, *(4096 * whole + rest for whole, rest in chunks), longest]


def generate(url: str, ids: list[int], tokens: int) -> dict:
    """One greedy request; returns tokens and the likeliest tokens of each step."""
    answer = post(url, "/generate", {"input_ids": ids, "return_logprob": True, "top_logprobs_num": TOP, "logprob_start_len": -1,
                                     "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}})
    meta = answer["meta_info"]
    return {"tokens": [item[1] for item in meta["output_token_logprobs"]],
            "top": [[[item[1], item[0]] for item in step] for step in meta["output_top_logprobs"]]}


def greedy(given) -> dict:
    """All prompts one at a time, eight at a time, and all at once."""
    url = servers.url(given.name)
    sizes = lengths(given.longest)
    prompts = [prompt(size, 1000 + at) for at, size in enumerate(sizes)]
    # Compiles what is not yet compiled before anything is measured or compared.
    for size in (4096,):
        generate(url, prompt(size, 1), 1)
    found: dict = {"lengths": sizes, "tokens": given.tokens, "runs": {}}
    for at_once in given.at_once:
        post(url, "/flush_cache", {})
        time.sleep(1)
        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            found["runs"][str(at_once)] = list(pool.map(lambda ids: generate(url, ids, given.tokens), prompts))
        if given.out:
            given.out.write_text(json.dumps(found))
        print(f"{given.name}: {len(prompts)} prompts, {at_once} at once: {time.monotonic() - begun:.1f} s", flush=True)
    found["log"] = [line for line in key_lines(given.name) if "dsv4_sm120" in line or "goes to the engine" in line]
    return found


def agreement(one: dict, two: dict) -> dict:
    """How two runs of one prompt agree, up to and with the first step at which their tokens differ: differences of the logprobs of the first
    token (the prefill's) and of the later ones."""
    result: dict = {"steps": 0, "differs_at": None, "missing": 0, "first": [], "later": []}
    for step, (left, right) in enumerate(zip(one["top"], two["top"])):
        there = dict(right)
        for token, value in left:
            if token not in there:
                result["missing"] += 1
                continue
            difference = abs(value - there[token])
            result["later" if step else "first"].append(difference if math.isfinite(difference) else math.inf)
        result["steps"] = step + 1
        if one["tokens"][step] != two["tokens"][step]:
            values = dict(left)
            mine, other = one["tokens"][step], two["tokens"][step]
            result.update(differs_at=step, margin=values[mine] - values[other] if other in values else math.inf)
            break
    return result


def mean(values: list[float]) -> float:
    """Their mean; there may be none, when first tokens differ."""
    return statistics.fmean(values) if values else math.nan


def tail(values: list[float], part: float) -> float:
    """The value below which that part of the values lies."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else math.nan


def compare(given) -> dict:
    """Prints how far the probabilities of two runs lie apart, by length of the prompt; --at-once A B holds one way of batching against another."""
    one, two = (json.loads(pathlib.Path(path).read_text()) for path in (given.one, given.two))
    pairs = [given.at_once] if given.at_once else [(key, key) for key in one["runs"] if key in two["runs"]]
    found: dict = {}
    print("| at once | prompts of | prompts | first token: mean | later tokens: mean | 99 % | worst | same to the end | not in the other's top 20 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for left, right in pairs:
        rows = [agreement(a, b) for a, b in zip(one["runs"][left], two["runs"][right])]
        found[f"{left}-{right}"] = rows
        for least, most in ((0, 1000), (1000, 20000), (20000, 1 << 30)):
            group = [row for row, length in zip(rows, one["lengths"]) if least <= length < most]
            lengths_here = [length for length in one["lengths"] if least <= length < most]
            if not group:
                continue
            first, later = ([value for row in group for value in row[which]] for which in ("first", "later"))
            print(f"| {left}, {right} | {min(lengths_here)} to {max(lengths_here)} | {len(group)} | {mean(first):.3f} | {mean(later):.3f} | "
                  f"{tail(later, 0.99):.2f} | {max(first + later):.2f} | {sum(row['differs_at'] is None for row in group)} | "
                  f"{sum(row['missing'] for row in group)} of {len(first) + len(later)} |")
    return found


# --- speed ---------------------------------------------------------------------------------------------------------------


def stream(url: str, ids: list[int], tokens: int) -> list[float]:
    """One streamed greedy request; returns the times at which tokens arrived, one entry a token."""
    body = {"input_ids": ids, "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    times: list[float] = []
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                count = json.loads(line[6:])["meta_info"]["completion_tokens"]
                times += [time.perf_counter()] * (count - len(times))
    return times


def speed(given) -> dict:
    """Milliseconds a token while one request decodes: mean over a run without its first 32 tokens, best and all of several runs."""
    url = servers.url(given.name)
    found: dict = {"name": given.name, "context": given.context, "milliseconds": []}
    for _attempt in range(given.repeats):
        times = stream(url, prompt(given.context, 7000), given.tokens)  # the same prompt: prefilled once
        found["milliseconds"].append(1000 * (times[-1] - times[32]) / (len(times) - 33))
    found["median"] = statistics.median(found["milliseconds"])
    print(f"{given.name} at {given.context}: {found['median']:.3f} ms a token; runs " + " ".join(f"{v:.3f}" for v in found["milliseconds"]), flush=True)
    return found


def profile(given) -> dict:
    """GPU time of one decode step by kernel, from the engine's own profiler."""
    url = servers.url(given.name)
    folder = servers.DIR / "profile" / given.name
    folder.mkdir(parents=True, exist_ok=True)
    steps = 20
    thread = threading.Thread(target=stream, args=(url, prompt(given.context, 9000), 400))
    thread.start()
    time.sleep(1.5)
    post(url, "/start_profile", {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"]})
    thread.join()
    end = time.monotonic() + 60
    while not (traces := sorted(folder.rglob("*.trace.json.gz"))) and time.monotonic() < end:
        time.sleep(1)
    time.sleep(2)
    events = json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"]
    total: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            entry = total.setdefault(event["name"], [0.0, 0])
            entry[0] += event["dur"]
            entry[1] += 1
    found = {"name": given.name, "context": given.context, "microseconds_a_step": sum(v[0] for v in total.values()) / steps,
             "kernels": {name: [round(v[0] / steps, 2), v[1] / steps] for name, v in sorted(total.items(), key=lambda item: -item[1][0])[:40]}}
    print(f"{given.name} at {given.context}: {found['microseconds_a_step']:.0f} us of kernels a step")
    for name, (microseconds, calls) in list(found["kernels"].items())[:15]:
        print(f"{microseconds:9.1f} us {calls:6.1f} calls  {name[:110]}")
    return found


# --- the pair ------------------------------------------------------------------------------------------------------------


def chat(url: str, text: str, tokens: int, streamed: bool = False, timeout: float = 120):
    """One chat completion through the router."""
    body = {"model": "deepseek-v4-flash", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, "stream": streamed}
    headers = {"Authorization": "Bearer " + servers.key()}
    if not streamed:
        return post(url, "/v1/chat/completions", body, timeout, headers)
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    chunks, ended, begun = 0, "closed", time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            for line in answer:
                chunks += line.startswith(b"data: {")
                if b"[DONE]" in line:
                    ended = "done"
                elif b'"error"' in line:
                    ended = "error event"
    except (OSError, http.client.HTTPException) as error:
        ended = f"{type(error).__name__}: {error}"
    return {"chunks": chunks, "ended": ended, "seconds": round(time.monotonic() - begun, 2)}


def pair(given) -> dict:
    """The pair behind the router."""
    plan = servers.plan(servers.SERVERS["router"])
    url = plan["endpoint"]["url"]
    looked = watch("pd", {"prefill": "prefill", "decode": "decode", "router": "router"}, plan)
    before = looked.snapshot()
    first = chat(url, "What is 17*23?", 32)
    print(json.dumps(first)[:600])
    found: dict = {"first": first}
    if given.quick:
        found["answers"] = [chat(url, f"What is {number}*23?", 32, number % 2 == 1) for number in range(6)]
        requests = 1 + len(found["answers"])
    else:
        options = probes.Options(base_url=url, api_key=servers.key(), model=plan["served_model_name"], repeat=1, timeout=given.timeout,
                                 max_tokens=given.max_tokens, context_length=plan["instances"]["decode"]["context_length"],
                                 role_ports={"prefill": 30000, "decode": 30002}, readiness_path="/readiness",
                                 workers=[{"name": one, "url": plan["instances"][one]["url"], "health_path": "/health"} for one in ("prefill", "decode")])
        suite = probes.Suite(options)
        found["probes"] = [dict(check) for check in suite.run()]
        found["summary"] = suite.summary()
        requests = found["summary"]["requests"]
        print("chat_probe", json.dumps(found["summary"])[:800])
        for check in found["probes"]:
            print(f"  {check['status']:<12} {check['id']:<24} {check['reason']:<22} finish {check.get('finish')}  {check['evidence'][:160]}")
    found["topology"] = [dict(check) for check in looked.check(before, requests)]
    print("topology_check")
    show_checks(found["topology"])
    if given.kill:
        result: dict = {}
        thread = threading.Thread(target=lambda: result.update(chat(url, "Count from 1 to 2000.", 20000, True, 60)))
        thread.start()
        time.sleep(3)
        servers.stop("decode", True)
        killed = time.monotonic()
        time.sleep(1)
        found["after_kill"] = [dict(c) for c in watch("pd", {"prefill": "prefill", "decode": "decode", "router": "router"}, plan).check()]
        show_checks([c for c in found["after_kill"] if c["status"] != "pass"])
        servers.start("decode")
        left = servers.wait(["decode"], 240)
        thread.join(90)
        found["stream"] = result
        print("the stream that was cut:", json.dumps(result), "decode back after", f"{time.monotonic() - killed:.0f} s", left or "")
        found["again"] = None
        for _try in range(20):
            try:
                found["again"] = chat(url, "What is 19*21?", 16, timeout=30)
                break
            except OSError as error:
                print("not yet:", error)
                time.sleep(3)
        found["seconds_to_answer"] = round(time.monotonic() - killed, 1)
        print("answer again after", found["seconds_to_answer"], "s:", json.dumps(found["again"])[:300])
    return found


# --- MTP -----------------------------------------------------------------------------------------------------------------


def mtp(given) -> dict:
    """Decodes a few prompts and reads what the engine says of the draft; a server that ends itself is seen too."""
    url = servers.url(given.name)
    found: dict = {"answers": []}
    for at, size in enumerate((20, 1000, 5000)):
        try:
            answer = post(url, "/generate", {"input_ids": prompt(size, 500 + at), "sampling_params": {
                "temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}, 120)
        except (OSError, http.client.HTTPException) as error:
            found["ended"] = f"{type(error).__name__}: {error}"
            break
        meta = answer["meta_info"]
        found["answers"].append({"prompt": size, **{key: value for key, value in meta.items() if key.startswith("spec_") or key in (
            "completion_tokens", "finish_reason", "e2e_latency")}})
        print(json.dumps(found["answers"][-1]), flush=True)
    end = time.monotonic() + 10  # the guard looks once in a while
    while servers.alive(given.name) and time.monotonic() < end:
        time.sleep(1)
    found["alive"] = servers.alive(given.name)
    print("alive:", found["alive"], found.get("ended", ""))
    document = {}
    if found["alive"]:
        with urllib.request.urlopen(url + "/server_info", timeout=30) as answer:
            document = json.loads(answer.read())
    found["states"] = [{key: state[key] for key in state if "accept" in key} for state in document.get("internal_states") or []]
    print(json.dumps(found["states"]))
    print("\n".join(key_lines(given.name)))
    return found


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("info")
    one.add_argument("name")
    one = commands.add_parser("greedy")
    one.add_argument("name")
    one.add_argument("--longest", type=int, default=200709)
    one.add_argument("--tokens", type=int, default=24)
    one.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32])
    one = commands.add_parser("compare")
    one.add_argument("one")
    one.add_argument("two")
    one.add_argument("--at-once", nargs=2, metavar=("A", "B"))
    one = commands.add_parser("speed")
    one.add_argument("name")
    one.add_argument("--context", type=int, default=1024)
    one.add_argument("--tokens", type=int, default=224)
    one.add_argument("--repeats", type=int, default=3)
    one = commands.add_parser("profile")
    one.add_argument("name")
    one.add_argument("--context", type=int, default=1024)
    one = commands.add_parser("pair")
    one.add_argument("--timeout", type=float, default=120)
    one.add_argument("--max-tokens", type=int, default=64)
    one.add_argument("--kill", action="store_true")
    one.add_argument("--quick", action="store_true", help="six chat completions in place of chat_probe")
    one = commands.add_parser("mtp")
    one.add_argument("name")
    given = parser.parse_args()
    found = {"info": info, "greedy": greedy, "compare": compare, "speed": speed, "profile": profile, "pair": pair, "mtp": mtp}[given.command](given)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
