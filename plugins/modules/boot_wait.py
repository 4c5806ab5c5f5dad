#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: boot_wait
short_description: Wait until a host has really booted again
version_added: "0.1.0"
description:
  - Compares the boot id with the one from before, since a host that is going down still answers.
  - Then waits until systemd has started everything. A failed unit (V(degraded)) is accepted.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  old_boot_id:
    description: The boot id from before the reboot.
    type: str
    required: true
  timeout:
    description: Seconds to wait.
    type: int
    default: 300
extends_documentation_fragment:
  - blackwell.dsv4.attributes
  - blackwell.dsv4.host.proc
attributes:
  check_mode:
    support: full
    details: Does not wait in check mode.
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
"""

EXAMPLES = r"""
- name: Wait until it is another boot
  blackwell.dsv4.boot_wait:
    old_boot_id: "{{ __before.state.boot_id }}"
"""

RETURN = r"""
boot_id:
  description: The boot id now.
  returned: always
  type: str
  sample: 2b3a6e0c-0b6a-4d3c-9c51-3f2c0a6f6b1d
system:
  description: What systemd says of itself.
  returned: when not in check mode
  type: str
  sample: running
seconds:
  description: How long it took.
  returned: when not in check mode
  type: float
  sample: 3.2
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import boot_wait
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import PROC, System


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "old_boot_id": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 300},
            **PROC,
        },
        supports_check_mode=True,
    )
    system = System(module.params["proc_root"])
    if module.check_mode:
        module.exit_json(changed=False, boot_id=boot_wait.boot_id(system))
    try:
        result = boot_wait.wait(system, module.params["old_boot_id"], module.params["timeout"])
    except boot_wait.NotBooted as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
