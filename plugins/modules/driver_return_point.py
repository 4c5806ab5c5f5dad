#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: driver_return_point
short_description: Save or read a return point of the NVIDIA driver
version_added: "0.1.0"
description:
  - Saves which packages of a set are installed and held, and the text of files, as a numbered JSON file, before they are changed.
  - A state that the newest return point already holds is not saved again.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  folder:
    description: Folder of the return points.
    type: path
    required: true
  state:
    description: V(saved) writes the present state, V(read) returns a saved one.
    type: str
    choices: [saved, read]
    default: saved
  number:
    description: Which return point to read; the newest when it is not given.
    type: int
  scope:
    description: Patterns of the packages to record.
    type: list
    elements: str
    default: []
  files:
    description: Files to record with their text.
    type: list
    elements: path
    default: []
  keep:
    description: How many return points stay.
    type: int
    default: 5
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
  platform:
    support: full
    platforms: debian
"""

EXAMPLES = r"""
- name: Save what is installed
  blackwell.dsv4.driver_return_point:
    folder: /var/lib/dsv4/driver
    scope: ["nvidia-*", "libnvidia-*"]
    files: [/etc/apt/preferences.d/dsv4-nvidia.pref]
"""

RETURN = r"""
point:
  description: The return point.
  returned: always
  type: dict
  contains:
    number: {description: Its number., type: int, sample: 2}
    packages: {description: Versions by package., type: dict, sample: {"nvidia-utils-580": "580.95.05-0ubuntu1"}}
    held: {description: Packages that were held., type: list, elements: str, sample: [nvidia-utils-580]}
    files: {description: "Contents by path; null for a file that was not there.", type: dict, sample: {"/etc/apt/preferences.d/dsv4-nvidia.pref": null}}
    kernel: {description: Kernel that was running., type: str, sample: 6.8.0-90-generic}
present:
  description: Packages of the scope that are installed now.
  returned: always
  type: dict
  sample: {"nvidia-utils-580": "580.126.09-0ubuntu1"}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import driver, driver_return_point
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import System


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["saved", "read"], "default": "saved"},
            "number": {"type": "int"},
            "scope": {"type": "list", "elements": "str", "default": []},
            "files": {"type": "list", "elements": "path", "default": []},
            "keep": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    given = module.params
    system = System()
    installed = driver.installed_packages(system)
    present = {entry["name"]: entry["version"] for entry in installed if driver.in_family(entry["name"], given["scope"])}
    try:
        if given["state"] == "read":
            module.exit_json(changed=False, point=driver_return_point.load(given["folder"], given["number"]), present=present)
        point = {
            "packages": present,
            "held": sorted(name for name in driver.held_packages(installed) if driver.in_family(name, given["scope"])),
            "files": driver_return_point.read_files(given["files"]),
            "kernel": driver.running_kernel(system),
        }
        number, new = driver_return_point.save(given["folder"], point, given["keep"], not module.check_mode)
    except (driver_return_point.ReturnPointError, OSError, UnicodeDecodeError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=new, point={**point, "number": number}, present=present)


if __name__ == "__main__":
    main()
