# SPDX-License-Identifier: Apache-2.0
"""Times sparse-MLA decode beside its peers on this GPU and prints Markdown tables: CUDA-graph replay, cold L2, medians in µs.

    python3 bench.py [--triton flash_mla_sm120_triton.py] [--out FOLDER] [--sweep]

Peers, as far as they are there: FlashMLA (package flash_mla; its kernel takes 64 heads, so fewer are padded outside the timed
call), SGLang's Triton kernel for sm_120 (a file of its wheel, loaded by path). Beside them a plain copy that moves as many
bytes and our kernel on a plan without work, which is what a launch costs by this method. Errors are against float64 on the
dequantised cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys

import torch

import dsv4_sm120.sparse_mla as mla
from dsv4_sm120 import _lib, timing
from dsv4_sm120.sparse_mla import reference

SCALE = 512**-0.5
# name: (page tokens of the second cache, its index width at a context of 512k, its length); None: no second cache
KINDS = {
    "swa": None,
    "c4": (64, 512, 512),
    "c128 at 64k": (2, 4096, 512),
    "c128 at 512k": (2, 4096, 4096),
}
CELLS = [(16, kind) for kind in KINDS] + [(64, kind) for kind in KINDS if kind != "swa"] + [(8, "c4"), (32, "c4")]
POOL = 200_000


def case(rows: int, heads: int, kind: str, pools: dict, seed: int) -> dict:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = {
        "q": torch.randn(rows, heads, 512, device="cuda", generator=generator).bfloat16(),
        "k_cache": pools[256],
        # a window is a run of neighbours
        "indices": (torch.randint(0, POOL // 256 - 1, (rows, 1), device="cuda", generator=generator) * 256 + torch.arange(128, device="cuda")).int(),
        "topk_length": torch.full((rows,), 128, device="cuda", dtype=torch.int32),
        "attn_sink": torch.randn(heads, device="cuda", generator=generator),
    }
    if KINDS[kind]:
        page, width, length = KINDS[kind]
        indices = torch.full((rows, width), -1, device="cuda", dtype=torch.int32)
        for i in range(rows):
            indices[i, :length] = torch.randperm(POOL, device="cuda", generator=generator)[:length].int()
        made |= {
            "extra_k_cache": pools[page],
            "extra_indices": indices,
            "extra_topk_length": torch.full((rows,), length, device="cuda", dtype=torch.int32),
        }
    return made


def reference_of(c: dict):
    scopes = [(c["k_cache"], c["indices"], c["topk_length"])]
    if "extra_k_cache" in c:
        scopes.append((c["extra_k_cache"], c["extra_indices"], c["extra_topk_length"]))
    outs = []
    for i in range(c["q"].shape[0]):
        at = slice(i, i + 1)
        outs.append(reference.attention(c["q"][at], [(k, x[at], n[at]) for k, x, n in scopes], c["attn_sink"], SCALE))
    return torch.cat([o for o, _ in outs]), torch.cat([l for _, l in outs])


def error(out, want) -> float:
    return ((out.double() - want.double()).norm() / want.double().norm()).item()


def flash_mla_call(c: dict):
    import flash_mla

    rows, heads, _ = c["q"].shape
    padded = max(heads, 64)
    q = torch.zeros(rows, 1, padded, 512, device="cuda", dtype=torch.bfloat16)
    q[:, 0, :heads] = c["q"]
    sink = torch.zeros(padded, device="cuda")
    sink[:heads] = c["attn_sink"]
    # filled by the first call: its own plan, made once a step, is not in the captured graph
    meta = flash_mla.get_mla_metadata()[0]
    extra = {}
    if "extra_k_cache" in c:
        extra = {
            "extra_k_cache": c["extra_k_cache"].view(torch.float8_e4m3fn),
            "extra_indices_in_kvcache": c["extra_indices"].unsqueeze(1),
            "extra_topk_length": c["extra_topk_length"],
        }
    indices = c["indices"].unsqueeze(1)
    cache = c["k_cache"].view(torch.float8_e4m3fn)

    def call():
        return flash_mla.flash_mla_with_kvcache(
            q=q, k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=meta,
            softmax_scale=SCALE, is_fp8_kvcache=True, indices=indices, attn_sink=sink, topk_length=c["topk_length"],
            use_legacy=True, **extra,
        )[0][:, 0, :heads]  # fmt: skip

    return call


def triton_call(module, c: dict):
    extra = (None, None, None)
    if "extra_k_cache" in c:
        extra = (c["extra_k_cache"].view(torch.float8_e4m3fn), c["extra_indices"].unsqueeze(1), c["extra_topk_length"])
    q, cache, indices = c["q"].unsqueeze(1), c["k_cache"].view(torch.float8_e4m3fn), c["indices"].unsqueeze(1)
    return lambda: module.flash_mla_sparse_decode_triton(
        q, cache, indices, c["topk_length"], c["attn_sink"], 512, SCALE, *extra
    )[0][:, 0]


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


def measure(rows: int, heads: int, kind: str, pools: dict, flush, peers: dict, triton_module, repeats: int) -> dict:
    c = case(rows, heads, kind, pools, seed=rows)
    tokens = 128 + (KINDS[kind][2] if KINDS[kind] else 0)
    moved = rows * (tokens * 584 + heads * 2048)
    line = {"heads": heads, "kind": kind, "rows": rows, "tokens": tokens, "bytes": moved}
    want, want_lse = reference_of(c)
    ours = Planned(c)
    line["error"], line["lse error"] = error(ours.out[0], want), (ours.out[1].double() - want_lse).abs().max().item()
    line["splits"] = error(ours.out[0], mla.sparse_mla_decode(**c, cluster=1)[0])
    widths = (128, c["extra_indices"].shape[1] if "extra_k_cache" in c else 0)
    shape = mla.launch_shape(rows, heads, widths, mla.gpu(0))
    line |= {"cluster": shape.cluster, "head tiles": shape.head_tiles, "units": shape.units}
    source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graphs = {"ours": timing.capture(ours), "ours again": timing.capture(ours), "copy": timing.capture(lambda: target.copy_(source))}
    if ours.arguments:
        graphs["plan"] = timing.capture(ours.plan)
    for name, make in peers.items():
        try:
            call = make(c)
            line[f"{name} error"] = error(call(), want)
            graphs[name] = timing.capture(call)
        except Exception as failure:  # a peer that cannot do this shape is left out, and says why
            line[f"{name} failure"] = str(failure)[:200]
    line |= {f"{name} us": value for name, value in timing.medians(graphs, flush, repeats).items()}
    if triton_module:
        call = triton_call(triton_module, c)
        line["triton error"] = error(call(), want)
        line["triton us"] = statistics.median(timing.times({"triton": timing.capture(call)}, flush, 7)["triton"])
    return line


def sweep(rows: int, heads: int, kind: str, pools: dict, flush, repeats: int) -> dict:
    """Every form of the launch, interleaved."""
    c = case(rows, heads, kind, pools, seed=rows)
    forms = [(cluster, tiles) for cluster in mla.CLUSTERS for tiles in ((1, 2) if heads % 32 == 0 else (1,))]
    calls = {f"{cluster}x{tiles}": Planned(c, cluster=cluster, head_tiles=tiles) for cluster, tiles in forms}
    line = {"heads": heads, "kind": kind, "rows": rows}
    return line | timing.medians({name: timing.capture(call) for name, call in calls.items()}, flush, repeats)


def table(lines: list[dict], columns: dict[str, str]) -> str:
    """Returns a Markdown table; columns: {heading: key}, left out where no line has it."""
    columns = {heading: key for heading, key in columns.items() if any(key in line for line in lines)}

    def cell(value) -> str:
        if value is None:
            return ""
        return f"{value:,.1f}" if isinstance(value, float) and value >= 1e-1 else f"{value:.2e}" if isinstance(value, float) else str(value)

    body = ["| " + " | ".join(cell(line.get(key)) for key in columns.values()) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body])


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
    pools = {p: reference.random_cache(-(-POOL // p), p, device="cuda") for p in (256, 64, 2)}
    triton_module = None
    if options.triton:
        spec = importlib.util.spec_from_file_location("peer_triton", options.triton)
        triton_module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(triton_module)
    peers = {}
    try:
        import flash_mla  # noqa: F401

        peers["flash"] = flash_mla_call
    except Exception as failure:  # a peer that is not there is only left out
        print(f"FlashMLA left out: {failure!r}"[:300])
    results = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": []}
    results["empty us"] = timing.medians({"empty": timing.capture(empty_call())}, flush, options.repeats)["empty"]
    results["clusters at once"] = mla.gpu(0).clusters
    print(f"{results['gpu']}, torch {results['torch']}; a launch without work {results['empty us']:.1f} µs", flush=True)
    for heads, kind in CELLS:
        if heads not in options.heads or kind not in options.kinds:
            continue
        lines = []
        for rows in options.rows:
            if options.sweep:
                lines.append(sweep(rows, heads, kind, pools, flush, options.repeats))
            else:
                lines.append(measure(rows, heads, kind, pools, flush, peers, triton_module, options.repeats))
                if "flash us" in lines[-1]:
                    lines[-1]["ours / flash"] = lines[-1]["ours us"] / lines[-1]["flash us"]
                if "triton us" in lines[-1]:
                    lines[-1]["triton / ours"] = lines[-1]["triton us"] / lines[-1]["ours us"]
        results["cells"] += lines
        print(f"\n{heads} heads, {kind}\n")
        if options.sweep:
            print(table(lines, {key: key for key in lines[0] if key not in ("heads", "kind")}), flush=True)
            continue
        print(
            table(
                lines,
                {
                    "rows": "rows", "cluster": "cluster", "head tiles": "head tiles", "ours": "ours us", "again": "ours again us",
                    "plan, once a step": "plan us", "FlashMLA": "flash us", "ours / FlashMLA": "ours / flash", "Triton": "triton us",
                    "times faster": "triton / ours", "copy": "copy us", "error": "error", "FlashMLA's": "flash error",
                    "Triton's": "triton error", "lse": "lse error", "1 split against n": "splits", "left out": "flash failure",
                },
            ),
            flush=True,
        )  # fmt: skip
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sparse_mla.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
