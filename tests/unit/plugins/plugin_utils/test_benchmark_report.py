# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of a benchmark, its figures, what counts as a change, and the files that come of it."""

from __future__ import annotations

import copy
import json
import random
from xml.etree import ElementTree

import pytest

from ansible_collections.blackwell.dsv4.plugins.plugin_utils import benchmark_report as logic

WORKLOADS = [
    {"name": "short", "input_tokens": 1024, "output_tokens": 256, "streams": [8, 1], "rounds": 4},
    {"name": "long", "input_tokens": 100000, "output_tokens": 256, "streams": [1, 4]},
]
ABOUT = {"host": "host<1>", "time": "2026-11-30 03:20:00 UTC", "release": "1f0c2ab94d37", "mode": "pd", "router": "sglang-router", "gpus": "8 x GPU"}


def measured(scale=1.0, repeats=3, engine="0.5.23", spread=0.01, outcome=None):
    """A measurement whose figures are ``scale`` times the usual; ``outcome(run)`` may take a run's figures away."""
    runs = []
    for run in logic.plan(WORKLOADS, repeats, 100):
        value = scale * run["streams"] * (1 + spread * (run["repeat"] - 2))
        done = dict(run, status="ok", reason="", figures={
            "ttft_ms": 100 * value, "ttft_p99_ms": 200 * value, "itl_ms": 8 * value, "itl_p99_ms": 20 * value, "tpot_ms": 8 * value,
            "output_tokens_per_s": 120 * value})
        status = outcome(run) if outcome else None
        runs.append(dict(done, status=status, reason="because", figures={}) if status else done)
    return {"runs": runs, "engine_version": engine, "client": "0.5.23", "seed": 100, "load": 0.1, "seconds": 61.5}


# ---- plan


def test_the_plan_goes_round_and_no_two_runs_share_a_seed():
    runs = logic.plan(WORKLOADS, 2, (1 << 31) - 2)
    assert [(run["repeat"], run["workload"], run["streams"], run["requests"]) for run in runs[:4]] == [
        (1, "short", 1, 4), (1, "short", 8, 32), (1, "long", 1, 1), (1, "long", 4, 4)]
    assert [run["repeat"] for run in runs] == [1] * 4 + [2] * 4
    warm_up = logic.warm_up(runs)
    assert [(run["workload"], run["streams"], run["requests"], run["repeat"]) for run in warm_up] == [("short", 1, 1, 0), ("long", 1, 1, 0)]
    seeds = [run["seed"] for run in runs + warm_up]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 31 for seed in seeds)


@pytest.mark.parametrize("workloads, repeats", [
    ([], 1), (WORKLOADS, 0), (WORKLOADS[:1] * 2, 1), ([dict(WORKLOADS[0], name="a/b")], 1), ([dict(WORKLOADS[0], streams=[0])], 1),
    ([dict(WORKLOADS[0], output_tokens=0)], 1), ([dict(WORKLOADS[0], rounds=0)], 1),
])
def test_a_plan_that_means_nothing_is_refused(workloads, repeats):
    with pytest.raises(ValueError):
        logic.plan(workloads, repeats, 1)


def test_what_would_take_too_long_again_is_not_tried():
    runs = {(run["workload"], run["streams"]): run for run in logic.plan(WORKLOADS, 1, 1)}
    late = dict(runs["short", 8], status="timeout", reason="")
    assert logic.hopeless(runs["short", 8], [late]) == "8 streams took too long before"
    assert not logic.hopeless(runs["short", 1], [late]) and not logic.hopeless(runs["long", 4], [late])
    assert logic.hopeless(runs["long", 1], [dict(runs["short", 1], status="failed", reason="")]) == "a run before it failed"


def test_check_mode_says_each_load_once():
    assert logic.planned_lines(logic.plan(WORKLOADS, 3, 1)) == [
        "short, 1 stream: 4 requests of 1024 tokens in and 256 out, 3 times", "short, 8 streams: 32 requests of 1024 tokens in and 256 out, 3 times",
        "long, 1 stream: 1 request of 100000 tokens in and 256 out, 3 times", "long, 4 streams: 4 requests of 100000 tokens in and 256 out, 3 times"]


# ---- change


