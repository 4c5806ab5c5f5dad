# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark from its plan to its report: which runs to make, what they say together, and what changed since the last release.

Pure functions. A cell is one workload at one number of streams; its figures are medians over the repetitions, with the least
and the most of them as spread.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import statistics

FORMAT = 1
#: Figure: title, unit, whether more is better. The first three are plotted.
METRICS = {
    "ttft_ms": ("Time to first token, median", "ms", False),
    "itl_ms": ("Inter-token latency, median", "ms", False),
    "output_tokens_per_s": ("Output of all streams", "tokens/s", True),
    "ttft_p99_ms": ("Time to first token, 99th percentile", "ms", False),
    "itl_p99_ms": ("Inter-token latency, 99th percentile", "ms", False),
}
PLOTS = {"ttft.svg": "ttft_ms", "itl.svg": "itl_ms", "throughput.svg": "output_tokens_per_s"}
WORD = {"better": "yes, better", "worse": "yes, WORSE", "noise": "no", "unknown": "unknown, one repetition"}
#: Load average a core above which an idle endpoint's host has something else to do.
BUSY = 0.5
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


# --------------------------------------------------------------------------- what to run


def plan(workloads, repeats, seed):
    """Every run, repetition by repetition, so that a drift of the host goes into the spread and not into one workload."""
    if repeats < 1:
        raise ValueError("repeats is at least 1")
    names = [str(workload["name"]) for workload in workloads]
    if not names or len(set(names)) != len(names) or not all(NAME.match(name) for name in names):
        raise ValueError("workloads need names of letters, digits and ._-, each once; got %s" % (", ".join(names) or "none"))
    runs = []
    for repeat in range(1, repeats + 1):
        for workload in workloads:
            sizes = {key: int(workload[key]) for key in ("input_tokens", "output_tokens")}
            for streams in sorted({int(count) for count in workload["streams"]}):
                rounds = int(workload.get("rounds", 1))
                if min(streams, rounds, *sizes.values()) < 1:
                    raise ValueError("workload %s: lengths, streams and rounds are at least 1" % workload["name"])
                runs.append(dict(sizes, workload=str(workload["name"]), streams=streams, requests=streams * rounds, repeat=repeat,
                                 seed=(seed + len(runs)) % (1 << 31)))
    return runs


def warm_up(runs):
    """Each workload once with a single request, under a seed of its own; repetition 0 is never reported."""
    first = {}
    for run in runs:
        first.setdefault(run["workload"], run)
    last = runs[-1]["seed"]
    return [dict(run, streams=1, requests=1, repeat=0, seed=(last + number) % (1 << 31)) for number, run in enumerate(first.values(), 1)]


def hopeless(run, before):
    """Why a run is not worth its time, or an empty text."""
    for past in before:
        if past["status"] == "timeout" and past["workload"] == run["workload"] and past["streams"] <= run["streams"]:
            return "%s took too long before" % counted(past["streams"], "stream")
        if past["status"] == "failed":
            return "a run before it failed"
    return ""


def run_line(run):
    """One run for the eyes of who waits."""
    name = load_name(run)
    if run["status"] != "ok":
        return "%s: %s: %s" % (name, run["status"], run["reason"])
    return "%s: TTFT %s ms, ITL %s ms, %s tokens/s" % (
        (name,) + tuple(number(run["figures"][key]) for key in ("ttft_ms", "itl_ms", "output_tokens_per_s")))


def planned_lines(runs):
    """What would be sent, for check mode."""
    repeats = counted(max(run["repeat"] for run in runs), "time")
    return ["%s: %s of %d tokens in and %d out, %s" % (
        load_name(run), counted(run["requests"], "request"), run["input_tokens"], run["output_tokens"], repeats) for run in runs if run["repeat"] == 1]


# --------------------------------------------------------------------------- what it says


def counted(count, what):
    """A number of things."""
    return "%d %s%s" % (count, what, "" if count == 1 else "s")


def load_name(load):
    """What people call a run or a cell by."""
    return "%s, %s" % (load["workload"], counted(load["streams"], "stream"))


