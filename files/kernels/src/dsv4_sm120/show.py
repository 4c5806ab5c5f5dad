# SPDX-License-Identifier: Apache-2.0
"""Self-tests and selection records as tables for people."""

from __future__ import annotations


def table(rows: list[list[str]]) -> str:
    """Returns rows as aligned columns, the first one underlined."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def selftest(results: dict[str, dict]) -> str:
    """Returns the outcome of a self-test."""
    rows = [["operation", "self-test", "checks", "seconds", "what is wrong"]]
    for name, result in results.items():
        faults = [f"{check}: {fault}" for check, fault in result["faults"].items()] or [result["reason"]]
        rows.append([name, result["status"], str(result["checks"]), f"{result['seconds']:.1f}", faults[0]])
        rows += [["", "", "", "", fault] for fault in faults[1:]]
    return table(rows)


def _rows(rows: dict[str, list[list[int]]]) -> str:
    words = []
    for variant, ranges in rows.items():
        spans = ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)
        words.append(spans if variant == "all" else f"{variant} {spans}")
    return "; ".join(words)


def record(document: dict) -> str:
    """Returns a selection record: where it was measured, what was chosen and why, every cell, and who was absent."""
    on, details = document.get("measured_on", {}), document.get("details", {})
    head = [
        f"build {document['source_hash']}, {document.get('state', 'complete')}, on {on.get('gpu', 'an unknown GPU')}, "
        f"driver {on.get('driver', '?')}, SGLang {on.get('engine', '?')}, PyTorch {on.get('torch', '?')}",
    ]
    if details.get("finished"):
        head.append(f"{details['finished']}, {details['seconds']:.0f} s, medians of {details['repeats']} replays, microseconds")
    rows = [["operation", "serves", "self-test", "for rows", "reason"]]
    for name, entry in document["operations"].items():
        rows.append(
            [name, entry["choice"], entry.get("selftest", "none"), _rows(entry.get("rows", {})), entry.get("reason", "")]
        )
    parts = ["\n".join(head), table(rows)]
    for name, cells in details.get("cells", {}).items():
        ran = {contestant: None for cell in cells for contestant in (*cell["median_us"], *cell.get("wrong", {}))}
        names = sorted(ran, key=lambda contestant: contestant != "ours")
        lines = [[name, *names, "lead", "noise", "faster"]]
        for cell in cells:
            times = [
                f"{cell['median_us'][one]:.1f} ±{cell['error_us'][one]:.1f}"
                if one in cell["median_us"]
                else "failed"
                if one in cell.get("wrong", {})
                else ""
                for one in names
            ]
            figures = [f"{cell[key]:.1f}" if key in cell else "" for key in ("lead_us", "noise_us")]
            lines.append([cell["cell"], *times, *figures, cell.get("reason") or cell["winner"]])
        parts.append(table(lines))
        failed = dict(item for cell in cells for item in cell.get("wrong", {}).items())
        if failed:
            parts.append("\n".join(f"failed: {contestant}: {reason}" for contestant, reason in failed.items()))
    if details.get("absent"):
        parts.append("\n".join(f"absent: {name}: {reason}" for name, reason in details["absent"].items()))
    return "\n\n".join(parts)
