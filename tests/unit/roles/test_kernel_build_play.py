# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kernel_build played on this machine over an engine whose commands fail in each of their ways: the engine's own kernels serve, the record
says why, and no play fails."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
PLAYBOOK = pathlib.Path(sys.executable).with_name("ansible-playbook")
WANTED = ["indexer", "topk"]
BUILD = "fedcba9876543210"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PLAYBOOK.exists(), reason="ansible-playbook is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the role's files belong to root"),
]

# Stands in the place of the engine's Python: does what the case feeds it for `... -m dsv4_sm120.cli COMMAND`.
ENGINE = """#!%s
import json, pathlib, sys, time
feed = json.loads(pathlib.Path(sys.argv[0]).with_name("feed.json").read_text())
command = "look" if "--dry-run" in sys.argv else sys.argv[sys.argv.index("dsv4_sm120.cli") + 1]
told = feed.get(command, {})
with pathlib.Path(sys.argv[0]).with_name("calls").open("a") as stream:
    print(command, file=stream)
if "record" in told:
    key = sys.argv[sys.argv.index("--key") + 1]
    text = told["record"] if isinstance(told["record"], str) else json.dumps(told["record"] | {"key": key})
    pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text(text)
print(told.get("says", ""), file=sys.stderr)
time.sleep(told.get("sleeps", 0))
sys.exit(told.get("rc", 0))
""" % sys.executable


def record(**operations):
    entries = {name: {"choice": "stock", "selftest": "pass", "rows": {}, "reason": "slower"} for name in WANTED}
    entries.update(operations)
    return {"schema": 1, "state": "complete", "operations": entries, "details": {}}


OURS = {"choice": "ours", "selftest": "pass", "rows": {"all": [[1, 64]]}, "reason": "faster"}
MEASURED = {"select": {"record": record(topk=OURS)}}
ELSEWHERE = json.dumps(record(topk=OURS) | {"key": "0123456789abcdef-0123456789abcdef"})
UNMEASURED = "none of ours could be measured"

# name: (what the engine does, a record from before, variables, kernels that serve, words of topk's reason, words of the warning)
CASES = {
    "measured": (MEASURED, None, {}, ["topk"], None, ""),
    "no-gpu": ({"look": {"rc": 3, "says": "dsv4-sm120: no CUDA GPU: none"}}, None, {}, [], "no CUDA GPU: none", UNMEASURED),
    "broken-wheel": ({"look": {"rc": 1, "says": "Traceback\nImportError: no _dsv4_topk.so"}}, None, {}, [], "ImportError", UNMEASURED),
    "selftest-hangs": ({"selftest": {"sleeps": 60}}, None, {}, [], "the self-test gave no result: it did not end in time", UNMEASURED),
    "select-hangs": ({"select": {"record": record(topk=OURS), "sleeps": 60}}, None, {}, [], "the selection gave no result: it did not end in time", UNMEASURED),
    "out-of-time": ({"select": {"rc": 4, "record": record(topk=OURS) | {"state": "partial"}}}, None, {}, ["topk"], None, "ran out of time"),
    "busy-and-proved-elsewhere": (MEASURED, ELSEWHERE, {"busy": ["GPU 4"]}, [], "the GPUs were in use", UNMEASURED),
    "torn-record": (MEASURED, '{"schema": 1, "ope', {}, ["topk"], None, ""),
    "record-of-another-shape": ({"select": {"record": {"operations": {"topk": "ours"}}}}, None, {}, [], "the selection gave no result", UNMEASURED),
    "no-plan": (MEASURED, None, {"kernel_build_topology": {}}, [], "the measurement failed: Measure | ", UNMEASURED),
}  # fmt: skip


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "calls"}