def figure(values):
    values = list(values)
    return {"values": values, "median": sorted(values)[len(values) // 2], "least": min(values), "most": max(values)}


@pytest.mark.parametrize("now, before, more, percent, verdict", [
    ([90, 91, 92], [100, 101, 102], False, -9.9, "better"),
    ([90, 91, 92], [100, 101, 102], True, -9.9, "worse"),
    ([110, 111, 112], [100, 101, 102], False, 9.9, "worse"),
    ([103, 104, 105], [100, 101, 102], False, 3.0, "noise"),
    ([90], [100], False, -10.0, "unknown"),
    ([0, 0], [0, 0], False, 0.0, "noise"),
])
def test_a_change_is_beyond_the_noise_when_it_exceeds_both_spreads(now, before, more, percent, verdict):
    assert logic.change(figure(now), figure(before), more) == {"percent": percent, "verdict": verdict}


def test_like_runs_rarely_differ_beyond_the_noise_and_unlike_ones_do():
    """The rule's errors, counted on normal noise: the README says one in a hundred."""
    chance = random.Random(20261130)

    def share(shift, trials=20000):
        draw = chance.gauss
        verdicts = [logic.change(figure(draw(100, 1) for dummy in range(3)), figure(draw(100 + shift, 1) for dummy in range(3)), False)["verdict"]
                    for dummy in range(trials)]
        return 1 - verdicts.count("noise") / trials

    assert 0.002 < share(0) < 0.02
    assert share(10) > 0.99, "ten times the noise is seen"


# ---- record


def test_a_record_has_medians_spreads_and_changes():
    before = logic.report(measured(1.0), dict(ABOUT, release="77d0f3e8a1bc"))["record"]
    record = logic.report(measured(0.8), ABOUT, before)["record"]
    assert record["compared_with"] == {"release": "77d0f3e8a1bc", "time": ABOUT["time"], "reason": ""} and record["rehearsal"] is False
    cell = next(cell for cell in record["cells"] if (cell["workload"], cell["streams"]) == ("short", 8))
    ttft = cell["figures"]["ttft_ms"]
    assert (ttft["median"], round(ttft["least"], 1), round(ttft["most"], 1)) == (640.0, 633.6, 646.4)
    assert ttft["before"]["median"] == 800.0 and ttft["change"] == {"percent": -20.0, "verdict": "better"}
    assert cell["figures"]["output_tokens_per_s"]["change"]["verdict"] == "worse"
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize("change, words", [
    ({"mode": "single"}, "the mode differs: single before, pd now"),
    ({"rehearsal": True}, "the kind of engine differs"),
    ({"client": "0.6"}, "the client's version differs: 0.6 before, 0.5.23 now"),
    ({"format": 0}, "the format differs"),
])
def test_what_cannot_be_compared_is_not(change, words):
    before = dict(logic.report(measured(), ABOUT)["record"], **change)
    record = logic.report(measured(), ABOUT, before)["record"]
    assert record["compared_with"]["reason"].startswith(words)
    assert not any("change" in figure for cell in record["cells"] for figure in cell["figures"].values())


def test_a_first_measurement_and_other_loads_have_nothing_beside_them():
    first = logic.report(measured(), ABOUT)
    assert "Not compared: no other release was measured here." in first["table"]
    before = copy.deepcopy(first["record"])
    for cell in before["cells"]:
        cell["output_tokens"] = 128
    record = logic.report(measured(), ABOUT, before)["record"]
    assert record["compared_with"]["release"] and not any("change" in figure for cell in record["cells"] for figure in cell["figures"].values())


def test_gaps_are_told_everywhere_and_failures_apart():
    status = {("long", 4): "timeout", ("short", 8): "failed"}
    report = logic.report(measured(outcome=lambda run: status.get((run["workload"], run["streams"])) if run["repeat"] == 2 else None), ABOUT)
    assert report["missing"] == ["long, 4 streams, repetition 2: timeout, because"]
    assert report["failed"] == ["short, 8 streams, repetition 2: failed, because"]
    for gap in report["missing"] + report["failed"]:
        assert any(gap in line for line in report["table"]) and gap in report["files"]["index.html"]
    cell = next(cell for cell in report["record"]["cells"] if (cell["workload"], cell["streams"]) == ("short", 8))
    assert len(cell["figures"]["ttft_ms"]["values"]) == 2


def test_a_warm_up_that_failed_fails_the_benchmark():
    result = measured(outcome=lambda run: "not_run")
    result["runs"].insert(0, dict(logic.warm_up(logic.plan(WORKLOADS, 1, 1))[0], status="failed", reason="Unauthorized", figures={}))
    report = logic.report(result, ABOUT)
    assert report["failed"] == ["short, 1 stream, warm-up: failed, Unauthorized"]
    assert [cell["requests"] for cell in report["record"]["cells"]] == [4, 32, 1, 4]


# ---- files


def texts(svg):
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith(("}text", "}title"))]


@pytest.mark.parametrize("name, title", [
    ("ttft.svg", "Time to first token, median (ms), less is better"), ("itl.svg", "Inter-token latency, median (ms), less is better"),
    ("throughput.svg", "Output of all streams (tokens/s), more is better"),
])
def test_a_plot_can_be_read_alone(name, title):
    before = logic.report(measured(1.3), dict(ABOUT, release="77d0f3e8a1bc"))["record"]
    said = texts(logic.report(measured(), ABOUT, before)["files"][name])
    assert title in said and said.count("concurrent streams") == 2
    assert "short: 1024 tokens in, 256 out" in said and "long: 100000 tokens in, 256 out" in said
    assert any("host<1>, release 1f0c2ab94d37, mode pd; engine 0.5.23" in text for text in said)
    assert any("dashed: release 77d0f3e8a1bc" in text for text in said)
    assert any("Median of the repetitions, bars from least to most" in text for text in said)
    width = int(ElementTree.fromstring(logic.report(measured(), ABOUT)["files"][name]).get("width"))
    assert max(map(len, said)) * 7.5 < width, "a line would be cut off"


def test_marks_lie_inside_of_the_plot():
    svg = ElementTree.fromstring(logic.report(measured(), ABOUT)["files"]["ttft.svg"])
    width, height = float(svg.get("width")), float(svg.get("height"))
    marks = [(float(mark.get("cx")), float(mark.get("cy"))) for mark in svg.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(marks) == 4 and all(0 < x < width and 0 < y < height for x, y in marks)
    # More streams stand further right, and what takes longer stands higher.
    assert marks[0][0] < marks[1][0] and marks[0][1] > marks[1][1]


@pytest.mark.parametrize("outcome", [lambda run: "not_run", lambda run: "failed" if run["workload"] == "long" else None])
def test_a_plot_without_figures_says_so(outcome):
    for text in (report := logic.report(measured(outcome=outcome), ABOUT))["files"].values():
        assert text
    assert "not measured" in texts(report["files"]["ttft.svg"])


def test_figures_of_the_rehearsal_engine_are_called_that_everywhere():
    report = logic.report(measured(engine="0.5.23+rehearsal"), ABOUT)
    assert report["record"]["rehearsal"] is True
    assert any("rehearsal engine" in line for line in report["table"])
    assert "rehearsal engine" in report["files"]["index.html"] and "rehearsal engine" in logic.markdown(report["record"], "x")
    for name in logic.PLOTS:
        assert any("REHEARSAL ENGINE" in text for text in texts(report["files"][name]))
    real = logic.report(measured(), ABOUT)
    assert not any("rehearsal engine" in text.lower() for text in [*real["files"].values(), *real["table"]])


def test_figures_of_a_busy_host_are_called_that():
    said = "The host was busy before the first run (load average 3.70 a core)"
    assert any(said in note for note in logic.notes(logic.report(dict(measured(), load=3.7), ABOUT)["record"]))
    assert not any("busy" in note for note in logic.notes(logic.report(measured(), ABOUT)["record"]))


def test_the_entry_of_the_record_links_its_files():
    text = logic.markdown(logic.report(measured(), ABOUT)["record"], "benchmarks/1f0c2ab94d37-pd")
    for name in ("index.html", "benchmark.json", *logic.PLOTS):
        assert "(benchmarks/1f0c2ab94d37-pd/%s)" % name in text
    rows = [line for line in text.splitlines() if line.startswith("| short") or line.startswith("| long")]
    assert len(rows) == 4 * 3 and all(line.count("|") == 9 for line in rows)


@pytest.mark.parametrize("top, marks", [(0, [0, 1]), (7, [0, 2, 4, 6, 8]), (1000, [0, 200, 400, 600, 800, 1000]), (0.09, [0, 0.02, 0.04, 0.06, 0.08, 0.1])])
def test_ticks_are_round_and_reach_the_top(top, marks):
    assert logic.ticks(top) == pytest.approx(marks)


@pytest.mark.parametrize("value, text", [
    (0, "0"), (4.6274, "4.63"), (98.926, "98.9"), (1226.4, "1226"), (0.01234, "0.0123"), (9.996, "10.0"), (123456, "123456")])
def test_numbers_have_three_digits_or_all_before_the_point(value, text):
    assert logic.number(value) == text


# ---- history


def found(*names):
    return [{"path": "/b/%s/benchmark.json" % name, "mtime": float(number)} for number, name in enumerate(names)]


@pytest.mark.parametrize("files, previous, keep, before, old", [
    pytest.param(found(), "", 3, "", [], id="first"),
    pytest.param(found("a-pd"), "", 3, "", [], id="own"),
    pytest.param(found("b-pd", "c-pd"), "b", 3, "/b/b-pd/benchmark.json", [], id="previous"),
    pytest.param(found("b-pd", "c-pd"), "z", 3, "/b/c-pd/benchmark.json", [], id="previous-not-measured"),
    pytest.param(found("b-single"), "b", 3, "", [], id="other-mode"),
    pytest.param(found("b-pd", "c-pd", "d-pd", "a-pd"), "b", 3, "/b/b-pd/benchmark.json", ["/b/c-pd"], id="prune"),
    pytest.param(found("b-pd", "c-pd", "d-single"), "b", 1, "/b/b-pd/benchmark.json", ["/b/c-pd", "/b/d-single"], id="keep-too-few"),
])
def test_the_release_before_is_compared_with_and_never_removed(files, previous, keep, before, old):
    assert logic.history(files, "a", previous, "pd", keep) == {"before": before, "old": old}
