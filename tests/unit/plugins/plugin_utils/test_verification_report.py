# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table, JUnit XML, JSON and the HTML page, the last one also in a browser."""

from __future__ import annotations

import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "module_utils"))

from topology_host import PLAN  # noqa: E402

from ansible_collections.blackwell.dsv4.plugins.module_utils.probes import Check  # noqa: E402
from ansible_collections.blackwell.dsv4.plugins.plugin_utils import verification_report as report  # noqa: E402

HOSTILE = "</script><script>alert(1)</script> <b>&amp; \x00\x1b[31m \ud800 ]]> \" ' | \u6771\u4eac \U0001f680 " + "x" * 400


def checks(*extra):
    found = [
        Check("mode", "pass", "ok", "a router stands there", group="topology", seconds=0.01),
        Check("unit.decode", "pass", "ok", "active (running)", group="topology", seconds=0.02),
        Check("gpus.decode", "pass", "ok", "holds GPU 4, 5, 6, 7 and no other", group="topology"),
        Check("kv.decode", "pass", "ok", "1500000 tokens", group="topology", notes=["below the 2000000 that TP4 should reach"]),
        Check("xid", "skipped", "kernel_log_unreadable", "dmesg: Operation not permitted", group="topology"),
        Check("arithmetic.whole", "pass", "ok", 'content "391"', group="probes", seconds=1.25, attempts=3, passed=3, tokens=9),
        Check("arithmetic.stream", "pass", "ok", 'content "391"', group="probes", seconds=0.75, ttft=0.081, attempts=3, passed=3),
        Check("thinking.stream", "fail", "think_tag_in_content", HOSTILE, "--reasoning-parser deepseek-v4 on sglang-dsv4-decode",
              group="probes", seconds=12.5, ttft=0.2, attempts=3, passed=0, excerpt=HOSTILE),
        Check("tools.whole", "flaky", "server_error", "1 of 3 failed", "journalctl -u sglang-dsv4-decode", group="probes", attempts=3, passed=2),
        Check("unicode.whole", "inconclusive", "truncated", "max_tokens 64 was used up", "raise max_tokens", group="probes", attempts=1),
    ]
    return found + list(extra)


def outcome(found, strict=False):
    return report.verdict(found, "pd", strict, {"host": "gpu01", "time": "2026-01-01 12:00:00 UTC", "release": "3f2a91c0d7be"})


@pytest.mark.parametrize(("statuses", "strict", "status", "ok"), [
    (["pass", "skipped"], False, "pass", True),
    (["pass", "flaky"], False, "flaky", True),
    (["pass", "flaky"], True, "flaky", False),
    (["flaky", "inconclusive"], False, "inconclusive", False),
    (["inconclusive", "fail", "flaky"], False, "fail", False),
    (["skipped", "skipped"], False, "skipped", True),
    ([], False, "skipped", True),
])
def test_the_gravest_status_decides(statuses, strict, status, ok):
    found = [Check("c%d" % n, s, "r", group="g") for n, s in enumerate(statuses)]
    result = outcome(found, strict)
    assert (result["status"], result["ok"]) == (status, ok)


def test_the_message_names_probe_sight_and_flag():
    found = [Check("thinking.whole", "fail", "think_tag_in_content", "content: sum 391</think>391",
                   "--reasoning-parser deepseek-v4 on sglang-dsv4-decode", group="probes")]
    text = outcome(found)["message"]
    for word in ("thinking.whole", "think_tag_in_content", "sum 391</think>391", "--reasoning-parser deepseek-v4"):
        assert word in text


def test_a_collapsed_pair_leads_the_message():
    found = checks(Check("mode", "fail", "pd_collapsed", "sglang-dsv4 is active", "site.yml brings it back", group="topology"))
    assert outcome(found)["message"].index("pd_collapsed") < outcome(found)["message"].index("think_tag_in_content")


def test_the_table_has_a_line_a_check_and_failures_last_with_their_hint():
    text = report.table(checks(), "Verification of gpu01")
    lines = text.splitlines()
    heads = [line for line in lines if line[:7].strip() in set(report.WORD.values())]
    assert len(heads) == len(checks())
    order = [line[:7].strip() for line in heads]
    assert order == sorted(order, key=lambda word: report.ORDER.index({v: k for k, v in report.WORD.items()}[word]))
    assert order[-1] == "FAIL"
    assert any("-> --reasoning-parser deepseek-v4" in line for line in lines[-8:])
    assert all(len(line) <= 118 for line in lines)
    assert "note: below the 2000000" in text


def test_nothing_run_is_one_line():
    found = [Check("c%d" % n, "skipped", "check_mode", "no request is sent in check mode", group="g") for n in range(60)]
    assert report.table(found, "title").splitlines() == ["title", "60 checks skipped: no request is sent in check mode"]


def test_many_that_were_skipped_for_one_reason_share_a_line():
    found = checks(*[Check("p%d" % n, "skipped", "not_started", "waiting", group="probes") for n in range(9)])
    text = report.table(found, "title")
    assert "9 checks, p0 to p8; not_started: waiting" in text and text.count("not_started") == 1


