# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What units do now, judged from systemd's own words."""

from __future__ import annotations

import os
import threading

import pytest

from ansible_collections.blackwell.dsv4.plugins.action import serving_wait as action
from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_state as logic
from ansible_collections.blackwell.dsv4.plugins.modules import return_point, serving_units, serving_wait

SHOW = """Id=sglang-dsv4-decode.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
Result=success
NRestarts=2
MainPID=77
ExecMainStartTimestamp=@1700000000
InvocationID=0123456789abcdef0123456789abcdef
NeedDaemonReload=no

Id=sglang-dsv4.service
LoadState=loaded
ActiveState=inactive
SubState=dead
UnitFileState=disabled
Result=success
NRestarts=0
MainPID=0

Id=gone.service
LoadState=not-found
ActiveState=inactive
SubState=dead
"""


def facts(names=("sglang-dsv4-decode", "sglang-dsv4", "gone"), release="a" * 12):
    return logic.units(names, runner=lambda argv: (0, SHOW), of_pid=lambda pid: release)


def unit(**changes):
    return dict(facts()["sglang-dsv4-decode"], **changes)


def test_units_are_read():
    read = facts()
    decode = read["sglang-dsv4-decode"]
    assert (decode["present"], decode["enabled"], decode["restarts"], decode["main_pid"]) == (True, True, 2, 77)
    assert decode["started_at"] == 1700000000 and decode["release"] == "a" * 12
    assert not read["sglang-dsv4"]["enabled"] and read["sglang-dsv4"]["release"] is None
    assert not read["gone"]["present"]
    assert logic.units(["x"], runner=lambda argv: (1, ""))["x"]["present"] is False


@pytest.mark.parametrize("changes,arguments,why", [
    ({}, {}, None),
    ({"release": "b" * 12}, {}, "runs from release"),
    ({"release": None}, {}, "runs from release none"),
    ({"sub_state": "auto-restart"}, {}, "fails and restarts"),
    ({}, {"changed_files": ["u.service"]}, "another unit file"),
    ({}, {"changed_at": 1700000001}, "before its key was changed"),
    ({}, {"changed_at": 1699999999}, None),
    ({"active_state": "inactive", "release": None}, {}, None),
])
def test_stale_units(changes, arguments, why):
    found = logic.stale_units({"u": unit(**changes)}, ["u"], "a" * 12, **arguments)
    assert (why in found["u"]) if why else found == {}


@pytest.mark.parametrize("active,inactive,words", [
    ({}, {}, []),
    ({"active_state": "activating"}, {}, []),
    ({"active_state": "inactive"}, {}, ["a is inactive"]),
    ({"failed": True, "active_state": "failed", "result": "timeout"}, {}, ["a has failed (timeout)"]),
    ({"enabled": False}, {}, ["a is not enabled"]),
    ({"present": False}, {}, ["a is not installed"]),
    ({"need_reload": True}, {}, ["a was changed on disk"]),
    ({}, {"active_state": "failed"}, ["b is failed"]),
    ({}, {"enabled": True}, ["b is enabled"]),
])
def test_differences(active, inactive, words):
    calm = {"active_state": "inactive", "enabled": False, "failed": False}
    both = {"a": unit(**active), "b": unit(**dict(calm, **inactive))}
    assert logic.differences(both, ["a"], ["b"], {}) == words


@pytest.mark.parametrize("changes,baseline,health,verdict", [
    ({}, 2, 200, "ready"), ({}, 2, 503, "waiting"), ({}, 1, 200, "failed"), ({"failed": True}, 2, 0, "failed"),
    ({"active_state": "activating", "sub_state": "start-post"}, 2, 0, "waiting"),
    ({"active_state": "activating", "sub_state": "auto-restart"}, 2, 0, "failed"),
    ({"active_state": "inactive"}, 2, 0, "stopped"), ({"active_state": "deactivating"}, 2, 0, "waiting"),
])
def test_verdicts(changes, baseline, health, verdict):
    assert logic.verdict(unit(**changes), baseline, health) == verdict


def test_progress_is_the_newest_line_that_tells():
    lines = ["server_args={}", "Loading safetensors checkpoint shards:  62% Completed | 5/8", "GET /health 503"]
    assert logic.progress_line(lines).startswith("Loading safetensors")
    assert logic.progress_line(["nothing"]) == ""


