# SPDX-License-Identifier: Apache-2.0
"""Holds every operation against its reference on the GPU at hand, each in a process of its own with a time limit.

Run as a program with the name of an operation it is that process.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable

from . import build_info, children, contests, gpu

SCHEMA = 1
PASS, FAIL, NONE = "pass", "fail", "none"
# for one operation
SECONDS = 180.0


@dataclasses.dataclass
class Result:
    """What became of one operation: status pass, fail or none (nothing to prove it with), and why it did not pass."""

    status: str
    reason: str = ""
    checks: int = 0
    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    timed_out: bool = False


def prove(operation: str, seconds: float, progress: Callable[[str], None] = lambda line: None) -> Result:
    """Runs one operation's checks in a child; anything but an orderly end with every check right is a failure."""
    if operation not in contests.modules():
        return Result(NONE, "it has no self-test")
    result = Result(PASS)
    begun, doing, last, announced = time.monotonic(), "its start", None, 0

    def said(document: dict) -> None:
        nonlocal doing, last, announced
        if "checking" in document:
            doing, last = document["checking"], None
        elif "checked" in document:
            result.checks += 1
            if document["fault"]:
                result.faults[document["checked"]] = document["fault"]
            last = document["checked"]
            doing = f"the check after '{last}'"
        elif "total" in document:
            announced = document["total"]

    ended = children.run("selftest", [operation], seconds, said)
    result.seconds, result.timed_out = round(time.monotonic() - begun, 1), ended.timed_out
    if ended.fault:
        # a check that broke the GPU's context ends its process: that is one fault, not two
        if last not in result.faults:
            result.faults[doing] = ended.fault
    elif not announced or result.checks != announced:
        result.faults[doing] = f"{result.checks} of {announced or 'an unknown number of'} checks ran"
    if result.faults:
        result.status = FAIL
        name, fault = next(iter(result.faults.items()))
        result.reason = f"{name}: {fault}"
    progress(f"selftest {operation}: {result.status}, {result.checks} checks in {result.seconds:.0f} s {result.reason}".rstrip())
    return result


def prove_all(
    operations: list[str], seconds: float, deadline: float | None = None, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Result]:
    """Proves operations one after another, each within `seconds` and all before the deadline (of time.monotonic)."""
    found = {}
    for name in operations:
        left = seconds if deadline is None else min(seconds, deadline - time.monotonic())
        found[name] = prove(name, left, progress)
        if left < seconds and found[name].timed_out:
            # cut short: this says nothing against the kernel
            found[name] = Result(NONE, children.NO_TIME)
    return found


class ResultError(ValueError):
    """The result of an earlier self-test cannot be used."""


def document(results: dict[str, Result], device: dict[str, str]) -> dict:
    """Returns results as JSON: of which build, on which GPU, under which driver."""
    operations = {name: dataclasses.asdict(result) for name, result in results.items()}
    return {"schema": SCHEMA, **_where(device), "operations": operations}


def read(path: pathlib.Path) -> dict:
    """Returns what an earlier self-test left; raises ResultError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ResultError(f"{path}: schema {found['schema']}, not {SCHEMA}")
        {name: Result(**entry) for name, entry in found["operations"].items()}
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ResultError):
            raise
        raise ResultError(f"{path}: {error!r}") from error
    return found


def results(found: dict, device: dict[str, str]) -> dict[str, Result]:
    """Returns the results of an earlier self-test; raises ResultError when it was of another build, GPU or driver."""
    for name, value in _where(device).items():
        if found.get(name) != value:
            raise ResultError(f"the self-test was of {name} {found.get(name)}, this is {value}")
    return {name: Result(**entry) for name, entry in found["operations"].items()}


def _where(device: dict[str, str]) -> dict[str, str]:
    return {"source_hash": build_info()["source_hash"], "driver": gpu.driver(), **device}


def child(operation: str) -> int:
    """Runs the checks of one operation in this process."""
    checks = list(contests.contest(operation).checks())
    import torch

    for name, check in checks:
        children.tell(checking=name)
        try:
            fault = check()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - whatever a check raises is its fault
            fault = children.words(error)
        children.tell(checked=name, fault=fault)
        # raises again after an illegal access: nothing more can be learnt in this process
        torch.cuda.synchronize()
    children.tell(total=len(checks))
    return 0


if __name__ == "__main__":
    sys.exit(child(sys.argv[1]))