def number(value):
    """Three significant digits, or all before the point, without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(float("%.3g" % value)))))
    return "%.*f" % (digits, value)


def cells(runs):
    """The runs put together: a list of cells, smallest first within a workload."""
    found = {}
    # A warm-up is among them only when it went wrong, and is not what a cell's load is read from.
    for run in sorted(runs, key=lambda run: run["repeat"] == 0):
        cell = found.setdefault((run["workload"], run["streams"]), {
            **{key: run[key] for key in ("workload", "input_tokens", "output_tokens", "streams", "requests")}, "figures": {}, "gaps": []})
        if run["status"] == "ok":
            for key, value in run["figures"].items():
                cell["figures"].setdefault(key, {"values": []})["values"].append(value)
        else:
            cell["gaps"].append({key: run[key] for key in ("repeat", "status", "reason")})
    for cell in found.values():
        for figure in cell["figures"].values():
            values = figure["values"]
            figure.update(median=round(statistics.median(values), 3), least=min(values), most=max(values))
    return list(found.values())


def change(now, before, more_is_better):
    """How a figure moved: {percent, verdict}.

    Beyond the noise is a move of the medians by more than both spreads together. One repetition has no spread.
    """
    moved = now["median"] - before["median"]
    percent = round(100 * moved / before["median"], 1) if before["median"] else 0.0
    if min(len(now["values"]), len(before["values"])) < 2:
        verdict = "unknown"
    elif abs(moved) <= (now["most"] - now["least"]) + (before["most"] - before["least"]):
        verdict = "noise"
    else:
        verdict = "better" if (moved > 0) == more_is_better else "worse"
    return {"percent": percent, "verdict": verdict}


def not_comparable(record, before):
    """Why two records say nothing about each other, or an empty text."""
    if not before:
        return "no other release was measured here"
    for key, word in (("format", "the format"), ("mode", "the mode"), ("rehearsal", "the kind of engine"), ("client", "the client's version")):
        if before.get(key) != record[key]:
            return "%s differs: %s before, %s now" % (word, before.get(key), record[key])
    return ""


def compare(record, before):
    """Put the former figures and the change beside each figure that was measured under the same load."""
    former = {_load(cell): cell for cell in before["cells"]}
    for cell in record["cells"]:
        known = former.get(_load(cell), {"figures": {}})["figures"]
        for key, figure in cell["figures"].items():
            if key in METRICS and key in known:
                figure["before"] = {name: known[key][name] for name in ("median", "least", "most")}
                figure["change"] = change(figure, known[key], METRICS[key][2])


def _load(cell):
    return tuple(cell[key] for key in ("workload", "input_tokens", "output_tokens", "streams", "requests"))


def record_of(measured, about, before=None):
    """The record of a benchmark, compared with the one of another release."""
    record = {
        "format": FORMAT,
        **{key: about[key] for key in ("host", "time", "release", "mode", "router", "gpus")},
        "engine_version": measured["engine_version"],
        # The rehearsal engine says what it is by a local version, such as 0.5.23+rehearsal.
        "rehearsal": "rehearsal" in measured["engine_version"].partition("+")[2],
        "client": measured["client"],
        "seed": measured["seed"],
        "seconds": measured["seconds"],
        "load": measured["load"],
        "cells": cells(measured["runs"]),
    }
    reason = not_comparable(record, before)
    if not reason:
        compare(record, before)
    record["compared_with"] = {"release": "", "time": "", "reason": reason} if reason else {
        "release": before["release"], "time": before["time"], "reason": ""}
    return record


def heading(record):
    """What was measured, in one line."""
    return "Benchmark of %s, release %s, mode %s" % (record["host"], record["release"], record["mode"])


def notes(record):
    """What a reader must know before the figures."""
    lines = []
    if record["rehearsal"]:
        lines.append("These are figures of the rehearsal engine (%s), which holds no model: they say nothing about a GPU." % record["engine_version"])
    if record["load"] > BUSY:
        lines.append("The host was busy before the first run (load average %s a core): its figures tell of that, too." % number(record["load"]))
    with_whom = record["compared_with"]
    lines.append("Not compared: %s." % with_whom["reason"] if with_whom["reason"] else
                 "Compared with release %s of %s." % (with_whom["release"], with_whom["time"]))
    return lines + ["Missing: %s." % gap for gap in gaps(record)]


def gaps(record, *statuses):
    """What was not measured, of these statuses or of all."""
    return ["%s, %s: %s, %s" % (
        load_name(cell), "repetition %d" % gap["repeat"] if gap["repeat"] else "warm-up", gap["status"].replace("_", " "), gap["reason"])
        for cell in record["cells"] for gap in cell["gaps"] if not statuses or gap["status"] in statuses]


def _spread(figure):
    return "%s (%s-%s)" % tuple(number(figure[key]) for key in ("median", "least", "most"))


def rows(record, chosen):
    """The table: a row for each of the chosen figures of each cell."""
    for cell in record["cells"]:
        for key in chosen:
            title, unit, dummy = METRICS[key]
            figure = cell["figures"].get(key)
            if figure:
                moved = figure.get("change")
                yield {
                    "workload": cell["workload"], "streams": str(cell["streams"]), "figure": title, "unit": unit,
                    "now": _spread(figure), "before": _spread(figure["before"]) if moved else "",
                    "change": "%+.1f %%" % moved["percent"] if moved else "", "verdict": WORD[moved["verdict"]] if moved else "",
                    "tone": moved["verdict"] if moved else "",
                }


COLUMNS = ("workload", "streams", "figure", "unit", "now", "before", "change", "verdict")
HEADS = ("workload", "streams", "figure", "unit", "now (spread)", "before (spread)", "change", "beyond the noise?")


def table(record):
    """The table as lines for a terminal, what stays empty in every row left out."""
    lines = [HEADS] + [tuple(row[column] for column in COLUMNS) for row in rows(record, PLOTS.values())]
    used = [index for index in range(len(HEADS)) if any(line[index] for line in lines[1:])]
    widths = [max(len(line[index]) for line in lines) for index in used]
    text = ["  ".join(line[index].ljust(width) for index, width in zip(used, widths)).rstrip() for line in lines]
    return [heading(record)] + notes(record) + text


def markdown(record, folder):
    """An entry of the deployment's record, with the plots that lie in ``folder`` beside it."""
    lines = ["- %s" % note for note in notes(record)]
    lines.append("- Report: [%s/index.html](%s/index.html), figures: [benchmark.json](%s/benchmark.json)" % (folder, folder, folder))
    lines += ["", "| %s |" % " | ".join(HEADS), "|%s" % ("---|" * len(HEADS))]
    lines += ["| %s |" % " | ".join(row[column] for column in COLUMNS) for row in rows(record, PLOTS.values())]
    lines += [""] + ["![%s](%s/%s)" % (METRICS[key][0], folder, name) for name, key in PLOTS.items()]
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------- plots

