# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verification for people and for other programs: a table, JUnit XML, JSON and one HTML page.

Pure functions from checks to text; the action plugin of the same name writes what they return.
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from xml.sax.saxutils import escape, quoteattr

#: From the head of the table to its end: what needs eyes comes last, where the terminal stops.
ORDER = ("pass", "skipped", "flaky", "inconclusive", "fail")
WORD = {"pass": "pass", "fail": "FAIL", "flaky": "FLAKY", "inconclusive": "UNSURE", "skipped": "skip"}


def merge(parts):
    """The checks of several module results, in the order given, each with its group."""
    checks = []
    for group, result in parts:
        for check in (result or {}).get("checks") or []:
            checks.append(dict(check, group=group))
    return checks


def verdict(checks, mode, strict=False, extra=None):
    """What the role hands on: overall status, whether that is good enough, and a sentence."""
    counts = dict((status, 0) for status in ORDER)
    for check in checks:
        counts[check["status"]] += 1
    status = "skipped"
    for candidate in ("pass", "flaky", "inconclusive", "fail"):
        if counts[candidate]:
            status = candidate
    reasons = [check["reason"] for check in checks if check["status"] == "fail"]
    collapsed = next((c for c in checks if c["reason"] == "pd_collapsed"), None)
    said = ", ".join("%d %s" % (counts[s], s) for s in ("pass", "fail", "flaky", "inconclusive", "skipped") if counts[s])
    sentence = "%s in mode %s: %s" % (status, mode, said or "no checks")
    worst = [c for c in checks if c["status"] == status and status in ("fail", "inconclusive", "flaky")]
    if collapsed is not None and collapsed not in worst[:1]:
        worst.insert(0, collapsed)
    if worst:
        named = []
        for check in worst[:4]:
            text = "%s (%s)" % (check["id"], check["reason"])
            if text not in named:
                named.append(text)
        sentence += ". " + ", ".join(named) + (" and %d more" % (len(worst) - len(named)) if len(worst) > len(named) else "")
        first = worst[0]
        sentence += ". %s: %s" % (first["id"], first.get("evidence") or first["reason"])
        if first.get("hint"):
            sentence += ". Look at: %s" % first["hint"]
    result = {
        "mode": mode,
        "status": status,
        "ok": status in ("pass", "skipped") or (status == "flaky" and not strict),
        "counts": counts,
        "reasons": sorted(set(reasons)),
        "message": sentence,
    }
    result.update(extra or {})
    return result


# --------------------------------------------------------------------------- the table


def _number(value, unit="s"):
    if value is None:
        return ""
    if value < 10:
        return "%.2f %s" % (value, unit)
    return "%.1f %s" % (value, unit)


