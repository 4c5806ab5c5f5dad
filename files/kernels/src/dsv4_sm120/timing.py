# SPDX-License-Identifier: Apache-2.0
"""Times GPU work as CUDA-graph replays with a cold L2, contestants interleaved."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable

import torch

# several times the largest L2 among the targets (128 MB)
FLUSH_BYTES = 512 * 2**20


class Flush:
    """Empties the L2: writes a buffer, then reads another, so that no written line waits for its way to memory."""

    def __init__(self, device: int = 0) -> None:
        self.buffer = torch.empty(FLUSH_BYTES // 8, dtype=torch.int32, device=device)
        self.other = torch.zeros(FLUSH_BYTES // 8, dtype=torch.int32, device=device)
        self.sum = torch.empty((), dtype=torch.int64, device=device)

    def __call__(self) -> None:
        """Queues the flush on the current stream."""
        self.buffer.zero_()
        torch.sum(self.other, dim=(0,), out=self.sum)


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Runs work twice for its one-time costs, then captures it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def times(graphs: dict[str, torch.cuda.CUDAGraph], flush: Flush, repeats: int = 40) -> dict[str, list[float]]:
    """Returns microseconds of each replay; every turn runs all graphs once, so drift meets them alike, and begins with
    another one, so none is always the first after the pause between turns."""
    taken: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    order = list(graphs.items())
    for turn in range(repeats + 3):
        for name, graph in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            start.record()
            graph.replay()
            end.record()
            if turn >= 3:
                taken[name].append((start, end))
        torch.cuda.synchronize()
        order = order[1:] + order[:1]
    return {name: [start.elapsed_time(end) * 1e3 for start, end in events] for name, events in taken.items()}


def medians(graphs: dict[str, torch.cuda.CUDAGraph], flush: Flush, repeats: int = 40) -> dict[str, float]:
    """Returns each graph's median in microseconds."""
    return {name: statistics.median(values) for name, values in times(graphs, flush, repeats).items()}


def library(path: str, name: str, argtypes: list) -> Callable[..., int]:
    """Returns a C function of a shared library, for contestants that are called without Python packages."""
    function = getattr(ctypes.CDLL(path), name)
    function.argtypes = argtypes
    function.restype = ctypes.c_int
    return function
