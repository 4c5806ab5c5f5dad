# SPDX-License-Identifier: Apache-2.0
"""Times every operation that passed its self-test against what the engine would run, and writes the selection record.

Run as a program with the arguments of child() it is the process that touches the GPU, for one operation.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable

from . import build_info, children, contests, decision, gpu, plugin, selection, selftest

COMPLETE, PARTIAL = "complete", "partial"
# for one contestant, which may be compiled at its first call
CONTESTANT_SECONDS = 300.0


class Recorder:
    """The record as far as it has come; every write replaces the file at once."""

    def __init__(self, path: pathlib.Path, operations: tuple[str, ...], facts: dict, key: str, repeats: int) -> None:
        self.path = path
        self.repeats = repeats
        self.begun = time.time()
        self.record = {
            "schema": selection.SCHEMA,
            "source_hash": build_info()["source_hash"],
            "key": key,
            "state": PARTIAL,
            "measured_on": facts,
            "operations": {
                name: {"choice": "stock", "selftest": "none", "rows": {}, "reason": "not measured yet"} for name in operations
            },
            "details": {},
        }
        self.cells: dict[str, list[decision.Timed]] = {name: [] for name in operations}
        self.absent: dict[str, str] = {}
        self.proofs: dict[str, selftest.Result] = {}

    def write(self) -> None:
        """Brings the details up to date and replaces the file."""
        self.record["details"] = {
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.time() - self.begun, 1),
            "repeats": self.repeats,
            "absent": self.absent,
            "selftest": {name: vars(result) for name, result in self.proofs.items()},
            "cells": {name: [cell.summary() for cell in cells] for name, cells in self.cells.items() if cells},
        }
        selection.write_record(self.path, self.record)


def in_the_package(names: tuple[str, ...]) -> tuple[list[str], dict[str, dict]]:
    """Returns the operations that can be measured, and the record's entries of the others.

    What has no contest is there to be right, not fast: it serves wherever it is asked for.
    """
    known, able = plugin.operations(), contests.modules()
    other = {}
    for name in names:
        if name not in known:
            other[name] = {"reason": "this build does not have it"}
        elif name not in able:
            other[name] = {"choice": "ours", "reason": "it mends something and is not chosen by speed"}
    return [name for name in names if name not in other], other


def select(
    deployment_path: pathlib.Path,
    out: pathlib.Path,
    key: str = "",
    operations: tuple[str, ...] = (),
    seconds: float = 1200.0,
    repeats: int = 40,
    progress: Callable[[str], None] = lambda line: None,
    proved: dict | None = None,
) -> dict:
    """Measures within so many seconds and returns the record; the file is a valid one from the first moment on.

    proved: what selftest.read() gave; without it, and for operations that it does not know, the self-test runs first. Raises
    gpu.NoGpu, contests.DeploymentError, selftest.ResultError, and OSError when the record cannot be written.
    """
    deadline = time.monotonic() + seconds
    deployment = contests.read_deployment(deployment_path)
    device = gpu.visible()[0]
    earlier = selftest.results(proved, device) if proved else {}
    wanted = operations or deployment.operations
    facts = {"gpu": device["name"], "uuid": device["uuid"], "capability": device["capability"], "driver": gpu.driver()}
    facts |= {"engine": plugin.engine_version()}
    recorder = Recorder(out, wanted, facts, key, repeats)
    entries = recorder.record["operations"]
    able, others = in_the_package(wanted)
    for name, entry in others.items():
        entries[name] |= entry
        if entries[name]["choice"] == "ours":
            del entries[name]["rows"]
    recorder.write()
    recorder.proofs = {name: result for name, result in earlier.items() if name in able}
    rest = [name for name in able if name not in earlier]
    recorder.proofs |= selftest.prove_all(rest, selftest.SECONDS, deadline, progress)
    for name, result in recorder.proofs.items():
        entries[name]["selftest"] = result.status
        if result.status != selftest.PASS:
            entries[name]["reason"] = f"its self-test failed: {result.reason}" if result.faults else result.reason
    recorder.write()
    unfinished = any(result.reason == children.NO_TIME for result in recorder.proofs.values())
    for name in able:
        if recorder.proofs[name].status != selftest.PASS:
            continue
        done = measure(name, deployment_path, recorder, deadline, progress)
        unfinished = unfinished or not done.finished
        if done.fault:
            entries[name] |= {"selftest": selftest.FAIL, "reason": f"it failed while it was timed: {done.fault}"}
        else:
            entries[name] |= decision.choose(done.expected, recorder.cells[name])
        progress(f"{name}: {entries[name]['choice']}: {entries[name]['reason']}")
        recorder.write()
    recorder.record["state"] = PARTIAL if unfinished else COMPLETE
    recorder.write()
    return recorder.record


@dataclasses.dataclass
class Measured:
    """What became of one operation: the bucket of every cell, whether all cells were reached, and how ours failed, if so."""

    expected: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    finished: bool = False
    fault: str | None = None


def measure(
    operation: str, deployment_path: pathlib.Path, recorder: Recorder, deadline: float, progress: Callable[[str], None]
) -> Measured:
    """Times one operation's cells in a child; after a crash in another one, without the contestant that was at work."""
    done = Measured()
    cells = recorder.cells[operation]
    crashed: dict[str, str] = {}
    busy: str | None = None

    def said(document: dict) -> None:
        nonlocal busy
        if "facts" in document:
            recorder.record["measured_on"] |= document["facts"]
        elif "buckets" in document:
            done.expected = [tuple(bucket) for bucket in document["buckets"]]
        elif "busy" in document:
            busy = document["busy"]
        elif "times" in document:
            busy = None
            wrong = document["wrong"] | {name: why for name, why in crashed.items() if name not in document["times"]}
            bucket = (document["variant"], document["rows"], document["label"])
            cells.append(decision.Timed(*bucket, tuple(document["rivals"]), document["times"], wrong))
            recorder.absent |= document["absent"]
            progress(line(operation, len(cells), len(done.expected), cells[-1]))
            recorder.write()

    while True:
        busy, before = None, len(cells)
        arguments = [operation, str(deployment_path), str(recorder.repeats), str(len(cells)), ",".join(crashed)]
        ended = children.run("measure", arguments, deadline - time.monotonic(), said, CONTESTANT_SECONDS)
        if ended.fault is None:
            done.finished = True
            return done
        progress(f"{operation}: {busy or 'no contestant'} was at work: {ended.fault}")
        if time.monotonic() >= deadline:
            return done
        if busy == "ours" or (busy is None and len(cells) == before):
            done.finished, done.fault = True, ended.fault
            return done
        if busy is not None:
            crashed[busy] = recorder.absent[busy] = ended.fault


