# SPDX-License-Identifier: Apache-2.0
"""Times sparse-MLA decode beside its peers on this GPU and prints Markdown tables: CUDA-graph replay, cold L2, medians in µs.

    python3 bench.py [--triton flash_mla_sm120_triton.py] [--out FOLDER] [--sweep]

The shapes, the calls and the verdicts are contest.py's. Peers, as far as they are there: FlashMLA (package flash_mla), SGLang's
Triton kernel for sm_120 (a file of its wheel, loaded by path). Beside them a plain copy that moves as many bytes and our kernel
on a plan without work, which is what a launch costs by this method. "Warm": the same kernels run over
other rows of the same pools before each replay, behind the flush: code and address translations are at hand, the rows are not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys

import torch

import dsv4_sm120.sparse_mla as mla
from dsv4_sm120 import _lib, contestants, timing
from dsv4_sm120.contests import Cell, Deployment
from dsv4_sm120.sparse_mla import contest, reference
from dsv4_sm120.sparse_mla.contest import SCALE, error

DEPLOYMENT = Deployment(heads=(), rows=(), context_length=524_288, operations=())
# name: kind of layer, tokens of context
KINDS = {
    "swa": ("swa", 524_288),
    "c4": ("c4", 524_288),
    "c128 at 64k": ("c128", 65_536),
    "c128 at 512k": ("c128", 524_288),
}
HEADS = {"swa": (16,), "c4": (16, 8, 32, 64), "c128 at 64k": (16, 64), "c128 at 512k": (16, 64)}


def call_of(rows: int, heads: int, kind: str, seed: int = 0) -> dict:
    variant, length = KINDS[kind]
    return contest.timed_call(Cell(variant, rows, length, heads), DEPLOYMENT, seed)


def triton_attention(path: pathlib.Path):
    """Returns SGLang's Triton kernel out of a file of its wheel, called as the engine's function is."""
    spec = importlib.util.spec_from_file_location("peer_triton", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ("q", "k_cache", "indices", "topk_length", "attn_sink", "head_dim_v", "softmax_scale")
    extra = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    return lambda **words: module.flash_mla_sparse_decode_triton(*(words[name] for name in (*names, *extra)))


def empty_call():
    """Our kernel on a plan without work: every block reads one entry and leaves."""
    q = torch.zeros(1, 16, 512, device="cuda", dtype=torch.bfloat16)
    cache = reference.empty_cache(1, 64, device="cuda")
    items = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    indices = torch.zeros(1, 16, dtype=torch.int32, device="cuda")
    out, space = torch.empty_like(q), mla.workspace(q.device)
    decode = _lib.function(mla.LIBRARY, "dsv4_sparse_mla_decode", mla._DECODE)

    def call():
        code = decode(
            q.data_ptr(), 8192, 512, 1, 16, cache.data_ptr(), cache.stride(0), 6, indices.data_ptr(), 16, None, 16,
            None, 0, 0, None, 0, None, 0, None, SCALE, out.data_ptr(), 8192, 512, None, items.data_ptr(), 1,
            space.partial.data_ptr(), space.counters.data_ptr(), 1, 1, 0, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        _lib.check(mla.LIBRARY, "empty", code)

    return call


class Planned:
    """Our call with the step's plan made beforehand, as the step's further layers of a kind find it; `plan` makes it."""

    def __init__(self, c: dict, **form):
        self.c, self.form = c, form
        self.out = mla.sparse_mla_decode(**c, **form)
        self.arguments, self.items, original = None, None, mla._plan

        def kept(*arguments):
            self.arguments = arguments
            return original(*arguments)

        mla._plan = kept
        try:
            mla.sparse_mla_decode(**c, **form)
        finally:
            mla._plan = original
        self.original = original
        if self.arguments:
            self.items = original(*self.arguments).clone()

    def __call__(self):
        mla._plan = lambda *_: self.items
        try:
            return mla.sparse_mla_decode(**self.c, **self.form)
        finally:
            mla._plan = self.original

    def plan(self):
        mla.new_step()
        stream = torch.cuda.current_stream().cuda_stream
        return self.original(*self.arguments[:-1], stream)


def measure(rows: int, heads: int, kind: str, flush, peers: dict, repeats: int) -> dict:
    """Returns one cell's figures. peers: each one's function, called as the engine's is, and how often it is timed."""
    c = call_of(rows, heads, kind)
    words, want = contest.engine_call(c), contest.expected(c)
    tokens = sum(int(c[name][0]) for name in ("topk_length", "extra_topk_length") if name in c)
    moved = rows * (tokens * reference.TOKEN_BYTES + heads * 2048)
    line = {"heads": heads, "kind": kind, "rows": rows, "tokens": tokens, "bytes": moved}
    ours = Planned(c)
    line["error"], line["lse error"] = error(ours.out[0], want[0]), float((ours.out[1].double() - want[1]).abs().max())
    line["splits"] = error(ours.out[0], mla.sparse_mla_decode(**c, cluster=1)[0])
    widths = (contest.WINDOW, c["extra_indices"].shape[1] if "extra_k_cache" in c else 0)
    shape = mla.launch_shape(rows, heads, widths, mla.gpu(0))
    line |= {"cluster": shape.cluster, "head tiles": shape.head_tiles, "units": shape.units}
    source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graphs = {"ours": timing.capture(ours), "ours again": timing.capture(ours), "copy": timing.capture(lambda: target.copy_(source))}
    if ours.arguments:
        graphs["plan"] = timing.capture(ours.plan)
    timed = {repeats: graphs}
    # the same kernels over other rows
    other = call_of(rows, heads, kind, seed=1000)
    twins = {"ours": timing.capture(Planned(other))}
    for name, (attention, times) in peers.items():
        try:
            line[f"{name} error"] = error(attention(**words)[0], want[0])
            timed.setdefault(times, {})[name] = timing.capture(lambda attention=attention: attention(**words))
            if times == repeats:
                other_words = contest.engine_call(other)
                attention(**other_words)
                twins[name] = timing.capture(lambda attention=attention, words=other_words: attention(**words))
        except Exception as failure:  # noqa: BLE001 - a peer that cannot do this shape is left out, and says why
            line[f"{name} failure"] = str(failure)[:200]
    for times, found in timed.items():
        line |= {f"{name} us": value for name, value in timing.medians(found, flush, times).items()}
    for name, twin in twins.items():
        line[f"{name}, warm us"] = timing.medians({name: graphs[name]}, lambda twin=twin: (flush(), twin.replay()), repeats)[name]
    return line


