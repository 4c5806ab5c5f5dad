# SPDX-License-Identifier: Apache-2.0
"""Which operations run with our kernels: the operator's word, else the record of what was measured on this host.

The record (schema 1) is JSON:

    {"schema": 1, "source_hash": "<build>", "operations": {"topk": {"choice": "ours", "selftest": "pass", ...}, ...}}

choice is 'ours' or 'stock', selftest 'pass', 'fail' or 'none'; other keys are for people. Precedence:
DSV4_SM120_KERNELS, if set, names the operations; else the record's choices count; without either nothing is applied. A
record of another build chooses nothing. An operation whose self-test failed in a record of this build is never applied.
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
    """wanted: operations to apply; source: where that was said; left_out: {operation: reason}."""

    wanted: tuple[str, ...]
    source: str
    left_out: dict[str, str]


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
    return record


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
    return Selection(tuple(dict.fromkeys(name for name in names if name not in left_out)), source, left_out)