def test_junit_counts_what_it_holds():
    found = checks()
    root = ElementTree.fromstring(report.junit(found, outcome(found)))
    assert [suite.get("name") for suite in root] == ["topology", "probes"]
    cases = root.findall(".//testcase")
    assert [case.get("name") for case in cases] == [c["id"] for c in found]
    assert (root.get("tests"), root.get("failures"), root.get("errors"), root.get("skipped")) == ("10", "1", "1", "1")
    assert [len(root.findall(".//" + tag)) for tag in ("failure", "error", "skipped")] == [1, 1, 1]
    assert root.find(".//failure").get("type") == "think_tag_in_content"


def test_json_is_the_whole_result():
    found = checks()
    document = json.loads(report.as_json([dict(c, evidence=c["evidence"].replace("\ud800", "")) for c in found], outcome(found)))
    assert document["status"] == "fail" and len(document["checks"]) == 10


class Tags(html.parser.HTMLParser):
    VOID = {"meta", "br", "line", "rect", "path", "link", "img", "input"}

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes.extend(attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes.extend(attrs)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()


def the_page(found=None, mode="pd"):
    found = found or checks()
    return report.page(found, dict(outcome(found), mode=mode), PLAN)


def test_the_page_is_closed_self_contained_and_takes_hostile_text_as_text():
    text = the_page()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen and "link" not in tags.seen and "img" not in tags.seen
    assert not [a for a in tags.attributes if a[0] in ("src", "href", "onload", "onclick")]
    assert not re.search(r"url\(\s*['\"]?(?!#)", text) and "@import" not in text
    assert "\x00" not in text and "\ud800" not in text
    text.encode("utf-8")
    for word in ("Needs eyes", "Topology", "Latency", "Time to first token", "sglang-dsv4-router", "GPUs 4-7, NUMA node 1", "think_tag_in_content"):
        assert word in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)

MEASURE = """<script>
const page = document.documentElement, out = {};
out.overflow = page.scrollWidth - page.clientWidth;
out.sections = [...document.querySelectorAll('h2')].map(h => [h.textContent, h.nextElementSibling.getBoundingClientRect().height]);
out.rows = document.querySelectorAll('tbody tr').length;
out.background = getComputedStyle(document.body).backgroundColor;
out.ink = getComputedStyle(document.body).color;
out.bars = [...document.querySelectorAll('figure rect')].filter(r => r.getBoundingClientRect().width < 0.5).length;
const boxes = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
out.outside = [];
for (const svg of document.querySelectorAll('svg')) {
  const frame = svg.getBoundingClientRect();
  for (const t of svg.querySelectorAll('text')) {
    const b = t.getBoundingClientRect();
    if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.bottom > frame.bottom + 1) out.outside.push(t.textContent);
  }
}
const texts = [...document.querySelectorAll('svg[aria-label=topology] text')], clash = [];
texts.forEach((a, i) => texts.slice(i + 1).forEach(b => {
  const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
  if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3) clash.push([a.textContent, b.textContent]);
}));
out.clash = clash;
const crossing = [];
for (const t of texts.filter(t => !t.getAttribute('font-weight'))) for (const r of document.querySelectorAll('svg[aria-label=topology] rect')) {
  const p = t.getBoundingClientRect(), q = r.getBoundingClientRect();
  const apart = p.right <= q.left || q.right <= p.left || p.bottom <= q.top || q.bottom <= p.top;
  const inside = p.left >= q.left && p.right <= q.right && p.top >= q.top && p.bottom <= q.bottom;
  if (!apart && !inside) crossing.push(t.textContent);
}
out.crossing = crossing;
document.body.setAttribute('data-measured', JSON.stringify(out));
</script></body>"""


def measured(tmp_path, text, width, dark=False):
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", MEASURE), encoding="utf-8")
    argv = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--user-data-dir=%s" % (tmp_path / "profile"),
            "--window-size=%d,2000" % width, "--virtual-time-budget=2000", "--dump-dom"]
    if dark:
        argv.append("--blink-settings=preferredColorScheme=0")
    done = subprocess.run(argv + [path.as_uri()], capture_output=True, check=True, timeout=120)
    found = re.search(r'data-measured="([^"]*)"', done.stdout.decode("utf-8", "replace"))
    assert found, done.stdout[-2000:]
    return json.loads(html.unescape(found.group(1)))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")
@pytest.mark.parametrize(("width", "dark", "mode"), [(1280, False, "pd"), (1280, True, "pd"), (500, False, "pd"), (1280, False, "single")])
def test_the_page_looks_right_in_a_browser(tmp_path, width, dark, mode):
    seen = measured(tmp_path, the_page(mode=mode), width, dark)
    assert seen["overflow"] <= 0, "the page scrolls sideways"
    assert all(height > 20 for dummy, height in seen["sections"]), seen["sections"]
    assert seen["rows"] == len(checks()) + 3, "all checks, and those that need eyes once more"
    assert seen["outside"] == [] and seen["clash"] == [] and seen["crossing"] == [] and seen["bars"] == 0
    if width > 1000:
        light = [int(n) for n in re.findall(r"\d+", seen["background"])][:3]
        ink = [int(n) for n in re.findall(r"\d+", seen["ink"])][:3]
        assert (sum(light) < sum(ink)) == dark, seen