def line(operation: str, number: int, of: int, cell: decision.Timed) -> str:
    """Returns the progress line of a cell."""
    document = cell.summary()
    times = ", ".join(f"{name} {value:.1f}" for name, value in document["median_us"].items())
    verdict = document.get("reason") or f"{document['winner']} by {abs(document['lead_us']):.1f}, noise {document['noise_us']:.1f}"
    return f"{operation} {number}/{of} {cell.label}: {times} us: {verdict}"


def child(argv: list[str]) -> int:
    """Times the cells of one operation from the given one on, without the named contestants, in this process."""
    parser = argparse.ArgumentParser(prog="python -m dsv4_sm120.measure", allow_abbrev=False)
    parser.add_argument("operation")
    parser.add_argument("deployment", type=pathlib.Path)
    parser.add_argument("repeats", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("without")
    options = parser.parse_args(argv)
    import torch

    from . import _torch, contestants, timing

    contest = contests.contest(options.operation)
    deployment = contests.read_deployment(options.deployment)
    cells = contest.cells(deployment)
    children.tell(facts={"torch": torch.__version__})
    children.tell(buckets=[(cell.variant, cell.rows) for cell in cells])
    rivals = contest.rivals.get(_torch.capability(0))
    if rivals is None:
        raise SystemExit(f"nobody knows what the engine runs on {_torch.capability(0)}")
    without = {name for name in options.without.split(",") if name}
    flush = timing.Flush()
    for cell in cells[options.first :]:
        graphs, wrong = {}, {}
        bout = contest.bout(cell, deployment)
        for name, work in bout.works.items():
            if name in without:
                continue
            children.tell(busy=name)
            try:
                if fault := bout.fault(name, work()):
                    wrong[name] = fault
                    continue
                graphs[name] = timing.capture(work)
                graphs[name].replay()
            except Exception as error:  # noqa: BLE001 - a contestant that does not run is a line of the record
                wrong[name] = children.words(error)
            # raises when the contestant broke the CUDA context: then this process ends, and another one goes on without it
            torch.cuda.synchronize()
        taken = timing.times(graphs, flush, options.repeats) if graphs else {}
        children.tell(
            variant=cell.variant, rows=cell.rows, label=cell.label, rivals=rivals, wrong=wrong, absent=dict(contestants.absent),
            times={name: [round(value, 3) for value in values] for name, values in taken.items()},
        )  # fmt: skip
        del bout, graphs
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(child(sys.argv[1:]))
