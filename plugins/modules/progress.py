#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: progress
short_description: Show the progress of a long task while it runs
version_added: "1.0.0"
description:
  - Waits for an asynchronous task, for units to start or for addresses to answer, and shows on the controller how far they are.
    On a terminal one line is updated. Elsewhere a line appears every few seconds, and only when it says something new.
  - With O(job) it returns what the awaited task returned and fails when that failed.
  - Changes nothing itself.
options:
  job:
    description: The C(ansible_job_id) of an asynchronous task to wait for.
    type: str
  status_path:
    description: File that the task rewrites with its progress, as M(blackwell.dsv4.model_fetch) does.
    type: path
  units:
    description: Units of systemd whose state and last line in the journal are shown. A unit that fails ends the wait.
    type: list
    elements: str
    default: []
  urls:
    description: Addresses that must all answer 200 before the wait ends.
    type: list
    elements: str
    default: []
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

- name: Watch both workers load the model
  blackwell.dsv4.progress:
    units: [sglang-dsv4-prefill, sglang-dsv4-decode]
    urls: ["http://127.0.0.1:30000/health", "http://127.0.0.1:30002/health"]
    timeout: 900
"""

RETURN = r"""
waited:
  description: Seconds that the wait took.
  returned: always
  type: float
  sample: 41.7
units:
  description: State of each unit at the end, with C(active), C(sub), C(result), C(restarts) and C(line), the last one in the journal.
  returned: when units are watched
  type: dict
urls:
  description: Last status of each address, 0 when it did not answer.
  returned: when addresses are watched
  type: dict
status:
  description: Last content of the status file.
  returned: when there is one
  type: dict
alive:
  description: Whether the process that wrote the status file still runs.
  returned: when the status file names it
  type: bool
"""

import http.client
import os
import urllib.parse

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils.staging_manifest import load_json


def look_at_unit(module, name):
    """State of a unit and its last journal line; never fails."""
    unit = {"active": "unknown", "sub": "", "result": "", "restarts": 0, "line": ""}
    code, out, dummy = module.run_command(
        ["systemctl", "show", "--property=ActiveState,SubState,Result,NRestarts", "--", name], environ_update={"LC_ALL": "C"}
    )
    if code == 0:
        values = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        unit.update(active=values.get("ActiveState", "unknown"), sub=values.get("SubState", ""), result=values.get("Result", ""))
        unit["restarts"] = int(values["NRestarts"]) if values.get("NRestarts", "").isdigit() else 0
    code, out, dummy = module.run_command(
        ["journalctl", "--quiet", "--no-pager", "--lines=1", "--output=cat", "--boot", "--unit=" + name], environ_update={"LC_ALL": "C"}
    )
    if code == 0 and out.strip():
        # A progress bar repaints its line; what it says now is behind the last carriage return.
        unit["line"] = out.strip("\n").split("\n")[-1].split("\r")[-1][:400]
    return unit


def look_at_url(url, timeout=3):
    """HTTP status of an address, 0 when it does not answer."""
    try:
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=timeout)
        try:
            connection.request("GET", (parts.path or "/") + ("?" + parts.query if parts.query else ""))
            return connection.getresponse().status
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return 0


def main():
    module = AnsibleModule(
        argument_spec={
            "job": {"type": "str"},
            "status_path": {"type": "path"},
            "units": {"type": "list", "elements": "str", "default": []},
            "urls": {"type": "list", "elements": "str", "default": []},
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
    if module.params["units"]:
        answer["units"] = {name: look_at_unit(module, name) for name in module.params["units"]}
    if module.params["urls"]:
        answer["urls"] = {url: look_at_url(url) for url in module.params["urls"]}
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