def table(checks, title, width=118):
    """One line a check; what did not pass comes last, with what was seen and where to look."""
    if checks and all(check["status"] == "skipped" and check["reason"] == checks[0]["reason"] for check in checks):
        return "%s\n%d checks skipped: %s" % (title, len(checks), checks[0].get("evidence") or checks[0]["reason"])
    ranked = sorted(checks, key=lambda c: ORDER.index(c["status"]))
    column = max([len(c["id"]) for c in checks] + [12])
    room = max(30, width - column - 30)
    lines = [title, "-" * width, "%-7s %-*s %9s %9s  %s" % ("", column, "check", "time", "ttft", "what was seen")]
    said = None
    alike = {}
    for check in ranked:
        if check["status"] == "skipped":
            alike.setdefault((check["reason"], check.get("evidence")), []).append(check)
    for check in ranked:
        seen = check.get("evidence") or ""
        same = alike.get((check["reason"], check.get("evidence")), []) if check["status"] == "skipped" else []
        if len(same) > 4:
            if check is same[0]:
                lines.append("%-7s %s" % (WORD["skipped"], textwrap.shorten("%d checks, %s to %s; %s: %s" % (
                    len(same), same[0]["id"], same[-1]["id"], check["reason"], seen), width - 8, placeholder=" ...")))
            continue
        if check["status"] != "pass":
            seen = "%s: %s" % (check["reason"], seen) if seen else check["reason"]
        if check.get("attempts", 0) > 1 and check["status"] == "pass":
            seen = "%d of %d, %s" % (check["passed"], check["attempts"], seen)
        pieces = textwrap.wrap(seen, room, max_lines=4, placeholder=" ...") or [""]
        if check["status"] in ("pass", "skipped"):
            pieces = [textwrap.shorten(seen, room, placeholder=" ...") if len(pieces) > 1 else pieces[0]]
            if seen and not pieces[0].replace(" ...", ""):
                pieces = [seen[:room - 4] + " ..."]
        lines.append("%-7s %-*s %9s %9s  %s" % (
            WORD[check["status"]], column, check["id"], _number(check.get("seconds")), _number(check.get("ttft")), pieces[0]))
        lead = " " * (8 + column + 21)
        lines.extend(lead + " " + piece for piece in pieces[1:])
        if check["status"] not in ("pass", "skipped") and check.get("hint") and check["hint"] != said:
            said = check["hint"]
            lines.extend(lead + " " + piece for piece in textwrap.wrap("-> " + said, room))
        for note in check.get("notes") or []:
            if check["status"] == "pass":
                lines.extend(lead + " " + piece for piece in textwrap.wrap("note: " + note, room))
    lines.append("-" * width)
    return "\n".join(line.rstrip() for line in lines)


# --------------------------------------------------------------------------- JUnit


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text):
    return _NOT_XML.sub("\ufffd", str(text))


def junit(checks, result):
    """JUnit XML: a test suite a group. Inconclusive checks are errors, flaky ones pass with a note."""
    groups = []
    for check in checks:
        if check["group"] not in groups:
            groups.append(check["group"])
    out = ['<?xml version="1.0" encoding="UTF-8"?>',
           '<testsuites name=%s tests="%d" failures="%d" errors="%d" skipped="%d" time="%.3f">' % (
               quoteattr(_xml("%s (%s)" % (result.get("host", ""), result["mode"]))), len(checks), result["counts"]["fail"],
               result["counts"]["inconclusive"], result["counts"]["skipped"], sum(c.get("seconds") or 0 for c in checks))]
    for group in groups:
        mine = [c for c in checks if c["group"] == group]
        out.append('  <testsuite name=%s tests="%d" failures="%d" errors="%d" skipped="%d" time="%.3f" timestamp=%s hostname=%s>' % (
            quoteattr(_xml(group)), len(mine), sum(c["status"] == "fail" for c in mine), sum(c["status"] == "inconclusive" for c in mine),
            sum(c["status"] == "skipped" for c in mine), sum(c.get("seconds") or 0 for c in mine),
            quoteattr(_xml(result.get("time", ""))), quoteattr(_xml(result.get("host", "")))))
        for check in mine:
            head = '    <testcase classname=%s name=%s time="%.3f"' % (
                quoteattr(_xml("%s.%s" % (group, check["id"].split(".")[0]))), quoteattr(_xml(check["id"])), check.get("seconds") or 0)
            body = _xml("%s\n%s" % (check.get("evidence") or "", check.get("hint") or "")).strip()
            if check["status"] == "pass":
                out.append(head + "/>")
                continue
            out.append(head + ">")
            if check["status"] in ("fail", "inconclusive"):
                tag = "failure" if check["status"] == "fail" else "error"
                out.append("      <%s type=%s message=%s>%s</%s>" % (
                    tag, quoteattr(_xml(check["reason"])), quoteattr(_xml(check.get("evidence") or check["reason"])), escape(body), tag))
            elif check["status"] == "skipped":
                out.append("      <skipped message=%s/>" % quoteattr(_xml("%s: %s" % (check["reason"], check.get("evidence") or ""))))
            else:
                out.append("      <system-out>%s</system-out>" % escape(_xml("flaky, %s: %s" % (check["reason"], body))))
            out.append("    </testcase>")
        out.append("  </testsuite>")
    out.append("</testsuites>")
    return "\n".join(out) + "\n"


