# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of the verification: prints the table and keeps the reports. Touches no target."""

from __future__ import annotations

import datetime
import os
import re
import shutil

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.blackwell.dsv4.plugins.plugin_utils import verification_report as report

_STAMP = re.compile(r"^\d{8}T\d{6}Z(?:-\d+)?$")


class ActionModule(ActionBase):
    """See the documentation of the module C(blackwell.dsv4.verification_report)."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        dummy, args = self.validate_argument_spec(
            argument_spec={
                "mode": {"type": "str", "required": True, "choices": ["pd", "single"]},
                "parts": {"type": "list", "elements": "dict", "required": True},
                "plan": {"type": "dict", "default": {}},
                "release": {"type": "str"},
                "strict": {"type": "bool", "default": False},
                "path": {"type": "str"},
                "keep": {"type": "int", "default": 20},
                "show": {"type": "bool", "default": True},
            },
        )
        host = task_vars.get("inventory_hostname", "host")
        now = datetime.datetime.now(datetime.timezone.utc)
        parts = [(str(part.get("name")), part.get("result")) for part in args["parts"]]
        checks = report.merge(parts)
        summaries = dict((name, (part or {}).get("summary")) for name, part in parts)
        outcome = report.verdict(checks, args["mode"], args["strict"], {
            "host": host, "time": now.strftime("%Y-%m-%d %H:%M:%S UTC"), "release": args["release"] or "", "report_dir": "", "parts": summaries,
        })
        if args["show"]:
            title = "Verification of %s, mode %s: %s" % (host, args["mode"], outcome["status"])
            self._display.display("\n" + report.table(checks, title) + "\n" + outcome["message"].split(". ")[0] + "\n")
        if args["path"] and not self._task.check_mode:
            folder = os.path.join(os.path.expanduser(args["path"]), re.sub(r"[^\w.-]", "_", host))
            try:
                outcome["report_dir"] = self._write(folder, now, checks, outcome, args["plan"])
                self._prune(folder, args["keep"])
            except OSError as exc:
                raise AnsibleActionFail("the report cannot be written: %s" % exc) from exc
        result.update(changed=False, verification=dict(outcome, checks=checks))
        return result

    @staticmethod
    def _write(folder, now, checks, outcome, plan):
        os.makedirs(folder, exist_ok=True)
        stamp = now.strftime("%Y%m%dT%H%M%SZ")
        name, number = stamp, 1
        while os.path.exists(os.path.join(folder, name)):
            number += 1
            name = "%s-%d" % (stamp, number)
        target = os.path.realpath(os.path.join(folder, name))
        # Written aside and renamed, so that nobody reads half a report.
        aside = target + ".part"
        os.makedirs(aside)
        outcome["report_dir"] = target
        for file_name, text in (
            ("junit.xml", report.junit(checks, outcome)),
            ("verification.json", report.as_json(checks, outcome)),
            ("index.html", report.page(checks, outcome, plan)),
        ):
            with open(os.path.join(aside, file_name), "w", encoding="utf-8") as handle:
                handle.write(text)
        os.rename(aside, target)
        return target

    @staticmethod
    def _prune(folder, keep):
        """The last ``keep`` reports stay. Only folders named as this plugin names them are touched."""
        def age(name):
            stamp, dummy, number = name.partition("-")
            return stamp, int(number or 1)

        stamps = sorted((name for name in os.listdir(folder) if _STAMP.match(name)), key=age)
        for name in stamps[:-keep] if keep > 0 else []:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
