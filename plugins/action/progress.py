# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Controller side of blackwell.dsv4.progress: look again and again, and say what is new."""

from __future__ import annotations

import sys
import time

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.blackwell.dsv4.plugins.module_utils import progress_view as view

display = Display()
# Seconds without the process and without a result, in which the wrapper may still write one.
GONE_AFTER = 15.0
# The class is loaded in the main process; the one that runs the task has no terminal of its own.
ON_TERMINAL = bool(getattr(sys.stdout, "isatty", lambda: False)())


class ActionModule(ActionBase):
    """Watches a job."""

    _supports_check_mode = True
    _supports_async = False
    TRANSFERS_FILES = False

    # Replaced in tests.
    _clock = staticmethod(time.monotonic)
    _sleep = staticmethod(time.sleep)

    def _say(self, pace, text):
        """Show a line: updated in place on a terminal, now and then in a log."""
        line = "%s [%s]: %s" % (self._label, self._host, text)
        if not pace.due(line):
            return
        if self._terminal:
            columns = max(20, getattr(display, "columns", 80) - 1)
            display.display("\r\x1b[K" + line[:columns], newline=False, screen_only=True)
            self._open_line = True
        else:
            display.display(line)

    def _job(self, job, task_vars):
        """Status of the asynchronous task, as ansible.builtin.async_status tells it."""
        folder = self.get_shell_option("async_dir", default="~/.ansible_async")
        return self._execute_module(
            module_name="ansible.legacy.async_status",
            module_args={"jid": job, "mode": "status", "_async_dir": folder},
            task_vars=task_vars,
        )

    def _forget_job(self, job, task_vars):
        """Remove the result file; it may hold more than one wants to keep."""
        folder = self.get_shell_option("async_dir", default="~/.ansible_async")
        self._execute_module(
            module_name="ansible.legacy.async_status",
            module_args={"jid": job, "mode": "cleanup", "_async_dir": folder},
            task_vars=task_vars,
        )

    def run(self, tmp=None, task_vars=None):
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        del tmp
        args = dict(self._task.args)
        job = args.get("job")
        self._label = str(args.get("label") or "progress")
        self._host = str(task_vars.get("inventory_hostname") or "")
        self._terminal = ON_TERMINAL
        self._open_line = False
        try:
            interval, timeout = int(args.get("interval") or 5), int(args.get("timeout") or 86400)
        except (TypeError, ValueError):
            return dict(result, failed=True, msg="interval and timeout are numbers of seconds")
        if self._task.check_mode:
            return dict(result, changed=False, waited=0.0, skipped=True)
        start = self._clock()
        self._gone_since = None
        pace = view.Pace(1.0 if self._terminal else max(1, interval), self._clock)
        pause, state = 0.3, {}
        try:
            while True:
                state = self._execute_module(module_name="blackwell.dsv4.progress", module_args=args, task_vars=task_vars)
                if state.get("failed"):
                    return dict(result, **state)
                elapsed = self._clock() - start
                if "status" in state:
                    self._say(pace, view.transfer_line(state["status"]))
                finished = self._finished(job, state, task_vars)
                if finished is not None:
                    outcome = dict(result, **finished)
                    outcome.setdefault("changed", False)
                    outcome["waited"] = round(self._clock() - start, 1)
                    if "status" in state:
                        outcome.setdefault("status", state["status"])
                    return outcome
                if elapsed > timeout:
                    return dict(
                        result,
                        failed=True,
                        waited=round(elapsed, 1),
                        msg="%s: not finished after %s" % (self._label, view.duration(elapsed)),
                        **({"status": state["status"]} if "status" in state else {})
                    )
                self._sleep(pause)
                pause = min(pause * 1.5, 1.0 if self._terminal else 2.0)
        finally:
            if self._open_line:
                display.display("", screen_only=True)

    def _gone(self, state):
        """A task that was killed together with its wrapper leaves no result, ever: notice that its process is gone."""
        if state.get("alive") is not False:
            self._gone_since = None
            return None
        now = self._clock()
        if self._gone_since is None:
            self._gone_since = now
        if now - self._gone_since < GONE_AFTER:
            return None
        return {"failed": True, "msg": "%s: the task's process is gone and left no result; run the play again to go on" % self._label}

    def _finished(self, job, state, task_vars):
        """The outcome when the wait is over, else None."""
        answer = self._job(job, task_vars)
        if not answer.get("finished"):
            if answer.get("failed"):
                return {"failed": True, "msg": answer.get("msg", "the status of the job cannot be read")}
            return self._gone(state)
        self._forget_job(job, task_vars)
        for key in ("ansible_job_id", "started", "finished", "results_file", "stdout", "stdout_lines", "stderr", "stderr_lines", "invocation"):
            answer.pop(key, None)
        return answer
