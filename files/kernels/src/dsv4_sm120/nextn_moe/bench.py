# SPDX-License-Identifier: Apache-2.0
"""What the guard adds to a draft's step: its count of NaN rows behind the kernel that wrote the logits.

    python3 src/dsv4_sm120/nextn_moe/bench.py [--repeats N]

A graph that writes the logits is timed with and without the count, in turns; the difference of a turn is the cost, with the logits
where a step leaves them, in L2. The count is a kernel and a copy of its two numbers to the host, which are timed apart too. An
empty kernel, timed in the same way, is what any launch costs there, and argmax is what a draft does with the same logits.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from dsv4_sm120 import decision, timing  # noqa: E402
from dsv4_sm120.nextn_moe import count, guard  # noqa: E402

VOCABULARY = 129_280
ROWS = (1, 4, 16, 64, 256)


def measure(rows: int, dtype: torch.dtype, flush: timing.Flush, repeats: int) -> dict[str, decision.Lead]:
    """Returns by how much each addition makes the step longer."""
    source = torch.randn(rows, VOCABULARY, device="cuda").to(dtype)
    logits = torch.empty_like(source)
    slots = torch.full((rows,), guard.PAGE, dtype=torch.int64, device="cuda")
    counter, one = guard.Counter("cuda"), torch.zeros(1, device="cuda")
    additions = {
        "count": lambda: counter.count(logits, slots),
        "its kernel": lambda: count.count(logits, slots, counter.counts, guard.PAGE),
        "its copy": lambda: counter.host.copy_(counter.counts, non_blocking=True),
        "argmax": lambda: torch.argmax(logits, dim=-1),
        "empty kernel": lambda: one.add_(1),
    }
    graphs = {"step": timing.capture(lambda: logits.copy_(source))}
    for name, addition in additions.items():
        graphs[name] = timing.capture(lambda addition=addition: (logits.copy_(source), addition()))
    taken = timing.times(graphs, flush, repeats)
    found, bad = counter.read()
    assert found >= rows * repeats and not bad, (found, bad)
    return {name: decision.lead(taken["step"], taken[name]) for name in additions}


def main() -> int:
    """Prints a row for each number of rows and type."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=200, metavar="N", help="replays of each graph (%(default)s)")
    options = parser.parse_args()
    flush = timing.Flush()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, medians of {options.repeats} replays, µs\n")
    print("| logits | rows | count | its kernel | its copy | argmax | empty kernel |\n|---|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        for rows in ROWS:
            found = measure(rows, dtype, flush, options.repeats)
            cells = " | ".join(f"{lead.microseconds:.1f} ± {lead.error:.1f}" for lead in found.values())
            print(f"| {str(dtype).removeprefix('torch.')} | {rows} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