def as_json(checks, result):
    return json.dumps(dict(result, checks=checks), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


# --------------------------------------------------------------------------- HTML

_STYLE = """
:root { --bg: #ffffff; --panel: #f5f6f8; --ink: #1c2330; --dim: #5c6675; --line: #d8dde5;
  --pass: #18794e; --fail: #c4291c; --flaky: #9a6700; --inconclusive: #6b4fb3; --skipped: #6b7482; --bar: #2f6fd0; --bar2: #7fa8e6; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161d; --panel: #1b212b; --ink: #e6eaf0; --dim: #9aa5b4; --line: #323b48;
  --pass: #4cc38a; --fail: #ff7b6e; --flaky: #e3b341; --inconclusive: #b39ddb; --skipped: #8d97a5; --bar: #6ea5f5; --bar2: #3c64a0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 10px; }
.dim { color: var(--dim); } .mono { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; }
.verdict { display: flex; flex-wrap: wrap; gap: 12px 24px; align-items: baseline; background: var(--panel); border: 1px solid var(--line);
  border-left: 6px solid var(--now); border-radius: 6px; padding: 14px 18px; margin: 16px 0; }
.verdict strong { font-size: 20px; color: var(--now); text-transform: uppercase; letter-spacing: .04em; }
.counts { display: flex; flex-wrap: wrap; gap: 8px; } .counts span { border: 1px solid var(--line); border-radius: 99px; padding: 1px 10px; }
.strip { display: flex; height: 10px; border-radius: 5px; overflow: hidden; width: 100%; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top; padding: 7px 10px; border-top: 1px solid var(--line); }
thead th { border-top: 0; background: var(--panel); font-weight: 600; white-space: nowrap; } td.num { text-align: right; white-space: nowrap; }
td.seen { overflow-wrap: anywhere; min-width: 260px; } td.id { white-space: nowrap; }
.tag { font-weight: 600; font-size: 12px; white-space: nowrap; } .hint { color: var(--dim); margin-top: 3px; }
svg { max-width: 100%; min-width: 700px; height: auto; display: block; } svg text { fill: var(--ink); font-family: inherit; } svg .dim { fill: var(--dim); }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 14px; overflow-x: auto; }
figcaption { color: var(--dim); margin-bottom: 8px; }
"""

_LABEL = {"pass": "pass", "fail": "fail", "flaky": "flaky", "inconclusive": "inconclusive", "skipped": "skipped"}


def _h(text):
    return html.escape(_xml(text), quote=True)


def _row(check):
    status = check["status"]
    seen = _h(check.get("evidence") or "")
    if status != "pass":
        seen = "<b class='mono'>%s</b> %s" % (_h(check["reason"]), seen)
    if check.get("excerpt"):
        seen += "<details><summary class='dim'>raw answer</summary><div class='mono'>%s</div></details>" % _h(check["excerpt"])
    if check.get("hint") and status not in ("pass", "skipped"):
        seen += "<div class='hint'>&rarr; %s</div>" % _h(check["hint"])
    for note in check.get("notes") or []:
        seen += "<div class='hint'>note: %s</div>" % _h(note)
    tries = "%d/%d" % (check["passed"], check["attempts"]) if check.get("attempts") else ""
    return (
        "<tr><td><span class='tag' style='color:var(--%s)'>%s</span></td><td class='id mono'>%s</td><td class='seen'>%s</td>"
        "<td class='num'>%s</td><td class='num'>%s</td><td class='num'>%s</td></tr>"
        % (status, _LABEL[status], _h(check["id"]), seen, tries, _number(check.get("seconds")), _number(check.get("ttft")))
    )


def _bars(checks, key, caption, colour):
    """A horizontal bar a check, longest first, as inline SVG."""
    data = [(c["id"], c[key], c["status"]) for c in checks if c.get(key)]
    if not data:
        return ""
    data.sort(key=lambda item: -item[1])
    data = data[:24]
    top = max(value for dummy, value, dummy2 in data)
    left, longest, height = 210, 560, 20
    total = len(data) * height + 8
    out = ["<figure><figcaption>%s</figcaption><svg viewBox='0 0 %d %d' width='%d' height='%d' role='img' aria-label='%s'>" % (
        _h(caption), left + longest + 90, total, left + longest + 90, total, _h(caption))]
    for position, (name, value, status) in enumerate(data):
        y = position * height + 4
        length = max(3.0, longest * value / top)
        fill = "var(--%s)" % colour if status in ("pass", "skipped") else "var(--%s)" % status
        out.append("<text x='%d' y='%d' font-size='12' text-anchor='end'>%s</text>" % (left - 8, y + 13, _h(name)))
        out.append("<rect x='%d' y='%d' width='%.1f' height='%d' rx='2' fill='%s'/>" % (left, y + 2, length, height - 6, fill))
        label = "%.0f ms" % (value * 1000) if value < 1 else "%.2f s" % value
        out.append("<text class='dim' x='%.1f' y='%d' font-size='12'>%s</text>" % (left + length + 6, y + 13, label))
    out.append("</svg></figure>")
    return "".join(out)


def _group_status(checks, names):
    """The gravest status among checks whose id ends in one of ``names``."""
    found = [c["status"] for c in checks if any(c["id"].endswith("." + n) for n in names)]
    for status in ("fail", "inconclusive", "flaky", "pass"):
        if status in found:
            return status
    return "skipped"


def _box(x, y, width, height, title, lines, status, dashed=False):
    out = ["<rect x='%d' y='%d' width='%d' height='%d' rx='8' fill='var(--bg)' stroke='var(--%s)' stroke-width='2'%s/>" % (
        x, y, width, height, status, " stroke-dasharray='6 5'" if dashed else "")]
    out.append("<text x='%d' y='%d' font-size='14' font-weight='600'>%s</text>" % (x + 14, y + 24, _h(title)))
    for position, line in enumerate(lines):
        out.append("<text class='dim' x='%d' y='%d' font-size='12'>%s</text>" % (x + 14, y + 45 + position * 18, _h(line)))
    return "".join(out)


# what fits into a box of 270 at the size of its lines
_BOX_CHARACTERS = 36


def _describe(instance):
    lines = ["%s:%s" % (instance.get("host", ""), instance.get("port", ""))]
    gpus = instance.get("gpus") or []
    if gpus:
        shown = "%d-%d" % (gpus[0], gpus[-1]) if gpus == list(range(gpus[0], gpus[-1] + 1)) and len(gpus) > 1 else ", ".join(str(g) for g in gpus)
        numa = instance.get("numa_node", -1)
        lines.append("GPUs %s%s" % (shown, ", NUMA node %s" % numa if isinstance(numa, int) and numa >= 0 else ""))
    if instance.get("mem_fraction_static"):
        lines.append("memory fraction %s" % instance["mem_fraction_static"])
    if instance.get("kernels"):
        lines.extend(textwrap.wrap("kernels %s" % ", ".join(instance["kernels"]), _BOX_CHARACTERS))
    return lines


def topology_svg(plan, mode, checks):
    """The planned picture, each box in the colour of its checks."""
    instances = (plan or {}).get("instances") or {}
    if not instances:
        return ""
    out = ["<figure><figcaption>Topology in mode %s; a box has the colour of its checks</figcaption>" % _h(mode),
           "<svg viewBox='0 0 1000 350' width='1000' height='350' role='img' aria-label='topology'>",
           "<defs><marker id='tip' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto-start-reverse'>"
           "<path d='M0 0L10 5L0 10z' fill='var(--dim)'/></marker></defs>"]

    def arrow(x1, y1, x2, y2, text="", dx=0, dy=-8):
        out.append("<line x1='%d' y1='%d' x2='%d' y2='%d' stroke='var(--dim)' stroke-width='1.5' marker-end='url(#tip)'/>" % (x1, y1, x2, y2))
        if text:
            out.append("<text class='dim' x='%d' y='%d' font-size='12' text-anchor='middle'>%s</text>" % ((x1 + x2) // 2 + dx, (y1 + y2) // 2 + dy, _h(text)))

    active = ((plan.get("modes") or {}).get(mode) or {}).get("active") or []

    def draw(name, x, y, width, height):
        if name not in instances:
            return
        instance = instances[name]
        on = name in active
        status = _group_status(checks, [name])
        lines = _describe(instance) if on else _describe(instance)[:2] + ["stopped and disabled"]
        out.append(_box(x, y, width, height, instance.get("unit", name), lines, status if on else ("skipped" if status == "pass" else status), dashed=not on))

    out.append("<text x='20' y='96' font-size='13'>clients</text>")
    if "router" in active:
        arrow(75, 92, 128, 92)
    draw("router", 130, 40, 230, 105)
    draw("single", 130, 205, 270, 125)
    draw("prefill", 560, 30, 270, 125)
    draw("decode", 560, 205, 270, 125)
    if "router" in active:
        arrow(360, 85, 558, 85, "prompt")
        arrow(360, 105, 558, 255)
        out.append("<text class='dim' x='462' y='152' font-size='12'>same request</text><text class='dim' x='474' y='168' font-size='12'>and answer</text>")
        arrow(695, 155, 695, 203, "KV cache", dx=38, dy=4)
    elif "single" in active:
        arrow(60, 104, 128, 240)
    out.append("</svg></figure>")
    return "".join(out)


def page(checks, result, plan=None):
    """One self-contained HTML page."""
    counts = result["counts"]
    total = max(1, len(checks))
    strip = "".join("<i style='width:%.3f%%;background:var(--%s)'></i>" % (100.0 * counts[s] / total, s) for s in ORDER if counts[s])
    pills = "".join("<span style='color:var(--%s)'>%d %s</span>" % (s, counts[s], _LABEL[s])
                    for s in ("pass", "fail", "flaky", "inconclusive", "skipped") if counts[s])
    bad = [c for c in checks if c["status"] in ("fail", "inconclusive", "flaky")]
    bad.sort(key=lambda c: -ORDER.index(c["status"]))
    head = "<thead><tr><th>status</th><th>check</th><th>what was seen</th><th>tries</th><th>time</th><th>first token</th></tr></thead>"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>",
        "<title>Verification of %s: %s</title><style>%s</style></head><body><main>" % (_h(result.get("host", "")), _h(result["status"]), _STYLE),
        "<h1>Verification of %s</h1><div class='dim'>%s, mode %s%s</div>" % (
            _h(result.get("host", "")), _h(result.get("time", "")), _h(result["mode"]),
            ", release <span class='mono'>%s</span>" % _h(result["release"]) if result.get("release") else ""),
        "<section class='verdict' style='--now:var(--%s)'><strong>%s</strong><div class='counts'>%s</div><div class='strip'>%s</div></section>" % (
            result["status"], _LABEL[result["status"]], pills, strip),
    ]
    if bad:
        parts.append("<h2>Needs eyes</h2><div class='scroll'><table>%s<tbody>%s</tbody></table></div>" % (head, "".join(_row(c) for c in bad)))
    picture = topology_svg(plan, result["mode"], checks)
    if picture:
        parts.append("<h2>Topology</h2>" + picture)
    latency = _bars(checks, "seconds", "Time of each check, all attempts together", "bar")
    first = _bars(checks, "ttft", "Time to first token of streamed answers, median", "bar2")
    if latency or first:
        parts.append("<h2>Latency</h2>" + latency)
        if first:
            parts.append("<h2>Time to first token</h2>" + first)
    groups = []
    for check in checks:
        if check["group"] not in groups:
            groups.append(check["group"])
    for group in groups:
        rows = "".join(_row(c) for c in checks if c["group"] == group)
        parts.append("<h2>All checks: %s</h2><div class='scroll'><table>%s<tbody>%s</tbody></table></div>" % (_h(group), head, rows))
    parts.append("</main></body></html>\n")
    return "".join(parts)