def test_journal_of_one_start_only():
    asked = []
    logic.journal("u", 9, "0" * 32, runner=lambda argv: (asked.append(argv), (0, "a\n"))[1])
    logic.journal("u", 9, "not an id", runner=lambda argv: (asked.append(argv), (0, "a\n"))[1])
    assert "_SYSTEMD_INVOCATION_ID=" + "0" * 32 in asked[0] and "-u" not in asked[0]
    assert asked[1][-2:] == ["-u", "u.service"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def state(verdict, progress=""):
    return {"verdict": verdict, "progress": progress, "health": 0, "facts": {"result": "success"}}


def test_waiting_ends_in_time():
    clock = Clock()
    waiting = action.Waiting(100, clock)
    assert waiting.outcome({"states": {"a": state("ready")}, "failure": None}) == ("ready", "")
    assert waiting.outcome({"states": {"a": state("waiting")}, "failure": None}) == (None, "")
    failure = {"unit": "a", "what": "port 1 was taken", "class": "port_in_use", "advice": "Look."}
    outcome, sentence = waiting.outcome({"states": {"a": state("failed")}, "failure": failure})
    assert outcome == "failed" and "port 1 was taken" in sentence
    clock.now = 101.0
    outcome, sentence = waiting.outcome({"states": {"a": state("waiting", "Loading 5 %")}, "failure": None})
    assert outcome == "failed" and "Loading 5 %" in sentence


def test_a_queued_start_may_look_stopped_for_a_moment():
    waiting = action.Waiting(100, Clock())
    outcomes = [waiting.outcome({"states": {"a": state("stopped")}, "failure": None})[0] for unused in range(4)]
    assert outcomes == [None, None, None, "failed"]


def test_progress_is_calm():
    clock = Clock()
    waiting = action.Waiting(1000, clock)
    said = 0
    for second in range(100):
        clock.now = float(second)
        said += len(list(waiting.lines({"a": state("waiting", "same")})))
    assert 4 <= said <= 6
    assert list(waiting.lines({"a": state("ready")}))


def test_cause_of_a_failure_comes_from_the_unit_or_its_journal(tmp_path, monkeypatch):
    (tmp_path / "u.json").write_text('{"class": "memlock", "tail": ["x"]}')
    assert serving_wait.cause("u", unit(), "", str(tmp_path)) == ({"class": "memlock"}, ["x"])
    monkeypatch.setattr(serving_wait.logic, "journal", lambda *unused: ["no kernel image is available for execution on the device"])
    failure, lines = serving_wait.cause("other", unit(), "", str(tmp_path))
    assert failure["class"] == "no_kernel_image" and lines
    (tmp_path / "u.json").write_text("torn")
    assert serving_wait.cause("u", unit(), "", str(tmp_path))[0]["class"] == "no_kernel_image"


def test_units_that_are_as_wanted_are_left_alone():
    read = facts()
    given = {"stopped": ["sglang-dsv4", "gone"], "disabled": ["sglang-dsv4"], "enabled": ["sglang-dsv4-decode"],
             "started": ["sglang-dsv4-decode"], "reload": False}
    assert serving_units.steps_for(given, read) == []
    given = {"stopped": ["sglang-dsv4-decode"], "disabled": ["sglang-dsv4-decode"], "enabled": ["sglang-dsv4"],
             "started": [], "reload": True}
    assert [words for unused, words in serving_units.steps_for(given, read)] == [
        "disable sglang-dsv4-decode", "stop sglang-dsv4-decode", "daemon-reload", "enable sglang-dsv4"]


def test_the_return_point_keeps_the_first_state_and_restores_it(tmp_path, monkeypatch, umask_077):
    units, root = tmp_path / "system", tmp_path / "root"
    units.mkdir()
    (root / "releases" / ("a" * 12)).mkdir(parents=True)
    (root / "current").symlink_to("releases/" + "a" * 12)
    by_hand = b"# for J\xf6rg, in latin-1\n"
    (units / "old.service").write_bytes(by_hand)
    seen = {"old": unit(), "new": unit(active_state="inactive", enabled=False)}
    monkeypatch.setattr(return_point.serving_state, "units", lambda names: seen)
    given = {"units": ["old", "new"], "unit_dir": str(units), "root": str(root), "target": {"release": "b" * 12}}
    point = return_point.snapshot(given)
    assert point["open"] and point["current"] == "a" * 12 and point["previous"] is None
    assert point["units"]["new"]["file"] is None
    path = str(tmp_path / "state" / "return-point.json")
    return_point.write(path, point)
    assert return_point.read(path) == point and return_point.read(path + "x") == {}
    assert [os.stat(name).st_mode & 0o777 for name in (tmp_path / "state", path)] == [0o755, 0o644]
    (units / "old.service").write_text("ours\n")
    (units / "new.service").write_text("ours\n")
    return_point.releases.switch(str(root), "current", "b" * 12)
    return_point.releases.switch(str(root), "previous", "a" * 12)
    assert len(return_point.restore(given, point, True)) == 4
    assert (units / "new.service").exists()
    assert len(return_point.restore(given, point, False)) == 4
    assert (units / "old.service").read_bytes() == by_hand and not (units / "new.service").exists()
    assert return_point.releases.linked(str(root), "current") == "a" * 12
    assert not (root / "previous").is_symlink()
    assert return_point.restore(given, point, False) == []


def test_all_units_are_asked_at_the_same_time(monkeypatch):
    asked, active = threading.Barrier(2, timeout=5), unit(restarts=0)

    def status(url, unused):
        # Breaks when nobody else asks meanwhile.
        asked.wait()
        return 200 if url == "http://a" else 503

    monkeypatch.setattr(serving_wait.logic, "units", lambda names: {name: active for name in names})
    monkeypatch.setattr(serving_wait.logic, "http_status", status)
    monkeypatch.setattr(serving_wait.logic, "journal", lambda *unused: [])
    answer = serving_wait.look([{"unit": name, "health_url": "http://" + name} for name in "ab"], {}, "")
    assert {name: (state["verdict"], state["health"]) for name, state in answer["states"].items()} == {
        "a": ("ready", 200), "b": ("waiting", 503)}
