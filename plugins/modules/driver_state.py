#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: driver_state
short_description: Tell the state of the NVIDIA driver and whether a reboot is due
version_added: "0.1.0"
description:
  - Reads what of the driver is loaded, installed, built, pinned and configured, for the running kernel and for the one that will boot.
  - Decides from that state, never from what a run changed, whether the host has to reboot, and for which reasons.
  - Changes nothing and does not fail because something is missing.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  family:
    description: Patterns of the packages that carry the driver's version.
    type: list
    elements: str
    default: []
  hold:
    description: Patterns of the packages that must be held.
    type: list
    elements: str
    default: []
  cmdline:
    description: Arguments that the running kernel must have.
    type: list
    elements: str
    default: []
  cmdline_absent:
    description: Arguments that the running kernel must not have.
    type: list
    elements: str
    default: []
  mok_certificate:
    description: Certificate with which modules are signed under Secure Boot.
    type: str
    default: ""
  units:
    description: Units that use the GPUs.
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - blackwell.dsv4.attributes
  - blackwell.dsv4.host.boot
  - blackwell.dsv4.host.proc
  - blackwell.dsv4.host.sys
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
"""

EXAMPLES = r"""
- name: Is a reboot due?
  blackwell.dsv4.driver_state:
    family: ["nvidia-*-580", "nvidia-*-580-open", "libnvidia-*-580"]
    cmdline: [iommu=pt]
  register: __driver_state
"""

RETURN = r"""
state:
  description:
    - Module loaded (C(loaded_version), C(loaded_flavour)), installed for the running kernel (C(installed_version)) and for the target kernel
      (C(target_version), C(target_flavour)), C(kernel), C(target_kernel), C(kernels), C(dkms), C(packages) with C(package_states), C(held),
      C(not_held), C(secure_boot), C(key_enrolled), C(cmdline), C(cmdline_configured), C(cmdline_grub), C(iommu), C(run_installer),
      C(active_units), C(boot_id), C(reboot_required), C(reboot_reasons) and C(findings).
  returned: always
  type: dict
  sample: {"loaded_version": "580.95.05", "target_version": "580.126.09", "reboot_required": true}
gpus_on_bus:
  description: NVIDIA GPUs on the PCI bus.
  returned: always
  type: int
  sample: 8
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import driver, gpu_info
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import BOOT, PROC, SYS, System


def main() -> None:
    strings = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "family": strings,
            "hold": strings,
            "cmdline": strings,
            "cmdline_absent": strings,
            "mok_certificate": {"type": "str", "default": ""},
            "units": strings,
            **BOOT,
            **PROC,
            **SYS,
        },
        supports_check_mode=True,
    )
    given = module.params
    system = System(given["proc_root"], given["sys_root"])
    pci, _reason = gpu_info.pci_gpus(system)
    question = driver.Question(
        given["family"],
        given["hold"],
        given["boot"],
        given["cmdline"],
        given["cmdline_absent"],
        given["mok_certificate"],
        given["units"],
        bool(pci),
    )
    module.exit_json(changed=False, state=driver.state(system, question), gpus_on_bus=len(pci))


if __name__ == "__main__":
    main()