@pytest.fixture(scope="module", name="stage")
def _stage(tmp_path_factory):
    """A folder for each case with a build and an engine, and the play over all of them: fn(*options) -> (output, {case: record})."""
    folder = tmp_path_factory.mktemp("kernel_build")
    topology = yaml.safe_load((ROOT / "inventory/blackwell8/group_vars/all/topology.yml").read_text(encoding="utf-8"))["dsv4_topology"]
    hosts = {}
    for name, (feed, before, variables, *dummy) in CASES.items():
        here = folder / name
        built, engine = here / "kernels" / BUILD, here / "engine/bin"
        (built / "site/dsv4_sm120/lib").mkdir(parents=True)
        (built / "site/dsv4_sm120/lib/build.json").write_text("{}", encoding="utf-8")
        (built / "dsv4_sm120.whl").touch()
        if before:
            (built / "selection.json").write_text(before, encoding="utf-8")
        engine.mkdir(parents=True)
        (engine / "python").write_text(ENGINE, encoding="utf-8")
        (engine / "python").chmod(0o755)
        (engine / "feed.json").write_text(json.dumps(feed), encoding="utf-8")
        hosts[name] = {"kernel_build_dir": str(here / "kernels"), "kernel_build_engine_path": str(here / "engine"), **variables}
    inventory = {"all": {"hosts": hosts, "vars": {
        "ansible_connection": "local", "ansible_python_interpreter": sys.executable, "dsv4_topology": topology, "kernel_build_kernels": WANTED,
        "kernel_build_nvml_path": str(folder / "none")}}}
    (folder / "inventory.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    (folder / "play.yml").write_text(yaml.safe_dump([{"name": "Play", "hosts": "all", "gather_facts": False, "tasks": [
        {"name": "Run the role", "ansible.builtin.import_role": {"name": "blackwell.dsv4.kernel_build"}},
        {"name": "Keep the outcome", "ansible.builtin.copy": {
            "content": "{{ kernel_build_record | to_json }}", "dest": str(folder) + "/{{ inventory_hostname }}.json", "mode": "0644"},
         "check_mode": False, "changed_when": False}]}]), encoding="utf-8")
    # The build is there whatever the sources are just now, the time limit is short, and a case says who uses the GPUs.
    given = {"__kernel_build_hash": BUILD, "__kernel_build_limit": ["timeout", "--kill-after=1", "3"], "__kernel_build_busy": "{{ busy | default([]) }}"}

    def play(*options, cases=tuple(CASES)):
        done = subprocess.run(
            [str(PLAYBOOK), "-i", str(folder / "inventory.yml"), "--forks", "8", "--limit", ",".join(cases), "-e", json.dumps(given), *options,
             str(folder / "play.yml")],
            env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
                 "ANSIBLE_NOCOLOR": "1"},
            cwd=folder, capture_output=True, text=True, timeout=400, check=False)
        print(done.stdout[-6000:], done.stderr[-2000:])
        assert done.returncode == 0
        return done.stdout, {name: json.loads((folder / (name + ".json")).read_text(encoding="utf-8")) for name in cases}

    play.folder = folder
    return play


@pytest.fixture(scope="module", name="foretold")
def _foretold(stage):
    """What --check --diff says of some cases, before anything was measured."""
    cases = ("measured", "no-gpu", "busy-and-proved-elsewhere", "torn-record")
    before = tree(stage.folder)
    said, found = stage("--check", "--diff", cases=cases)
    after = tree(stage.folder)
    assert {name for name in after if before.get(name) != after[name]} == {name + ".json" for name in cases}
    return said, found


@pytest.fixture(scope="module", name="played")
def _played(stage, foretold):
    return stage()[1]


def test_a_check_changes_nothing_and_promises_nothing(foretold):
    said, found = foretold
    assert all(record["applied"] == [] for record in found.values())
    changed = dict(re.findall(r"^([\w-]+) +: ok=\d+ +changed=(\d+)", said, re.MULTILINE))
    assert changed == {"measured": "1", "no-gpu": "0", "busy-and-proved-elsewhere": "0", "torn-record": "1"}


@pytest.mark.parametrize("name", CASES)
def test_what_serves(played, name):
    serving, reason, warning = CASES[name][3:]
    found = played[name]
    assert found["applied"] == serving
    assert reason is None or reason in found["stock"]["topk"]
    assert (warning in found["warning"]) if warning else found["warning"] == ""


# What did not come to an end is tried again.
AGAIN = {"measured": False, "torn-record": False, "out-of-time": True, "selftest-hangs": True}


def test_a_second_run_measures_only_what_did_not_come_to_an_end(played, stage):
    calls = {name: stage.folder / name / "engine/bin/calls" for name in AGAIN}
    before = {name: path.read_text(encoding="utf-8") for name, path in calls.items()}
    second = stage(cases=tuple(AGAIN))[1]
    assert second == {name: played[name] for name in AGAIN}
    assert {name: path.read_text(encoding="utf-8") != before[name] for name, path in calls.items()} == AGAIN
