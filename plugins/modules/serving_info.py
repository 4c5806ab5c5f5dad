#!/usr/bin/python
# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_info
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
version_added: "0.1.0"
short_description: What the units and releases of the endpoint are now
description:
  - Reads systemd, the releases and their links, and who holds the ports of the plan. Changes nothing.
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
  root:
    description: Folder that holds C(releases), C(current) and C(previous).
    type: path
    default: /opt/dsv4
  active:
    description: Units that should run, without C(.service).
    type: list
    elements: str
    default: []
  inactive:
    description: Units that should not.
    type: list
    elements: str
    default: []
  release:
    description: The release that they should run from; empty when any will do.
    type: str
    default: ""
  verify:
    description: Releases whose files are compared with their manifest; V(current) and V(previous) name those that the links point to.
    type: list
    elements: str
    default: []
  unit_dir:
    description: Where systemd reads units.
    type: path
    default: /etc/systemd/system
  credentials:
    description: Files with keys; units that started before these were changed are stale.
    type: list
    elements: path
    default: []
  listeners:
    description: C(listeners) of the plan; ranges are not looked at.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Compare the host with the wanted mode
  blackwell.dsv4.serving_info:
    active: [sglang-dsv4-prefill, sglang-dsv4-decode, sglang-dsv4-router]
    inactive: [sglang-dsv4]
  register: now
"""

RETURN = r"""
units:
  description: Facts about each unit, by name.
  type: dict
  returned: always
  sample: {"sglang-dsv4-router": {"active_state": "active", "enabled": true, "release": "1f0c2ab94d37", "restarts": 0}}
differences:
  description: Why the host is not as wanted; empty when it is.
  type: list
  elements: str
  returned: always
  sample: ["sglang-dsv4-decode is inactive"]
stale:
  description: Active units that run, but not from the wanted release, unit file or key.
  type: list
  elements: str
  returned: always
  sample: [sglang-dsv4-decode]
missing:
  description: Those files of O(credentials) that are not there.
  type: list
  elements: str
  returned: always
  sample: []
baseline:
  description: Restarts counted so far, for units that may run on.
  type: dict
  returned: always
  sample: {"sglang-dsv4-decode": 0}
current:
  description: The release that C(current) points to.
  type: str
  returned: always
  sample: 1f0c2ab94d37
previous:
  description: The release that C(previous) points to.
  type: str
  returned: always
  sample: 77d0f3e8a1bc
releases:
  description: Releases of the host, newest last.
  type: list
  elements: str
  returned: always
  sample: [77d0f3e8a1bc, 1f0c2ab94d37]
problems:
  description: For each release of O(verify), what is missing or changed.
  type: dict
  returned: always
  sample: {"77d0f3e8a1bc": []}
manifests:
  description: For each release of O(verify), its manifest.
  type: dict
  returned: always
  sample: {}
ports:
  description: Who listens on the ports of O(listeners).
  type: list
  elements: dict
  returned: always
  sample: [{"port": 30001, "pid": 812, "unit": "nginx.service", "own": false}]
strangers:
  description: A sentence for each port that no unit of ours holds.
  type: list
  elements: str
  returned: always
  sample: ["port 30001 (http of router) is held on 0.0.0.0 by pid 812 (nginx, unit nginx.service)"]
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import release as releases
from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_state as logic


def main():
    """Argument spec, call, answer."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/dsv4"},
            "active": {"type": "list", "elements": "str", "default": []},
            "inactive": {"type": "list", "elements": "str", "default": []},
            "release": {"type": "str", "default": ""},
            "verify": {"type": "list", "elements": "str", "default": []},
            "unit_dir": {"type": "path", "default": "/etc/systemd/system"},
            "credentials": {"type": "list", "elements": "path", "default": []},
            "listeners": {"type": "list", "elements": "dict", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    root = given["root"]
    names = given["active"] + given["inactive"]
    links = {name: releases.linked(root, name) for name in ("current", "previous")}
    verify = [name for name in (links.get(name, name) for name in given["verify"]) if name]
    facts = logic.units(names)
    changed_files = {}
    problem = ""
    if given["release"]:
        try:
            changed_files = releases.unit_differences(
                releases.folder(root, given["release"]), given["unit_dir"], ["%s.service" % name for name in names])
        except releases.ReleaseError as error:
            problem = str(error)
    changed_at = max([os.stat(path).st_mtime for path in given["credentials"] if os.path.exists(path)] or [0])
    stale = logic.stale_units(facts, given["active"], given["release"], changed_files, changed_at)
    different = logic.differences(facts, given["active"], given["inactive"], stale)
    different += ["%s is not as in the release" % name for name in sorted(changed_files)]
    different += [problem] if problem else []
    if given["release"] and links["current"] != given["release"]:
        different.append("%s is not the current release" % given["release"])
    single = [entry for entry in given["listeners"] if entry.get("port") == entry.get("port_end", entry.get("port"))]
    ports = logic.port_holders(single, names) if single else []
    module.exit_json(
        changed=False,
        units=facts,
        differences=different,
        stale=sorted(stale),
        missing=[path for path in given["credentials"] if not os.path.exists(path)],
        baseline={name: 0 if name in stale or unit["active_state"] not in logic.RUNNING else unit["restarts"]
                  for name, unit in facts.items()},
        current=links["current"],
        previous=links["previous"],
        releases=releases.known(root),
        problems={name: releases.problems(releases.folder(root, name)) for name in verify},
        manifests={name: releases.read_manifest(releases.folder(root, name)) or {} for name in verify},
        ports=ports,
        strangers=[logic.stranger_sentence(holder) for holder in ports if not holder["own"]],
    )


if __name__ == "__main__":
    main()
