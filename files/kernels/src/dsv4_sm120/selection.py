# SPDX-License-Identifier: Apache-2.0
"""Which operations run with our kernels: the operator's word, else the record of what was measured on this host.

The record (schema 1) is JSON:

    {"schema": 1, "source_hash": "<build>", "state": "complete", "key": "<what it holds for>", "measured_on": {"gpu": ...},
     "operations": {"topk": {"choice": "ours", "selftest": "pass", "rows": {"all": [[1, 64]]}, "reason": "..."}, ...},
     "details": {"cells": ...}}

choice is 'ours' or 'stock', selftest 'pass', 'fail' or 'none'; rows says, by variant of the call, for how many rows ours was
faster (without it: for all). details holds the times, for people; everything else stays the same as long as the decision
does. Precedence: DSV4_SM120_KERNELS, if set, names the operations; else the record's choices count; without either nothing is
applied. Where the record chose ours its rows count in both cases. A record of another build chooses nothing. An operation
whose self-test failed in a record of this build is never applied.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

SCHEMA = 1


class SelectionError(ValueError):
    """The record or the variable cannot be understood; the text is for the operator."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """wanted: operations to apply; source: where that was said; left_out: {operation: reason}; rows: {operation: {variant:
    ranges of rows}} of those that serve some shapes only."""

    wanted: tuple[str, ...]
    source: str
    left_out: dict[str, str]
    rows: dict[str, dict[str, list[list[int]]]] = dataclasses.field(default_factory=dict)


def read_record(path: pathlib.Path) -> dict:
    """Returns a validated record; raises SelectionError for a missing, unreadable or malformed one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SelectionError(f"selection record {path}: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise SelectionError(f"selection record {path}: schema is not {SCHEMA}")
    operations = record.get("operations")
    if not isinstance(operations, dict) or not isinstance(record.get("source_hash"), str):
        raise SelectionError(f"selection record {path}: needs 'source_hash' and 'operations'")
    for name, entry in operations.items():
        if not isinstance(entry, dict) or entry.get("choice") not in ("ours", "stock"):
            raise SelectionError(f"selection record {path}: {name} has no choice 'ours' or 'stock'")
        if entry.get("selftest", "none") not in ("pass", "fail", "none"):
            raise SelectionError(f"selection record {path}: {name} has selftest {entry['selftest']!r}")
        if not _are_rows(entry.get("rows", {})):
            raise SelectionError(f"selection record {path}: {name} has rows {entry['rows']!r}")
    return record


def _are_rows(rows: object) -> bool:
    def is_range(value: object) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(isinstance(item, int) and not isinstance(item, bool) for item in value)

    return isinstance(rows, dict) and all(
        isinstance(ranges, list) and all(is_range(value) for value in ranges) for ranges in rows.values()
    )


def write_record(path: pathlib.Path, record: dict) -> None:
    """Replaces the file at once: whoever reads it finds the former record or this one, whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            json.dump(record, stream, indent=1, sort_keys=True)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def select(known: tuple[str, ...], source_hash: str, environment: dict[str, str] | None = None) -> Selection:
    """Returns what to apply out of the known operations; raises SelectionError as read_record does, and for an
    unknown name in DSV4_SM120_KERNELS."""
    environment = dict(os.environ) if environment is None else environment
    given = environment.get("DSV4_SM120_KERNELS", "").strip()
    path = environment.get("DSV4_SM120_SELECTION", "").strip()
    left_out: dict[str, str] = {}
    record = None
    if path:
        record = read_record(pathlib.Path(path))
        if record["source_hash"] != source_hash:
            left_out = {name: f"the record is of build {record['source_hash']}" for name in record["operations"]}
            record = None
    if given:
        source = "DSV4_SM120_KERNELS"
        names = [name.strip() for name in given.split(",") if name.strip()]
        if names == ["all"]:
            names = list(known)
        elif names == ["none"]:
            names = []
        if unknown := [name for name in names if name not in known]:
            raise SelectionError(
                f"DSV4_SM120_KERNELS: unknown {', '.join(unknown)}; known: {', '.join(known)}, all, none"
            )
        left_out = {}
    elif record:
        source = path
        names = [name for name in known if record["operations"].get(name, {}).get("choice") == "ours"]
    else:
        source = path or "no selection"
        names = []
    for name in names:
        if record and record["operations"].get(name, {}).get("selftest") == "fail":
            left_out[name] = "its self-test failed on this host"
    wanted = tuple(dict.fromkeys(name for name in names if name not in left_out))
    chosen = {name: record["operations"].get(name, {}) for name in wanted} if record else {}
    rows = {name: entry["rows"] for name, entry in chosen.items() if entry.get("choice") == "ours" and "rows" in entry}
    return Selection(wanted, source, left_out, rows)
