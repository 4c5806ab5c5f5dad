# SPDX-License-Identifier: Apache-2.0
"""Times every kernel against its peers on the GPU at hand and writes a Markdown page.

DSV4_SM120_LIB=DIR DSV4_SM120_PEERS=DIR python3 benchmarks/run.py --out BENCHMARKS.md [--repeats 40]
"""

from __future__ import annotations

import argparse
import gc
import math
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import contestants  # noqa: E402
import torch  # noqa: E402

from dsv4_sm120 import timing  # noqa: E402
from dsv4_sm120.indexer import bench as indexer_bench  # noqa: E402
from dsv4_sm120.indexer import contest as indexer_contest  # noqa: E402
from dsv4_sm120.topk import bench as topk_bench  # noqa: E402
from dsv4_sm120.topk import contest as topk_contest  # noqa: E402

CELLS = [(batch, kind) for batch in (1, 4, 16, 64) for kind in (1024, 16384, 131072)]
MIXED = [(4, "mixed"), (16, "mixed"), (64, "mixed")]
CONTEXT = {1024: "4k", 16384: "64k", 131072: "512k", "mixed": "mixed"}


def table(rows: list[dict], first: list[str]) -> str:
    """Returns a Markdown table; columns in order of first appearance, times with one decimal."""
    columns = list(first)
    for row in rows:
        columns += [name for name in row if name not in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = []
        for name in columns:
            value = row.get(name, "")
            cells.append(("wrong" if math.isnan(value) else f"{value:.1f}") if isinstance(value, float) else str(value))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def indexers(batch: int) -> dict:
    """Returns the indexers that ours is timed against at a batch, None for those that are missing."""
    return {**indexer_contest.scorers(batch), "triton": contestants.indexer_triton()}


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="time the kernels against their peers", allow_abbrev=False)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--only", default="topk,indexer,pair,next,error")
    options = parser.parse_args()
    only = options.only.split(",")
    flush = timing.Flush()
    device = torch.cuda.get_device_properties(0)
    empty = torch.zeros(1, device="cuda")
    base = timing.medians({"e": timing.capture(lambda: empty.add_(1))}, flush, options.repeats)["e"]
    parts = [
        f"{device.name}, {device.multi_processor_count} SMs, PyTorch {torch.__version__}; empty kernel in this harness: "
        f"{base:.1f} µs. Medians of {options.repeats} replays in microseconds.",
    ]
    topks = topk_contest.selectors()

    def report(title, rows, first):
        parts.append(f"\n### {title}\n\n" + table(rows, first))
        print(parts[-1], flush=True)
        options.out.write_text("\n".join(parts) + "\n", encoding="utf-8")

    started = time.monotonic()
    if "topk" in only:
        rows = []
        for batch, kind in CELLS + MIXED:
            found = topk_bench.measure(batch, kind, flush, topks, options.repeats)
            rows.append({"batch": str(batch), "context": CONTEXT[kind], **found})
        report("Top-k", rows, ["batch", "context"])
        rows = []
        for batch, kind, alike in ((1, 16384, 64), (1, 131072, 4), (1, 131072, 16), (1, 131072, 64), (16, 131072, 64)):
            found = topk_bench.measure(batch, kind, flush, topks, options.repeats, alike)
            rows.append({"batch": str(batch), "context": CONTEXT[kind], "scores alike": str(alike), **found})
        report("Top-k where neighbours have scores alike (means over so many)", rows, ["batch", "context", "scores alike"])
    for part, measure in (("indexer", indexer_bench.measure), ("pair", indexer_bench.measure_pair)):
        if part not in only:
            continue
        rows = []
        for batch, kind in CELLS + MIXED:
            peers = indexers(batch)
            if part == "indexer":
                if batch <= 16:
                    peers["torch"] = contestants.indexer_torch
                found = measure(batch, kind, flush, peers, options.repeats)
            else:
                found = measure(batch, kind, flush, peers, topks, options.repeats)
            rows.append({"batch": str(batch), "context": CONTEXT[kind], **found})
            gc.collect()
            torch.cuda.empty_cache()
        report({"indexer": "Indexer logits", "pair": "Indexer and top-k"}[part], rows, ["batch", "context"])
    if "next" in only:
        rows = []
        for requests, length in ((1, 16384), (16, 16384), (4, 131072)):
            found = indexer_bench.measure_next(requests, length, 4, flush, options.repeats)
            rows.append({"requests": str(requests), "context": CONTEXT[length], **found})
        report("Indexer, four rows a request (verify)", rows, ["requests", "context"])
    if "error" in only:
        rows = []
        for batch, kind in ((1, 16384), (4, 16384), (16, 1024)):
            found = indexer_bench.errors(batch, kind, {**indexers(batch), "torch": contestants.indexer_torch})
            rows.append({"batch": str(batch), "context": CONTEXT[kind], **found})
        report("Indexer logits beside float64: error (root mean squares), and others among a row's 512 best", rows, ["batch", "context"])
    for name, reason in contestants.absent.items():
        print(f"absent: {name}: {reason}")
    print(f"{time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
