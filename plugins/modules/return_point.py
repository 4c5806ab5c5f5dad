#!/usr/bin/python
# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: return_point
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
version_added: "0.1.0"
short_description: Remember what serves before it is changed
description:
  - Writes which units are active and enabled, their unit files, and which release serves, to one JSON file.
  - A point stays open until V(closed). While it is open O(state=saved) leaves it as it is, so a play that was killed
    half-way and run again still returns to the state before the first of them.
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  platform:
    support: full
    platforms: linux
options:
  path:
    description: The file.
    type: path
    default: /var/lib/dsv4/return-point.json
  state:
    description:
      - V(saved) writes the state of now unless a point is open.
      - V(closed) says that what was changed is accepted, or that the return has happened.
      - V(read) returns what is saved.
      - V(restored) puts unit files and links back; units are neither stopped nor started.
    type: str
    choices: [saved, closed, read, restored]
    required: true
  root:
    description: Folder that holds C(releases), C(current) and C(previous).
    type: path
    default: /opt/dsv4
  unit_dir:
    description: Where systemd reads units.
    type: path
    default: /etc/systemd/system
  units:
    description: Units to remember, without C(.service).
    type: list
    elements: str
    default: []
  target:
    description: Release and mode that the change leads to.
    type: dict
    default: {}
  outcome:
    description: Why the point is closed.
    type: str
    default: accepted
"""

EXAMPLES = r"""
- name: Remember what serves
  blackwell.dsv4.return_point:
    state: saved
    units: [sglang-dsv4-prefill, sglang-dsv4-decode, sglang-dsv4-router, sglang-dsv4]
"""

RETURN = r"""
open:
  description: Whether a change is under way that can be returned from.
  type: bool
  returned: always
  sample: true
point:
  description: What is saved.
  type: dict
  returned: always
  sample: {"current": "77d0f3e8a1bc", "units": {"sglang-dsv4": {"active": true, "enabled": true}}}
active:
  description: Units that were active.
  type: list
  elements: str
  returned: always
  sample: [sglang-dsv4]
enabled:
  description: Units that were enabled.
  type: list
  elements: str
  returned: always
  sample: [sglang-dsv4]
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import host_files, serving_state
from ansible_collections.blackwell.dsv4.plugins.module_utils import release as releases


def read(path):
    """The saved point, or an empty one."""
    try:
        with open(path, encoding="utf-8") as stream:
            point = json.load(stream)
    except (OSError, ValueError):
        return {}
    return point if isinstance(point, dict) else {}


def snapshot(given):
    """What serves now."""
    facts = serving_state.units(given["units"])
    units = {}
    for name, unit in facts.items():
        path = os.path.join(given["unit_dir"], "%s.service" % name)
        units[name] = {
            "active": unit["active_state"] in ("active", "activating", "reloading"),
            "enabled": unit["enabled"],
            "failed": unit["failed"],
            "release": unit["release"],
            "file": releases.read_text(path),
        }
    return {
        "format": 1, "open": True, "outcome": "", "target": given["target"], "units": units,
        "current": releases.linked(given["root"], "current"),
        "previous": releases.linked(given["root"], "previous"),
    }


def write(path, point):
    """The point, whole or not at all."""
    host_files.make_parents(path)
    host_files.write_atomic(path, json.dumps(point, indent=1, sort_keys=True) + "\n")


def restore(given, point, check_mode):
    """Unit files and links as they were; says what differed."""
    changed = []
    for name, unit in sorted(point.get("units", {}).items()):
        path = os.path.join(given["unit_dir"], "%s.service" % name)
        if releases.read_text(path) == unit["file"]:
            continue
        changed.append(path)
        if check_mode:
            continue
        if unit["file"] is None:
            os.unlink(path)
        else:
            host_files.write_atomic(path, unit["file"])
    for name in ("current", "previous"):
        now, before = releases.linked(given["root"], name), point.get(name)
        if now == before:
            continue
        changed.append(os.path.join(given["root"], name))
        if check_mode:
            continue
        releases.switch(given["root"], name, before)
    return changed


def main():
    """Argument spec, call, answer."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/var/lib/dsv4/return-point.json"},
            "state": {"type": "str", "choices": ["saved", "closed", "read", "restored"], "required": True},
            "root": {"type": "path", "default": "/opt/dsv4"},
            "unit_dir": {"type": "path", "default": "/etc/systemd/system"},
            "units": {"type": "list", "elements": "str", "default": []},
            "target": {"type": "dict", "default": {}},
            "outcome": {"type": "str", "default": "accepted"},
        },
        required_if=[("state", "saved", ("units",))],
        supports_check_mode=True,
    )
    given = module.params
    point = read(given["path"])
    changed = False
    diff = {}
    try:
        if given["state"] == "saved" and not point.get("open"):
            point, changed = snapshot(given), True
        elif given["state"] == "closed" and point.get("open"):
            point, changed = dict(point, open=False, outcome=given["outcome"]), True
        elif given["state"] == "restored":
            files = restore(given, point, module.check_mode)
            changed = bool(files)
            diff = {"before": "".join("%s\n" % name for name in files), "after": "as before\n" if files else ""}
        if changed and given["state"] in ("saved", "closed") and not module.check_mode:
            write(given["path"], point)
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.filename or given["path"], error.strerror))
    units = point.get("units", {})
    module.exit_json(
        changed=changed, diff=diff, point=point, open=bool(point.get("open")),
        active=sorted(name for name, unit in units.items() if unit["active"]),
        enabled=sorted(name for name, unit in units.items() if unit["enabled"]),
    )


if __name__ == "__main__":
    main()
