# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The loop on the controller, with scripted looks at the target and a clock that does not wait."""

from __future__ import annotations

import types

import pytest

from ansible_collections.blackwell.dsv4.plugins.action import progress


class Screen:
    columns = 100

    def __init__(self):
        self.lines = []

    def display(self, text, newline=True, screen_only=False):
        self.lines.append((text, newline))


@pytest.fixture
def watch(monkeypatch):
    """Run the plugin over a list of looks; each job answer belongs to a look."""

    def run(args, looks, jobs=(), terminal=False, check_mode=False):
        now = [0.0]
        screen = Screen()
        monkeypatch.setattr(progress, "display", screen)
        monkeypatch.setattr(progress, "ON_TERMINAL", terminal)
        plugin = progress.ActionModule.__new__(progress.ActionModule)
        plugin._task = types.SimpleNamespace(args=args, check_mode=check_mode, async_val=0)
        plugin._clock = lambda: now[0]
        plugin._sleep = lambda seconds: now.__setitem__(0, now[0] + max(seconds, 0.5))
        plugin.get_shell_option = lambda name, default=None: "~/.ansible_async"
        looks, jobs, calls = list(looks), list(jobs), []

        def execute(module_name, module_args, task_vars):
            calls.append((module_name, module_args))
            if module_name == "ansible.legacy.async_status":
                if module_args["mode"] == "cleanup":
                    return {"erased": module_args["jid"]}
                return dict(jobs.pop(0) if len(jobs) > 1 else jobs[0])
            return dict(looks.pop(0) if len(looks) > 1 else looks[0])

        plugin._execute_module = execute
        monkeypatch.setattr("ansible.plugins.action.ActionBase.run", lambda self, tmp=None, task_vars=None: {})
        result = plugin.run(task_vars={"inventory_hostname": "host1"})
        return result, screen.lines, calls

    return run


def fetch(percent):
    return {"changed": False, "status": {"phase": "fetch", "percent": percent, "total_bytes": 10**9, "rate": 10**6, "seconds_left": 5, "current": ["x"]}}


def test_a_job_is_followed_to_its_end_and_its_result_handed_on(watch):
    jobs = [{"finished": 0, "ansible_job_id": "j1"}] * 5 + [{"finished": 1, "changed": True, "facts": {"a": 1}, "ansible_job_id": "j1", "results_file": "/x"}]
    result, lines, calls = watch({"job": "j1", "label": "model", "interval": 1}, [fetch(p) for p in (0, 10, 20, 30, 40, 50)], jobs)
    assert result["changed"] is True and result["facts"] == {"a": 1} and "failed" not in result and "results_file" not in result
    assert [line for line, newline in lines][0].startswith("model [host1]: fetched 0.0 % of 1.0 GB")
    assert len(lines) >= 3 and all(newline for dummy, newline in lines)
    assert calls[-1][1] == {"jid": "j1", "mode": "cleanup", "_async_dir": "~/.ansible_async"}


def test_a_failed_job_fails_the_task_with_its_words(watch):
    result = watch({"job": "j1"}, [fetch(1)], [{"finished": 1, "failed": True, "msg": "no_space: too small", "id": "no_space"}])[0]
    assert result["failed"] and result["msg"] == "no_space: too small" and result["id"] == "no_space"


def test_a_job_that_is_lost_fails(watch):
    result = watch({"job": "j1"}, [fetch(1)], [{"failed": True, "msg": "could not find job", "finished": 0}])[0]
    assert result["failed"] and result["msg"] == "could not find job"


def test_a_job_whose_process_is_gone_is_not_waited_for(watch):
    dead = dict(fetch(30), alive=False)
    result = watch({"job": "j1"}, [dict(fetch(10), alive=True), dead], [{"finished": 0}])[0]
    assert result["failed"] and "left no result" in result["msg"] and 15 <= result["waited"] < 30
    # A result that the wrapper writes a moment later still counts.
    jobs = [{"finished": 0}] * 4 + [{"finished": 1, "failed": True, "msg": "killed"}]
    assert watch({"job": "j1"}, [dead], jobs)[0]["msg"] == "killed"


def test_a_terminal_gets_one_line_that_changes(watch):
    jobs = [{"finished": 0}] * 6 + [{"finished": 1, "changed": True}]
    lines = watch({"job": "j1"}, [fetch(p) for p in range(7)], jobs, terminal=True)[1]
    assert all(line.startswith("\r\x1b[K") and not newline for line, newline in lines[:-1]) and lines[-1] == ("", True)


def test_the_wait_has_an_end(watch):
    result = watch({"job": "j1", "timeout": 10}, [fetch(7)], [{"finished": 0}])[0]
    assert result["failed"] and "not finished after 1" in result["msg"] and result["status"]["percent"] == 7


def test_check_mode_does_not_wait(watch):
    result, lines, calls = watch({"job": "j1"}, [fetch(1)], [{"finished": 0}], check_mode=True)
    assert result["skipped"] and calls == [] and lines == []


@pytest.mark.parametrize("args", [{"interval": "often"}, {"timeout": "soon"}])
def test_words_in_place_of_numbers_are_refused(watch, args):
    assert watch({"job": "j1", **args}, [{}])[0]["failed"]
