#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: progress
short_description: Show the progress of a long task while it runs
version_added: "0.1.0"
description:
  - Waits for an asynchronous task and shows on the controller how far it is.
    On a terminal one line is updated. Elsewhere a line appears every few seconds, and only when it says something new.
  - Returns what the awaited task returned and fails when that failed.
  - Changes nothing itself.
options:
  job:
    description: The C(ansible_job_id) of an asynchronous task to wait for.
    type: str
    required: true
  status_path:
    description: File that the task rewrites with its progress, as M(blackwell.dsv4.model_fetch) does.
    type: path
  label:
    description: What the lines begin with.
    type: str
    default: progress
  interval:
    description: Seconds between two lines in a log.
    type: int
    default: 5
  timeout:
    description: Seconds after which the wait ends with an error.
    type: int
    default: 86400
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
    details:
      - Does not wait.
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
notes:
  - The module looks once, the action plugin of the same name calls it again and again.
"""

EXAMPLES = r"""
- name: Start the transfer
  blackwell.dsv4.model_fetch:
    dest: /opt/dsv4/models/deepseek-v4-flash@main
    status_path: /var/lib/dsv4/staging.json
  async: 86400
  poll: 0
  register: transfer

- name: Watch the transfer
  blackwell.dsv4.progress:
    job: "{{ transfer.ansible_job_id }}"
    status_path: /var/lib/dsv4/staging.json
    label: model
  register: staged
"""

RETURN = r"""
waited:
  description: Seconds that the wait took.
  returned: always
  type: float
  sample: 41.7
status:
  description: Last content of the status file.
  returned: when there is one
  type: dict
alive:
  description: Whether the process that wrote the status file still runs.
  returned: when the status file names it
  type: bool
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils.staging_manifest import load_json


def main():
    module = AnsibleModule(
        argument_spec={
            "job": {"type": "str", "required": True},
            "status_path": {"type": "path"},
            "label": {"type": "str", "default": "progress"},
            "interval": {"type": "int", "default": 5},
            "timeout": {"type": "int", "default": 86400},
        },
        supports_check_mode=True,
    )
    answer = {"changed": False, "waited": 0.0}
    if module.params["status_path"]:
        status = load_json(module.params["status_path"], 1 << 20)
        if isinstance(status, dict):
            answer["status"] = status
            if isinstance(status.get("pid"), int):
                answer["alive"] = os.path.exists("/proc/%d" % status["pid"])
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