_INK, _DIM, _LINE = "#1d2430", "#5b6573", "#d5dae1"
#: Dark enough for white paper, and apart for most eyes; dashes and marks tell the same once more.
_COLOURS = ("#0b62a4", "#b04a00", "#2e7d32", "#7b3fa0")


def _h(text):
    return html.escape(str(text), quote=True)


def ticks(top):
    """Round values from 0 to at least ``top``, about five of them."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * index for index in range(int(math.ceil(top / step - 1e-9)) + 1)]


def _curve(points, colour, dashed, place_x, place_y, name):
    """One line with a mark and its spread at each number of streams."""
    out = ["<g><title>%s</title>" % _h(name)]
    out.append("<path d='M%s' fill='none' stroke='%s' stroke-width='2'%s/>" % (
        " L".join("%.1f %.1f" % (place_x(x), place_y(figure["median"])) for x, figure in points), colour,
        " stroke-dasharray='6 4' opacity='0.65'" if dashed else ""))
    for x, figure in points:
        left, low, high = place_x(x), place_y(figure["least"]), place_y(figure["most"])
        if figure["most"] > figure["least"]:
            out.append("<path d='M%.1f %.1fV%.1fM%.1f %.1fh8M%.1f %.1fh8' stroke='%s' stroke-width='1.3'%s/>" % (
                left, low, high, left - 4, low, left - 4, high, colour, " opacity='0.65'" if dashed else ""))
        out.append("<circle cx='%.1f' cy='%.1f' r='3.5' fill='%s' stroke='%s' stroke-width='1.5'/>" % (
            left, place_y(figure["median"]), "#ffffff" if dashed else colour, colour))
        if not dashed:
            # On the side where the former release's mark is not.
            under = figure.get("before", figure)["median"] > figure["median"]
            out.append("<text x='%.1f' y='%.1f' font-size='11' text-anchor='middle' fill='%s'>%s</text>" % (
                left, low + 16 if under else high - 7, _INK, number(figure["median"])))
    return out + ["</g>"]


def svg(record, key):
    """One figure over the number of streams, a panel for each workload, with everything that is needed to read it alone."""
    title, unit, more = METRICS[key]
    workloads = []
    for cell in record["cells"]:
        if cell["workload"] not in workloads:
            workloads.append(cell["workload"])
    wide, tall, left, top = 430, 260, 70, 116
    width = max(2, len(workloads)) * (wide + left) + 40
    compared = record["compared_with"]
    under = "%s; engine %s%s" % (heading(record), record["engine_version"] or "unknown", " (REHEARSAL ENGINE, no GPU)" if record["rehearsal"] else "")
    out = [
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' width='%d' height='%d' role='img' font-family='system-ui, sans-serif'>" % (
            width, top + tall + 62, width, top + tall + 62),
        "<title>%s</title><rect width='100%%' height='100%%' fill='#ffffff'/>" % _h("%s, %s" % (title, heading(record))),
        "<text x='20' y='26' font-size='16' font-weight='600' fill='%s'>%s (%s), %s is better</text>" % (
            _INK, _h(title), unit, "more" if more else "less"),
        "<text x='20' y='46' font-size='12' fill='%s'>%s</text>" % (_DIM, _h(under)),
        "<text x='20' y='63' font-size='12' fill='%s'>%s; %s</text>" % (_DIM, _h(record["gpus"]), _h(record["time"])),
        "<text x='20' y='80' font-size='12' fill='%s'>Median of the repetitions, bars from least to most. %s</text>" % (
            _DIM, _h("Solid: this release; dashed: release %s." % compared["release"] if compared["release"] else "")),
    ]
    for index, workload in enumerate(workloads):
        chosen = [cell for cell in record["cells"] if cell["workload"] == workload]
        now = [(cell["streams"], cell["figures"][key]) for cell in chosen if key in cell["figures"]]
        before = [(x, figure["before"]) for x, figure in now if "before" in figure]
        x0, colour = left + index * (wide + left), _COLOURS[index % len(_COLOURS)]
        counts = [cell["streams"] for cell in chosen]
        marks = ticks(1.08 * max([figure["most"] for dummy, figure in now + before] or [0]))
        first, last = math.log2(min(counts)), math.log2(max(counts))

        def place_x(streams, x0=x0, first=first, last=last):
            return x0 + 24 + (wide - 68) * ((math.log2(streams) - first) / (last - first) if last > first else 0.5)

        def place_y(value, most=marks[-1]):
            return top + tall - tall * value / most

        for value in marks:
            out.append("<path d='M%d %.1fH%d' stroke='%s'/><text x='%d' y='%.1f' font-size='11' text-anchor='end' fill='%s'>%s</text>" % (
                x0, place_y(value), x0 + wide - 20, _LINE, x0 - 8, place_y(value) + 4, _DIM, "%g" % round(value, 6)))
        for streams in counts:
            out.append("<text x='%.1f' y='%d' font-size='11' text-anchor='middle' fill='%s'>%d</text>" % (
                place_x(streams), top + tall + 17, _DIM, streams))
        out.append("<text x='%d' y='%d' font-size='12' text-anchor='middle' fill='%s'>concurrent streams</text>" % (
            x0 + wide // 2, top + tall + 36, _DIM))
        out.append("<text x='%d' y='%d' font-size='13' font-weight='600' fill='%s'>%s: %d tokens in, %d out</text>" % (
            x0, top - 12, colour, _h(workload), chosen[0]["input_tokens"], chosen[0]["output_tokens"]))
        if before:
            out += _curve(before, colour, True, place_x, place_y, "%s, release %s" % (workload, compared["release"]))
        if now:
            out += _curve(now, colour, False, place_x, place_y, "%s, release %s" % (workload, record["release"]))
        else:
            out.append("<text x='%d' y='%d' font-size='13' fill='%s'>not measured</text>" % (x0 + 20, top + tall // 2, _DIM))
    return "".join(out) + "</svg>\n"


_STYLE = """
:root { --ink: #1d2430; --dim: #5b6573; --bg: #fff; --line: #d5dae1; --better: #1b7f3b; --worse: #b3261e; --warn: #8a5a00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --dim: #9aa5b4; --bg: #14181e; --line: #323a45; --better: #5fd38a; --worse: #ff8a80; --warn: #e8b04b; }
}
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 10px; }
.dim { color: var(--dim); } .warn { color: var(--warn); font-weight: 600; }
.scroll, figure { overflow-x: auto; margin: 0 0 18px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 600; font-size: 13px; }
.better { color: var(--better); } .worse { color: var(--worse); font-weight: 600; } .noise, .unknown { color: var(--dim); }
svg { max-width: 100%; height: auto; }
"""


def page(record):
    """One self-contained HTML page."""
    said = notes(record)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>",
        "<title>%s</title><style>%s</style></head><body><main><h1>%s</h1>" % (_h(heading(record)), _STYLE, _h(heading(record))),
        "<p class='dim'>%s; %s; engine %s, router %s; client: sglang %s, seed %d; %.0f s</p>" % (
            _h(record["time"]), _h(record["gpus"]), _h(record["engine_version"] or "unknown"), _h(record["router"]), _h(record["client"]),
            record["seed"], record["seconds"]),
    ]
    parts += ["<p class='%s'>%s</p>" % ("dim" if note.startswith(("Compared", "Not compared")) else "warn", _h(note)) for note in said]
    parts += ["<figure>%s</figure>" % svg(record, key) for key in PLOTS.values()]
    parts.append("<h2>Figures</h2><p class='dim'>Beyond the noise: the medians differ by more than both spreads together.</p>")
    parts.append("<div class='scroll'><table><thead><tr>%s</tr></thead><tbody>" % "".join("<th>%s</th>" % _h(head) for head in HEADS))
    for row in rows(record, METRICS):
        parts.append("<tr>%s</tr>" % "".join("<td%s>%s</td>" % (
            " class='%s'" % row["tone"] if column in ("change", "verdict") and row["tone"] else "", _h(row[column])) for column in COLUMNS))
    parts.append("</tbody></table></div></main></body></html>\n")
    return "".join(parts)


def history(files, release, previous, mode, keep):
    """From what M(ansible.builtin.find) says of the records on a host: the one to compare with, and the folders to remove.

    A record lies at C(<release>-<mode>/benchmark.json). The release that served before is compared with; when it was not
    measured, the one that was measured last.
    """
    folders = [os.path.dirname(file["path"]) for file in sorted(files, key=lambda file: float(file["mtime"]))]
    names = {folder: os.path.basename(folder) for folder in folders}
    own = "%s-%s" % (release, mode)
    others = [folder for folder in folders if names[folder].endswith("-" + mode) and names[folder] != own]
    former = ([folder for folder in others if names[folder] == "%s-%s" % (previous, mode)] or others)[-1:]
    removable = [folder for folder in folders if names[folder] != own and folder not in former]
    return {
        "before": os.path.join(former[0], "benchmark.json") if former else "",
        # The new record and the one that it is compared with stay in any case.
        "old": removable[:max(0, len(removable) + 1 + len(former) - keep)],
    }


def report(measured, about, before=None):
    """Everything that becomes of a measurement: the record, the files to keep, the table, and what is missing."""
    record = record_of(measured, about, before)
    return {
        "record": record,
        "files": {
            "benchmark.json": json.dumps(record, indent=1, sort_keys=True) + "\n",
            "index.html": page(record),
            **{name: svg(record, key) for name, key in PLOTS.items()},
        },
        "table": table(record),
        "failed": gaps(record, "failed"),
        "missing": gaps(record, "timeout", "not_run"),
    }
