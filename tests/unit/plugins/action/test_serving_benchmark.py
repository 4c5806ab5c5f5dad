# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The loop over the runs, with scripted answers of the module and a clock that the runs turn."""

from __future__ import annotations

import types

import pytest

from ansible_collections.blackwell.dsv4.plugins.action import serving_benchmark

FIGURES = {"ttft_ms": 98.9, "itl_ms": 4.63, "output_tokens_per_s": 442.6}
WORKLOADS = [
    {"name": "short", "input_tokens": 64, "output_tokens": 16, "streams": [1, 4, 8], "rounds": 2},
    {"name": "long", "input_tokens": 4096, "output_tokens": 16, "streams": [1]},
]


@pytest.fixture
def bench(monkeypatch):
    """Run the plugin; ``answer(run)`` is (status, seconds that the run takes)."""

    def run(answer=lambda run: ("ok", 10.0), check_mode=False, **args):
        now, lines, calls = [0.0], [], []
        monkeypatch.setattr(serving_benchmark, "display", types.SimpleNamespace(display=lines.append))
        plugin = serving_benchmark.ActionModule.__new__(serving_benchmark.ActionModule)
        plugin._task = types.SimpleNamespace(args={"workloads": WORKLOADS, "repeats": 2, "api_key_file": "/k", **args}, check_mode=check_mode, async_val=0)
        plugin._clock = lambda: now[0]

        def execute(module_name, module_args, task_vars):
            assert module_name == "blackwell.dsv4.serving_benchmark"
            calls.append(module_args)
            status, seconds = answer(module_args["run"])
            now[0] += seconds
            if status == "module":
                return {"failed": True, "msg": "api_key_file cannot be read"}
            entry = dict(module_args["run"], status=status, reason="" if status == "ok" else "why", figures=FIGURES if status == "ok" else {})
            return {"changed": False, "runs": [entry], "client": "0.5.23" if status == "ok" else "", "engine_version": "0.5.23",
                    "load": float(len(calls)), "seconds": 0.0}

        plugin._execute_module = execute
        monkeypatch.setattr("ansible.plugins.action.ActionBase.run", lambda self, tmp=None, task_vars=None: {})
        return plugin.run(task_vars={}), lines, calls

    return run


def test_every_run_is_made_after_a_warm_up_and_shown(bench):
    result, lines, calls = bench(seed=5)
    assert [(call["run"]["workload"], call["run"]["repeat"]) for call in calls[:2]] == [("short", 0), ("long", 0)]
    assert len(result["runs"]) == 8 and all(run["status"] == "ok" and run["repeat"] in (1, 2) for run in result["runs"])
    assert (result["client"], result["engine_version"], result["seed"], result["seconds"], result["changed"]) == ("0.5.23", "0.5.23", 5, 100.0, False)
    assert result["load"] == 1.0, "the load before the first run, which later runs make themselves"
    assert "warm-up: short, 1 stream" in lines[0]
    assert lines[-1] == "    1 min 40 s, 8 of 8: long, 1 stream: TTFT 98.9 ms, ITL 4.63 ms, 443 tokens/s"


def test_two_measurements_send_different_prompts(bench):
    seeds = {bench()[0]["seed"] for dummy in range(3)}
    assert len(seeds) == 3


def test_the_warm_up_can_be_left_out(bench):
    assert [call["run"]["repeat"] for call in bench(warm_up="no")[2]] == [1] * 4 + [2] * 4


def test_the_time_limit_cuts_the_last_run_short_and_leaves_the_rest_out(bench):
    result, dummy, calls = bench(time_limit=45, run_timeout=30)
    assert [call["run_timeout"] for call in calls] == [30, 30, 25, 15, 5]
    assert [run["status"] for run in result["runs"]] == ["ok"] * 3 + ["not_run"] * 5
    assert result["runs"][-1]["reason"] == "the time limit of 45 s had passed"


def test_more_streams_than_took_too_long_are_not_tried_again(bench):
    result = bench(lambda run: ("timeout" if run["streams"] == 4 else "ok", 1.0))[0]
    assert [(run["streams"], run["status"]) for run in result["runs"] if run["workload"] == "short"] == [
        (1, "ok"), (4, "timeout"), (8, "not_run"), (1, "ok"), (4, "not_run"), (8, "not_run")]
    assert [run["status"] for run in result["runs"] if run["workload"] == "long"] == ["ok", "ok"]


def test_an_endpoint_that_fails_is_left_alone(bench):
    result, lines, calls = bench(lambda run: ("failed", 1.0))
    assert len(calls) == 1 and "short, 1 stream: failed: why" in lines[0]
    assert [run["status"] for run in result["runs"]] == ["failed"] + ["not_run"] * 8, "a warm-up that failed is told"


def test_a_fault_of_the_module_ends_it(bench):
    result = bench(lambda run: ("module", 0.0))[0]
    assert result["failed"] and result["msg"] == "api_key_file cannot be read"


def test_check_mode_sends_nothing(bench):
    result, lines, calls = bench(check_mode=True)
    assert calls == [] and len(lines) == 4 and {run["status"] for run in result["runs"]} == {"planned"}
    assert lines[0] == "    would send short, 1 stream: 2 requests of 64 tokens in and 16 out, 2 times"


@pytest.mark.parametrize("args", [{"repeats": "often"}, {"workloads": []}, {"workloads": [{"name": "short"}]}, {"seed": "x"}])
def test_arguments_without_sense_are_refused(bench, args):
    result, dummy, calls = bench(**args)
    assert result["failed"] and calls == []
