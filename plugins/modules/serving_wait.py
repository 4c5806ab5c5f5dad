#!/usr/bin/python
# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_wait
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
version_added: "0.1.0"
short_description: Wait until started units are ready, and fail at once when one can't be
description:
  - Polls the units and their health URLs, shows how far the start is, and returns when all are ready.
  - Fails as soon as a unit failed or was restarted, with the tail of its journal and the classified cause.
  - An action plugin of the same name repeats the look that this module takes.
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: N/A
  platform:
    support: full
    platforms: linux
options:
  units:
    description: What to wait for; each with C(unit) (a name without C(.service)) and C(health_url), as in a plan.
    type: list
    elements: dict
    required: true
  baseline:
    description: Restarts that were counted before the wait, by unit; see M(blackwell.dsv4.serving_info).
    type: dict
    default: {}
  timeout:
    description: Seconds until the wait itself gives up.
    type: int
    default: 1000
  interval:
    description: Seconds between two looks.
    type: int
    default: 2
  engine_version:
    description: Named in the classification of a failure.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Wait for both halves
  blackwell.dsv4.serving_wait:
    units:
      - unit: sglang-dsv4-prefill
        health_url: http://127.0.0.1:30000/health
      - unit: sglang-dsv4-decode
        health_url: http://127.0.0.1:30002/health
"""

RETURN = r"""
states:
  description: For each unit its verdict, facts, health status and newest progress line.
  type: dict
  returned: always
  sample: {"sglang-dsv4-router": {"verdict": "ready", "health": 200, "progress": ""}}
failure:
  description: For the unit that failed, the class, sentence, advice and evidence of the cause.
  type: dict
  returned: when a unit failed
  sample: {"unit": "sglang-dsv4-decode", "class": "port_in_use", "what": "port 30002 was taken"}
journal:
  description: The last lines of the failed unit's journal.
  type: list
  elements: str
  returned: when a unit failed
  sample: ["OSError: [Errno 98] Address already in use"]
seconds:
  description: How long the wait took.
  type: float
  returned: always
  sample: 12.5
"""

import concurrent.futures
import json
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import journal_classifier
from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_state as logic

# Written by the units themselves after each failed start.
FAILURES = "/run/dsv4/failures"


def cause(name, unit, engine_version, folder=FAILURES, recent=300):
    """Why a unit failed: what was written when its last start ended, or else its journal."""
    path = os.path.join(folder, "%s.json" % name)
    try:
        if time.time() - os.stat(path).st_mtime < recent:
            with open(path, encoding="utf-8") as stream:
                failure = json.load(stream)
            return failure, failure.pop("tail", [])
    except (OSError, ValueError):
        pass
    lines = logic.journal(name, 120, unit["invocation"]) or logic.journal(name, 120)
    return journal_classifier.classify(lines, engine_version=engine_version, result=unit["result"]), lines


def look(wanted, baseline, engine_version):
    """One look at all units."""
    facts = logic.units([entry["unit"] for entry in wanted])
    # Side by side: a worker generates a token for its answer.
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
        healths = list(pool.map(lambda entry: logic.http_status(entry["health_url"], 25)
                                if facts[entry["unit"]]["active_state"] == "active" else 0, wanted))
    answer = {"states": {}, "failure": None, "journal": []}
    for entry, health in zip(wanted, healths):
        name = entry["unit"]
        unit = facts[name]
        verdict = logic.verdict(unit, int(baseline.get(name, 0)), health)
        progress = ""
        if verdict != "ready":
            lines = logic.journal(name, 60, unit["invocation"])
            progress = logic.progress_line(lines)
            if verdict == "failed" and answer["failure"] is None:
                failure, lines = cause(name, unit, engine_version)
                answer["failure"] = dict(failure, unit=name)
                answer["journal"] = lines[-25:]
        answer["states"][name] = {"verdict": verdict, "health": health, "progress": progress, "facts": unit}
    return answer


def main():
    """Argument spec, call, answer."""
    module = AnsibleModule(
        argument_spec={
            "units": {"type": "list", "elements": "dict", "required": True},
            "baseline": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 1000},
            "interval": {"type": "int", "default": 2},
            "engine_version": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    if any(not entry.get("unit") or not entry.get("health_url") for entry in given["units"]):
        module.fail_json(msg="each of units needs unit and health_url")
    module.exit_json(changed=False, seconds=0.0, **look(given["units"], given["baseline"], given["engine_version"]))


if __name__ == "__main__":
    main()
