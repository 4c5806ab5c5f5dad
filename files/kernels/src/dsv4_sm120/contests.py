# SPDX-License-Identifier: Apache-2.0
"""What a kernel folder's contest.py declares: how its operations are proved, and against what they are timed.

A folder without one has operations that cannot be measured; they are chosen by the operator alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pathlib
from collections.abc import Callable, Iterator

SCHEMA = 1
# tokens of context whose time is looked at, beside the deployment's own maximum
CONTEXTS = (4096, 65536)
BATCHES = (1, 4, 16)


class DeploymentError(ValueError):
    """The description of the deployment cannot be understood."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """The shapes that a deployment gives the kernels.

    heads: query heads a rank, of each instance that runs kernels of ours. rows: numbers of rows of a decode step, ascending
    (a request has several while drafts are verified). context_length in tokens. operations: those that are to be measured.
    """

    heads: tuple[int, ...]
    rows: tuple[int, ...]
    context_length: int
    operations: tuple[str, ...]

    def contexts(self) -> list[int | None]:
        """Returns lengths of context in tokens that fit, ascending, then None for rows of mixed lengths."""
        return [*sorted({n for n in CONTEXTS if n < self.context_length} | {self.context_length}), None]


def deployment(document: dict) -> Deployment:
    """Returns a deployment from its JSON; raises DeploymentError.

    {"schema": 1, "context_length": 524288, "instances": {"decode": {"heads": 16, "max_batch": 64, "rows_per_request": 1,
    "kernels": ["topk", ...]}}}
    """
    try:
        if document["schema"] != SCHEMA:
            raise DeploymentError(f"schema {document['schema']}, not {SCHEMA}")
        context = int(document["context_length"])
        instances = [entry for entry in document["instances"].values() if entry["kernels"]]
        heads, rows, operations = set(), set(), []
        for entry in instances:
            most, each = int(entry["max_batch"]), int(entry.get("rows_per_request", 1))
            heads.add(int(entry["heads"]))
            rows |= {batch * each for batch in (*BATCHES, most) if batch <= most}
            operations += [str(name) for name in entry["kernels"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DeploymentError(f"the deployment's description: {error!r}") from error
    if context < 4096 or min([1, *heads, *rows]) < 1:
        raise DeploymentError("the deployment's description: a context, head count or batch that cannot be")
    return Deployment(tuple(sorted(heads)), tuple(sorted(rows)), context, tuple(dict.fromkeys(operations)))


def read_deployment(path: pathlib.Path) -> Deployment:
    """Returns the deployment of a file; raises DeploymentError."""
    try:
        return deployment(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        if isinstance(error, DeploymentError):
            raise
        raise DeploymentError(f"{path}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape to time. variant and rows are what a hook can see on the host, so they name the bucket of a decision;
    length (tokens of context, None for mixed rows) and heads tell apart what is inside of one."""

    variant: str
    rows: int
    length: int | None
    heads: int = 0

    @property
    def label(self) -> str:
        """The cell in words: c4, 16 rows, 64k tokens, 16 heads."""
        tokens = "mixed" if self.length is None else f"{self.length // 1024}k"
        words = [self.variant, f"{self.rows} rows", f"{tokens} tokens", f"{self.heads} heads" if self.heads else ""]
        return ", ".join(word for word in words if word)


@dataclasses.dataclass(frozen=True)
class Bout:
    """One cell made ready: each contestant's work, and what tells whether a result is right (None, or what is wrong)."""

    works: dict[str, Callable[[], object]]
    fault: Callable[[str, object], str | None]


@dataclasses.dataclass(frozen=True)
class Contest:
    """How one operation is proved and timed. In works, 'ours' is ours.

    checks yields (name, call); a call returns None or what is wrong. rivals, by architecture ('sm_120a', 'sm_90'): the work
    that the engine would run by itself, then others that may serve in its place; ours has to beat them all.
    """

    operation: str
    checks: Callable[[], Iterator[tuple[str, Callable[[], str | None]]]]
    cells: Callable[[Deployment], list[Cell]]
    bout: Callable[[Cell, Deployment], Bout]
    rivals: dict[str, tuple[str, ...]]


@functools.cache
def modules() -> dict[str, str]:
    """Returns {operation: module of its contest}, without importing those modules: they need PyTorch."""
    from . import plugin

    return {
        item.name: f"{__package__}.{folder.name}.contest"
        for folder, items in plugin.discover().items()
        for item in items
        if (folder / "contest.py").is_file()
    }


def contest(operation: str) -> Contest:
    """Returns an operation's contest; imports PyTorch. Raises KeyError for an operation that has none."""
    found = {item.operation: item for item in importlib.import_module(modules()[operation]).CONTESTS}
    return found[operation]
