# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Repeats the look of the module serving_wait and shows on the controller how far the start is."""

from __future__ import annotations

import time

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

QUIET = 20
STOPPED_LOOKS = 4


class Waiting:
    """What was seen so far, and when to say something again."""

    def __init__(self, timeout, clock=time.monotonic):
        self.clock = clock
        self.start = clock()
        self.timeout = timeout
        self.said = {}
        self.stopped = {}

    def seconds(self):
        """Since the wait began."""
        return self.clock() - self.start

    def lines(self, states):
        """Progress lines that are worth printing now."""
        for name, state in sorted(states.items()):
            word = "%s: %s%s" % (name, state["verdict"], ", " + state["progress"] if state["progress"] else "")
            before, when = self.said.get(name, (None, 0.0))
            changed = word != before and (before is None or self.seconds() - when >= 2)
            if changed or self.seconds() - when >= QUIET:
                self.said[name] = (word, self.seconds())
                yield "%4d s  %s" % (self.seconds(), word)

    def outcome(self, answer):
        """ready, failed (with a sentence), or None to go on."""
        states = answer["states"]
        if answer.get("failure"):
            failure = answer["failure"]
            return "failed", "%s failed: %s (%s). %s" % (
                failure["unit"], failure["what"], failure["class"], failure["advice"])
        if all(state["verdict"] == "ready" for state in states.values()):
            return "ready", ""
        for name, state in states.items():
            self.stopped[name] = self.stopped.get(name, 0) + 1 if state["verdict"] == "stopped" else 0
            if self.stopped[name] >= STOPPED_LOOKS:
                return "failed", "%s is stopped (Result=%s) instead of starting" % (name, state["facts"]["result"])
        if self.seconds() > self.timeout:
            late = sorted(name for name, state in states.items() if state["verdict"] != "ready")
            return "failed", "not ready after %d s: %s; last: %s" % (
                self.timeout, ", ".join(late), "; ".join(states[name]["progress"] or "nothing logged" for name in late))
        return None, ""


class ActionModule(ActionBase):
    """Look until all units are ready or one can't be."""

    def run(self, tmp=None, task_vars=None):
        """See the module's documentation."""
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        if self._task.check_mode:
            return dict(result, changed=False, skipped=True, msg="nothing was started in check mode")
        waiting = Waiting(int(arguments.get("timeout", 1000)))
        while True:
            answer = self._execute_module(module_name="blackwell.dsv4.serving_wait", module_args=arguments,
                                          task_vars=task_vars)
            if answer.get("failed"):
                return answer
            for line in waiting.lines(answer["states"]):
                display.display("    %s" % line)
            outcome, sentence = waiting.outcome(answer)
            if outcome:
                answer["seconds"] = round(waiting.seconds(), 1)
                answer["changed"] = False
                if outcome == "failed":
                    answer["failed"] = True
                    answer["msg"] = sentence
                return answer
            time.sleep(int(arguments.get("interval", 2)))
