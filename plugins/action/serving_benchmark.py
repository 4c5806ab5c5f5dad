# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of blackwell.dsv4.serving_benchmark: calls the module for one run after the other and shows each."""

from __future__ import annotations

import random
import time

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.blackwell.dsv4.plugins.module_utils.progress_view import duration
from ansible_collections.blackwell.dsv4.plugins.plugin_utils import benchmark_report as report

display = Display()


class ActionModule(ActionBase):
    """Runs a plan of measurements within a time limit."""

    _supports_check_mode = True
    _supports_async = False
    TRANSFERS_FILES = False

    # Replaced in tests.
    _clock = staticmethod(time.monotonic)

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = dict(self._task.args)
        try:
            repeats, run_timeout, time_limit = (int(args.get(name, default)) for name, default in (
                ("repeats", 3), ("run_timeout", 900), ("time_limit", 7200)))
            seed = int(args["seed"]) if args.get("seed") is not None else random.SystemRandom().randrange(1 << 30)
            plan = report.plan(args.get("workloads") or [], repeats, seed)
        except (TypeError, ValueError, KeyError) as error:
            return dict(result, failed=True, msg="serving_benchmark: %s" % error)
        answer = {"changed": False, "seed": seed, "client": "", "engine_version": "", "load": 0.0, "seconds": 0.0}
        if self._task.check_mode:
            for line in report.planned_lines(plan):
                display.display("    would send %s" % line)
            return dict(result, runs=[dict(run, status="planned", reason="", figures={}) for run in plan], **answer)
        warm_up = report.warm_up(plan) if boolean(args.get("warm_up", True)) else []
        start, runs, first = self._clock(), [], True
        for number, run in enumerate(warm_up + plan, 1 - len(warm_up)):
            left = time_limit - (self._clock() - start)
            reason = "the time limit of %s had passed" % duration(time_limit) if left <= 0 else report.hopeless(run, runs)
            if reason:
                runs.append(dict(run, status="not_run", reason=reason, figures={}))
                continue
            said = self._execute_module(
                module_name="blackwell.dsv4.serving_benchmark",
                module_args=dict(args, run=run, run_timeout=max(1, min(run_timeout, int(left)))),
                task_vars=task_vars,
            )
            if said.get("failed"):
                return dict(result, **said)
            if first:
                answer["load"], first = said["load"], False
            answer["client"] = said["client"] or answer["client"]
            answer["engine_version"] = said["engine_version"] or answer["engine_version"]
            runs.extend(said["runs"])
            place = "%d of %d" % (number, len(plan)) if number > 0 else "warm-up"
            display.display("    %s, %s: %s" % (duration(self._clock() - start), place, report.run_line(said["runs"][0])))
        answer["seconds"] = round(self._clock() - start, 1)
        return dict(result, runs=[run for run in runs if run["repeat"] > 0 or run["status"] == "failed"], **answer)