def sweep(rows: int, heads: int, kind: str, flush, repeats: int) -> dict:
    """Every form of the launch, interleaved."""
    c = call_of(rows, heads, kind)
    forms = [(cluster, tiles) for cluster in mla.CLUSTERS for tiles in ((1, 2) if heads % 32 == 0 else (1,))]
    calls = {f"{cluster}x{tiles}": Planned(c, cluster=cluster, head_tiles=tiles) for cluster, tiles in forms}
    line = {"heads": heads, "kind": kind, "rows": rows}
    return line | timing.medians({name: timing.capture(call) for name, call in calls.items()}, flush, repeats)


def printed(line: dict) -> dict[str, str]:
    """Returns a cell's figures as the page shows them: microseconds, errors in 1e-3, the LSE's in 1e-6."""

    def figure(key: str, factor: float = 1, digits: int = 1) -> str:
        return f"{line[key] * factor:,.{digits}f}" if key in line else ""

    def ratio(key: str, to: str) -> str:
        return f"{line[key] / line[to]:.2f}" if key in line and to in line else ""

    pair = sorted((line["ours us"], line["ours again us"]))
    return {
        "heads": str(line["heads"]),
        "rows": str(line["rows"]),
        "form": f"{line['cluster']} x {16 * line['head tiles']}",
        "ours": "-".join(f"{value:.1f}" for value in pair),
        "plan, once a step": figure("plan us"),
        "FlashMLA": figure("flash us"),
        "ours / FlashMLA": ratio("ours us", "flash us"),
        "warm: ours": figure("ours, warm us"),
        "FlashMLA ": figure("flash, warm us"),
        "ratio": ratio("ours, warm us", "flash, warm us"),
        "Triton": figure("triton us", digits=0),
        "copy": figure("copy us"),
        "ours / copy": ratio("ours us", "copy us"),
        "error": figure("error", 1e3, 2),
        "FlashMLA's": figure("flash error", 1e3, 2),
        "lse": figure("lse error", 1e6),
        "1 split : n": figure("splits", 1e3, 3),
        "left out": line.get("flash failure", ""),
    }


def table(lines: list[dict[str, str]]) -> str:
    """Returns a Markdown table, without the columns that no line fills."""
    columns = [key for key in dict.fromkeys(key for line in lines for key in line) if any(line.get(key) for line in lines)]
    body = ["| " + " | ".join(line.get(key, "") for key in columns) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(key.strip() for key in columns) + " |", "|" + "---|" * len(columns), *body])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--triton", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--sweep", action="store_true", help="our kernel alone, in each form of the launch")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--heads", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    flush = timing.Flush()
    peers = {}
    if (flash := contestants.attention_flashmla()) is not None:
        peers["flash"] = (flash, options.repeats)
    else:
        print(f"FlashMLA left out: {contestants.absent['flashmla']}")
    if options.triton:
        peers["triton"] = (triton_attention(options.triton), 7)  # it takes milliseconds
    results = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": []}
    results["empty us"] = timing.medians({"empty": timing.capture(empty_call())}, flush, options.repeats)["empty"]
    results["clusters at once"] = mla.gpu(0).clusters
    print(f"{results['gpu']}, torch {results['torch']}; a launch without work {results['empty us']:.1f} µs", flush=True)
    for kind in options.kinds:
        cells = [(heads, rows) for heads in HEADS[kind] if heads in options.heads for rows in options.rows]
        if options.sweep:
            lines = [sweep(rows, heads, kind, flush, options.repeats) for heads, rows in cells]
            shown = [{key: f"{v:.1f}" if isinstance(v, float) else str(v) for key, v in line.items() if key != "kind"} for line in lines]
        else:
            lines = [measure(rows, heads, kind, flush, peers, options.repeats) for heads, rows in cells]
            shown = [printed(line) for line in lines]
        results["cells"] += lines
        if lines:
            print(f"\n## {kind}\n\n{table(shown)}", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sparse_mla.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
