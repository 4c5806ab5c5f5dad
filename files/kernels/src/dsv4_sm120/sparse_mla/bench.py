# SPDX-License-Identifier: Apache-2.0
"""Times sparse-MLA decode beside its peers on this GPU: CUDA-graph replay, L2 flushed before each, medians in µs.

    python3 bench.py [--triton flash_mla_sm120_triton.py] [--out FOLDER] [--sweep]

Peers, as far as they are there: FlashMLA (package flash_mla, its kernel takes 64 heads, so 16 are padded), SGLang's Triton
kernel for sm_120 (a file of its wheel, loaded by path). Beside them a plain copy that moves as many bytes and a kernel that
leaves at once, which is what the method itself costs. Errors are against float64 on the dequantised cache.
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
from dsv4_sm120 import _lib
from dsv4_sm120.sparse_mla import reference

SCALE = 512**-0.5
# name: (page tokens of the second cache, its index width, its length); None: no second cache
KINDS = {
    "swa": None,
    "c4 512": (64, 512, 512),
    "c128 at 64k": (2, 4096, 512),
    "c128 at 512k": (2, 4096, 4096),
    "c128 mixed": (2, 4096, None),
}
POOL = 200_000


def graph_of(function):
    function(), function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


class Timer:
    """Medians of single replays with a flushed L2, and the spread between their halves."""

    def __init__(self):
        self.flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def __call__(self, graph, repeats: int = 120) -> float:
        for _ in range(5):
            graph.replay()
        pairs = []
        for _ in range(repeats):
            self.flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def chain(function_of, count: int):
    """A graph of `count` calls one after the other, on other inputs each: what a layer costs inside a step."""
    for i in range(count):
        function_of(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            function_of(i)
    return graph


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
        lengths = [length] * rows if length else [(32, 512, 1024, 4096)[i % 4] for i in range(rows)]
        indices = torch.full((rows, width), -1, device="cuda", dtype=torch.int32)
        for i, n in enumerate(lengths):
            indices[i, :n] = torch.randperm(POOL, device="cuda", generator=generator)[:n].int()
        made |= {
            "extra_k_cache": pools[page],
            "extra_indices": indices,
            "extra_topk_length": torch.tensor(lengths, device="cuda", dtype=torch.int32),
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
    return ((out.double() - want).norm() / want.norm()).item()


def flash_mla_call(c: dict):
    import flash_mla

    rows, heads, _ = c["q"].shape
    padded = max(heads, 64)
    q = torch.zeros(rows, 1, padded, 512, device="cuda", dtype=torch.bfloat16)
    q[:, 0, :heads] = c["q"]
    sink = torch.zeros(padded, device="cuda")
    sink[:heads] = c["attn_sink"]
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
    c = {"q": torch.zeros(1, 16, 512, device="cuda", dtype=torch.bfloat16)}
    cache = reference.empty_cache(1, 64, device="cuda")
    items = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    indices = torch.zeros(1, 16, dtype=torch.int32, device="cuda")
    out, space = torch.empty_like(c["q"]), mla.workspace(c["q"].device)
    decode = _lib.function(mla.LIBRARY, "dsv4_sparse_mla_decode", mla._DECODE)

    def call():
        code = decode(
            c["q"].data_ptr(), 8192, 512, 1, 16, cache.data_ptr(), cache.stride(0), 6, indices.data_ptr(), 16, None, 16,
            None, 0, 0, None, 0, None, 0, None, SCALE, out.data_ptr(), 8192, 512, None, items.data_ptr(), 1,
            space.partial.data_ptr(), space.counters.data_ptr(), 1, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        _lib.check(mla.LIBRARY, "empty", code)

    return call


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--triton", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--sweep", action="store_true", help="our kernel alone, over clusters")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 64])
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    timer = Timer()
    pools = {p: reference.random_cache(-(-POOL // p), p, device="cuda") for p in (256, 64, 2)}
    triton_module = None
    if options.triton:
        spec = importlib.util.spec_from_file_location("peer_triton", options.triton)
        triton_module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(triton_module)
    try:
        import flash_mla  # noqa: F401

        flash = True
    except Exception as failure:  # a peer that is not there is only left out
        print(f"FlashMLA left out: {failure!r}"[:300])
        flash = False
    results = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": []}
    results["empty_us"] = timer(graph_of(empty_call()))
    print(f"{results['gpu']}, torch {results['torch']}; empty kernel {results['empty_us']:.1f} us", flush=True)
    for heads in options.heads:
        for kind in options.kinds:
            for rows in options.rows:
                c = case(rows, heads, kind, pools, seed=rows)
                tokens = rows * 128 + (int(c["extra_topk_length"].sum()) if "extra_k_cache" in c else 0)
                moved = tokens * 584 + rows * heads * 512 * 4
                line = {"heads": heads, "kind": kind, "rows": rows, "tokens": tokens, "bytes": moved}
                want, want_lse = reference_of(c)
                out, lse = mla.sparse_mla_decode(**c)
                torch.cuda.synchronize()
                line["error"], line["lse_error"] = error(out, want), (lse.double() - want_lse).abs().max().item()
                if options.sweep:
                    for cluster in mla.CLUSTERS:
                        line[f"cluster {cluster}"] = timer(graph_of(lambda: mla.sparse_mla_decode(**c, cluster=cluster)), 60)
                chosen = mla.launch_shape(rows, heads, (128, c["extra_indices"].shape[1] if "extra_k_cache" in c else 0), mla.gpu(0))
                line["cluster"], line["units"] = chosen.cluster, chosen.units
                if chosen.planned:
                    # the plan is made once a step: time the layer with and without it
                    line["with_plan_us"] = timer(graph_of(lambda: mla.sparse_mla_decode(**c)))
                    mla.sparse_mla_decode(**c)
                    original = mla._plan
                    items = next(v for k, v in mla.workspace(c["q"].device).plans.items() if k[0] == chosen)
                    mla._plan = lambda *_: items
                    try:
                        line["ours_us"] = timer(graph_of(lambda: mla.sparse_mla_decode(**c)))
                        line["ours_again_us"] = timer(graph_of(lambda: mla.sparse_mla_decode(**c)))
                    finally:
                        mla._plan = original
                else:
                    line["ours_us"] = timer(graph_of(lambda: mla.sparse_mla_decode(**c)))
                    line["ours_again_us"] = timer(graph_of(lambda: mla.sparse_mla_decode(**c)))
                source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device="cuda")
                target = torch.empty_like(source)
                line["copy_us"] = timer(graph_of(lambda: target.copy_(source)))
                if not options.sweep:
                    others = [case(rows, heads, kind, pools, seed=100 + i) for i in range(8)]
                    line["ours_chain_us"] = timer(chain(lambda i: mla.sparse_mla_decode(**others[i % 8]), 24), 40) / 24
                    if flash:
                        try:
                            call = flash_mla_call(c)
                            line["flash_error"] = error(call(), want)
                            line["flash_us"] = timer(graph_of(call))
                            calls = [flash_mla_call(o) for o in others]
                            line["flash_chain_us"] = timer(chain(lambda i: calls[i % 8](), 24), 40) / 24
                        except Exception as failure:
                            line["flash_failure"] = str(failure)[:200]
                    if triton_module and kind in ("swa", "c4 512"):
                        call = triton_call(triton_module, c)
                        line["triton_error"] = error(call(), want)
                        line["triton_us"] = timer(graph_of(call), 20)
                results["cases"].append(line)
                print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in line.items()), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sparse_mla.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
