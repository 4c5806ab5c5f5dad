# SPDX-License-Identifier: Apache-2.0
"""Writes BENCHMARKS.md from the tables of benchmarks/run.py: the bars that the kernels were to reach, each with its
figure and pass or miss, then the tables.

    python3 benchmarks/page.py benchmarks/results/h200-selection.md --out BENCHMARKS.md
"""

from __future__ import annotations

import argparse
import pathlib
import sys

COMMAND = "python3 benchmarks/run.py --out benchmarks/results/h200-selection.md --repeats 40"
LEVEL = 1.03


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Returns {title: rows} of the third-level sections."""
    found = {}
    for part in text.split("\n### ")[1:]:
        title, _blank, *lines = part.strip().splitlines()
        columns = [cell.strip() for cell in lines[0].strip("|").split("|")]
        found[title] = [
            dict(zip(columns, [cell.strip() for cell in line.strip("|").split("|")])) for line in lines[2:] if line
        ]
    return found


def number(row: dict[str, str], column: str) -> float | None:
    """Returns a time, None where the contestant did not run or was wrong."""
    try:
        return float(row.get(column, ""))
    except ValueError:
        return None


def ratios(rows: list[dict[str, str]], ours: str, peer: str) -> dict[str, float]:
    """Returns {cell: ours / peer}."""
    found = {}
    for row in rows:
        mine, other = number(row, ours), number(row, peer)
        if mine and other:
            found[f"{row['batch']} x {row['context']}"] = mine / other
    return found


def bar(what: str, found: dict[str, float], limit: float, only=None) -> str:
    """Returns a table line: the bar, in how many cells it holds, and the cells where it does not."""
    cells = {cell: value for cell, value in found.items() if only is None or only(cell)}
    misses = {cell: value for cell, value in cells.items() if value > limit}
    verdict = "pass" if not misses else "**miss**"
    # small ratios keep their digits
    text = ", ".join(f"{cell} {value:.3g}" for cell, value in misses.items())
    return f"| {what} | {limit:.3g} | {len(cells) - len(misses)} of {len(cells)} | {verdict} | {text} |"


def batch(cell: str) -> int:
    """Returns a cell's batch."""
    return int(cell.split(" ")[0])


def bars(found: dict[str, list[dict[str, str]]]) -> list[str]:
    """Returns the lines of the table of bars."""
    topk, indexer, pair = found["Top-k"], found["Indexer logits"], found["Indexer and top-k"]
    lines = [bar("top-k / torch.topk", ratios(topk, "ours", "torch.topk"), 0.2)]
    lines += [bar(f"top-k / {peer}", ratios(topk, "ours", peer), LEVEL) for peer in ("v1", "v2", "flashinfer")]
    one = {
        f"{r['batch']} x {r['context']}": number(r, "ours") / 12
        for r in topk
        if (r["batch"], r["context"]) == ("1", "512k")
    }
    lines.append(bar("top-k at 1 x 512k / 12 µs", one, 1.0))
    lines.append(bar("indexer at 4k: 512k table / 4k table", ratios(indexer, "ours", "ours, 4k table"), 1.05))
    torch = ratios(indexer, "ours", "torch")
    lines.append(bar("indexer / torch O(max), 25x", torch, 1 / 25, lambda cell: cell == "1 x 4k"))
    lines.append(bar("indexer / torch O(max), 150x", torch, 1 / 150, lambda cell: cell == "16 x 4k"))
    lines.append(bar("indexer / TileLang", ratios(indexer, "ours", "tilelang"), 1.0))
    deepgemm = ratios(indexer, "ours", "deepgemm")

    def even(cell):
        return "mixed" not in cell

    lines.append(bar("indexer / DeepGEMM sm_90, to batch 16", deepgemm, 1.1, lambda c: even(c) and batch(c) <= 16))
    lines.append(bar("indexer / DeepGEMM sm_90, batch 64", deepgemm, 1.5, lambda c: even(c) and batch(c) == 64))
    lines.append(bar("indexer / DeepGEMM sm_90, mixed rows", deepgemm, 1.0, lambda c: not even(c)))
    copy = ratios(indexer, "ours", "copy")
    lines.append(bar("indexer at 16 x 512k / copy of as many bytes", copy, 1.5, lambda cell: cell == "16 x 512k"))
    best = {}
    for row in pair:
        separate = [value for name in row if " + " in name and (value := number(row, name))]
        best[f"{row['batch']} x {row['context']}"] = number(row, "fused") / min(separate)
    lines.append(bar("fused / best separate pair", best, 1.0))
    lines.append(bar("fused / ours + ours", ratios(pair, "fused", "ours + ours"), 1.0))
    lines.append(
        bar("fused / TileLang + v1 (the engine's pair on sm_120)", ratios(pair, "fused", "tilelang + v1"), 1.0)
    )
    return lines


HEAD = """# Benchmarks

Written by `python3 benchmarks/page.py benchmarks/results/h200-selection.md --out BENCHMARKS.md` from one run of
`{command}`
on one GPU. How runs and machines differ stands in the kernels' NOTES.md. Sparse MLA's figures are in `src/dsv4_sm120/sparse_mla/BENCHMARKS.md`.

CUDA-graph replay, L2 emptied before each replay, contestants interleaved, medians, microseconds. Page tables are 512k
wide (131,072 compressed tokens) in every cell; context 4k, 64k, 512k is 1,024, 16,384, 131,072 compressed tokens;
"mixed" is log-uniform from 1k to 512k with both ends present. k = 512. Every contestant's result was compared with
ours or with torch.topk in the same run.

**What these figures say about sm_120, and what they do not.** They are of an H200 (sm_90). Top-k is the same code on
both, bound by latency and by instructions issued, on 132 SMs here and 188 there: read the ratios as a lead. The indexer
is not the same: sm_90 has to unpack fp8 to fp16 in front of the tensor cores, mma.sync's rate bounds it beyond 16k
tokens, and so it weighs the heads in fp16 on them too (the last table has what that costs), while the sm_120a code feeds
fp8 to them directly and weighs in fp32, and memory is 2.4 times slower there; neither its speed nor its ratio to
TileLang carries over. TileLang and DeepGEMM use wgmma here, which sm_120 lacks. DeepGEMM's
sm_120 kernel, FlashInfer's fused sm_120 indexer, b12x and the FP4 indexer cannot run here: nothing is claimed against
them. The sm_120a code of these kernels was compiled, and
its text run in an emulator on the CPU (`tests/emulator`), never on a GPU. v1 is what SGLang 0.5.23 runs on sm_120, v2 is switched
off there by the engine (timed with its cluster paths off, as it would run there).

## Bars

Ratios of times, so below the limit is a pass; cells that miss are named with their ratio.

| what | limit | cells | | misses |
|---|---|---|---|---|
"""


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="write BENCHMARKS.md", allow_abbrev=False)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    text = options.results.read_text(encoding="utf-8")
    body = HEAD.format(command=COMMAND) + "\n".join(bars(tables(text)))
    options.out.write_text(f"{body}\n\n## Tables\n\n{text}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
