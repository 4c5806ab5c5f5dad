# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The drill names tasks and units that exist, and its table is of the faults that it has."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


def drill():
    specification = importlib.util.spec_from_file_location("drill", ROOT / "molecule/drill/drill.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def task_names():
    for path in (ROOT / "roles/sglang_dsv4/tasks").glob("*.yml"):
        for task in yaml.safe_load(path.read_text(encoding="utf-8")):
            yield task["name"]
            for inner in task.get("block", []):
                yield inner["name"]


def test_the_play_is_killed_at_tasks_that_exist():
    names = set(task_names())
    killed = drill().KILLED_AT
    assert len(killed) >= 10 and not [name for name in killed if name not in names]


def test_there_are_enough_faults_and_five_for_the_default_scenario():
    faults = list(drill().Drill(None).faults())
    assert len({name for name, *unused in faults}) == len(faults) >= 20
    assert sum(short for *unused, short in faults) == 5


def test_a_run_of_all_faults_keeps_no_row_of_another_run():
    module = drill()
    row = {"fault": "a | b", "probes": "arithmetic", "seconds": 3.2, "lost": "nothing", "note": ""}
    before = module.table(["a | b", "c"], [row, dict(row, fault="c")], "")
    assert "2 of 2 rows are green." in before
    mixed = module.table(["a | b", "c"], [dict(row, seconds=9.0)], before)
    assert "| a \\| b | arithmetic | 9 |" in mixed and "| c | arithmetic | 3 |" in mixed and "2 of 2" in mixed
    whole = module.table(["a | b", "c"], [dict(row, seconds=None, probes="")], "", "One run.")
    assert "| c |" not in whole and "0 of 2 rows are green. One run." in whole


def test_the_table_is_of_these_faults_and_green():
    results = ROOT / "molecule/drill/RESULTS.md"
    if not results.exists():
        pytest.skip("the drill has not been run yet")
    rows = re.findall(r"(?m)^\| (?!fault|---)(.*?) \|", results.read_text(encoding="utf-8"))
    assert [row.replace("\\|", "|") for row in rows] == [name for name, *unused in drill().Drill(None).faults()]
    assert "**" not in results.read_text(encoding="utf-8")
