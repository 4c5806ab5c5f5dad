#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: verification_report
short_description: Print verification checks as a table and keep them as JUnit XML, JSON and HTML
version_added: "0.1.0"
description:
  - Takes results of M(blackwell.dsv4.chat_probe) and M(blackwell.dsv4.topology_check), prints one readable table and writes a report folder on
    the controller.
  - Runs on the controller only and never touches the target. Reports are no state of the target, so it is never C(changed).
options:
  mode:
    description: Mode in which the host was verified.
    type: str
    required: true
    choices: [pd, single]
  parts:
    description: Results to report, in this order, each a dictionary with C(name) and C(result).
    type: list
    elements: dict
    required: true
  plan:
    description: The plan of the filter P(blackwell.dsv4.serving_plan#filter), for the drawing of the topology.
    type: dict
    default: {}
  release:
    description: Id of the release that serves.
    type: str
  strict:
    description: Whether a flaky check makes the outcome not ok.
    type: bool
    default: false
  path:
    description: Folder on the controller below which C(<host>/<time>/) is made. Without it no file is written.
    type: str
  keep:
    description: Number of reports to keep for the host; V(0) keeps all.
    type: int
    default: 20
  show:
    description: Print the table.
    type: bool
    default: true
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
    details: The table is printed and no file is written.
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
seealso:
  - module: blackwell.dsv4.chat_probe
  - module: blackwell.dsv4.topology_check
author:
  - blackwell.dsv4 maintainers (@blackwell-dsv4)
"""

EXAMPLES = r"""
- name: Show and keep what was found
  blackwell.dsv4.verification_report:
    mode: pd
    parts:
      - name: probes
        result: "{{ probes }}"
    path: "{{ playbook_dir }}/reports"
  register: report
"""

RETURN = r"""
verification:
  description: The checks of all parts with the overall outcome.
  returned: always
  type: dict
  contains:
    mode:
      description: Mode in which the host was verified.
      type: str
      sample: pd
    status:
      description: The gravest status, in the order V(skipped), V(pass), V(flaky), V(inconclusive), V(fail).
      type: str
      sample: pass
    ok:
      description: Whether the status is good enough.
      type: bool
      sample: true
    counts:
      description: Number of checks by status.
      type: dict
      sample: {"pass": 54, "fail": 0, "flaky": 0, "inconclusive": 0, "skipped": 2}
    reasons:
      description: Reason codes of failed checks.
      type: list
      elements: str
      sample: []
    message:
      description: One sentence with the outcome, the worst checks and where to look.
      type: str
      sample: "pass in mode pd: 54 pass, 2 skipped"
    checks:
      description: All checks, each with the C(group) it belongs to.
      type: list
      elements: dict
      sample: [{"id": "arithmetic.whole", "status": "pass", "reason": "ok", "group": "probes"}]
    report_dir:
      description: Folder of the report on the controller, empty when none was written.
      type: str
      sample: /srv/ops/reports/gpu01/20260101T120000Z
"""
