#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: preflight_inventory
short_description: Look for everything in an inventory that would go wrong later
version_added: "0.1.0"
description:
  - Judges values of the inventory only; nothing of a host is read. Meant to be delegated to the controller.
  - Returns all findings at once, those of the serving plan included. It never fails because of a finding.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  plan_findings:
    description: Findings of the filter P(blackwell.dsv4.serving_plan#filter).
    type: list
    elements: dict
    default: []
  groups:
    description: Hosts of C(dsv4), C(dsv4_prefill), C(dsv4_decode) and C(dsv4_router). Each host belongs into all of them.
    type: dict
    default: {}
  driver:
    description: What the inventory says of the driver, C(source), C(branch) and C(version).
    type: dict
    default: {}
  booleans:
    description: Values that must be booleans, by variable.
    type: dict
    default: {}
  variables:
    description: The variables of the roles. C(known) lists their names, C(given) those that have a value; C(choices) has the words that a variable
      accepts, C(chosen) its value, by variable.
    type: dict
    default: {}
  environments:
    description: Hand-written environments of units, by variable.
    type: dict
    default: {}
  allow_cuda_compat:
    description: Accept a cuda-compat folder in a library search path.
    type: bool
    default: false
  core_version:
    description: Version of ansible-core on the controller.
    type: str
    default: ""
extends_documentation_fragment:
  - blackwell.dsv4.attributes
  - blackwell.dsv4.preflight
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
  platform:
    support: full
    platforms: posix
"""

EXAMPLES = r"""
- name: Look the inventory over
  blackwell.dsv4.preflight_inventory:
    driver:
      source: cuda
      branch: 580
      version: 580.95.05
    environments:
      sglang_dsv4_environment:
        LD_LIBRARY_PATH: /usr/local/cuda/lib64
  delegate_to: localhost
"""

RETURN = r"""
findings:
  description: Findings that are not ignored, errors first.
  returned: always
  type: list
  elements: dict
  contains: &finding
    id: {description: Name of the finding., type: str, sample: driver_branch}
    severity: {description: "V(error), V(warning) or V(info).", type: str, sample: error}
    what: {description: What is wrong., type: str, sample: nvidia_driver_branch is 570}
    hint: {description: How to mend it., type: str, sample: Blackwell needs branch 580 or newer}
ignored:
  description: Findings that O(ignore) names.
  returned: always
  type: list
  elements: dict
  contains: *finding
ok:
  description: Is there no error among RV(findings)?
  returned: always
  type: bool
  sample: true
table:
  description: The findings as lines of text.
  returned: always
  type: list
  elements: str
  sample: ["no findings"]
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import preflight


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan_findings": {"type": "list", "elements": "dict", "default": []},
            "groups": {"type": "dict", "default": {}},
            "driver": {"type": "dict", "default": {}},
            "booleans": {"type": "dict", "default": {}},
            "variables": {"type": "dict", "default": {}},
            "environments": {"type": "dict", "default": {}},
            "allow_cuda_compat": {"type": "bool", "default": False},
            "core_version": {"type": "str", "default": ""},
            **preflight.IGNORE,
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **preflight.answer(preflight.inventory(module.params), module.params["ignore"]))


if __name__ == "__main__":
    main()
