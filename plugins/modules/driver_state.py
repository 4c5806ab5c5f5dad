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
  description: The driver now, and what the next boot would have. A value that could not be read is null.
  returned: always
  type: dict
  contains:
    loaded_version: {description: Version of the module that is loaded., type: str, sample: 580.95.05}
    loaded_flavour: {description: V(open) or V(proprietary)., type: str, sample: open}
    installed_version: {description: Version of the module on disk for the running kernel., type: str, sample: 580.95.05}
    installed_flavour: {description: V(open) or V(proprietary)., type: str, sample: open}
    installed_signer: {description: Who signed that module., type: str, sample: dsv4 module signing}
    kernel: {description: The running kernel., type: str, sample: 6.8.0-90-generic}
    modules: {description: "Loaded modules of the driver, and nouveau.", type: list, elements: str, sample: [nvidia, nvidia_uvm]}
    nouveau_loaded: {description: Whether nouveau is loaded., type: bool, sample: false}
    target_kernel: {description: Kernel that will boot., type: str, sample: 6.8.0-100-generic}
    target_kernel_reason: {description: Why that is not certain., type: str, sample: GRUB_DEFAULT is 2}
    target_version: {description: Version of the module for that kernel., type: str, sample: 580.126.09}
    target_flavour: {description: V(open) or V(proprietary)., type: str, sample: open}
    target_signer: {description: Who signed that module., type: str, sample: dsv4 module signing}
    kernels: {description: Kernels that can boot., type: list, elements: str, sample: [6.8.0-90-generic, 6.8.0-100-generic]}
    dkms:
      description: What DKMS says.
      type: list
      elements: dict
      contains:
        module: {description: Name of the module., type: str, sample: nvidia}
        version: {description: Version of the driver., type: str, sample: 580.126.09}
        kernel: {description: Kernel that it was built for., type: str, sample: 6.8.0-90-generic}
        arch: {description: Architecture., type: str, sample: x86_64}
        state: {description: "V(added), V(built) or V(installed).", type: str, sample: installed}
    dkms_reason: {description: Why DKMS could not be asked., type: str, sample: dkms is not installed}
    packages: {description: Versions of the installed packages of O(family)., type: dict, sample: {"nvidia-utils-580": "580.126.09-0ubuntu1"}}
    package_states:
      description: Their states, V(installed), V(unpacked), V(half_configured) and so on.
      type: dict
      sample: {"nvidia-utils-580": "installed"}
    held: {description: Packages of O(hold) that are held., type: list, elements: str, sample: [nvidia-utils-580]}
    not_held: {description: Packages of O(hold) that are not., type: list, elements: str, sample: []}
    secure_boot: {description: "V(on), V(off), V(unsupported) or V(unknown).", type: str, sample: "off"}
    key_enrolled: {description: Whether the firmware has O(mok_certificate)., type: bool, sample: true}
    cmdline: {description: The running command line., type: list, elements: str, sample: [quiet, iommu=pt]}
    cmdline_configured: {description: Arguments in GRUB's settings., type: list, elements: str, sample: [quiet, iommu=pt]}
    cmdline_grub: {description: Arguments in GRUB's menu., type: list, elements: str, sample: [quiet, iommu=pt]}
    iommu:
      description: The IOMMU.
      type: dict
      contains:
        running: {description: "As the kernel's groups show it, V(off), V(pt), V(translated) or V(unknown).", type: str, sample: pt}
        asked_running: {description: As the running command line asks., type: str, sample: pt}
        asked_configured: {description: As the next boot's command line asks., type: str, sample: pt}
    run_installer: {description: Whether the driver came by the vendor's C(.run) installer., type: bool, sample: false}
    active_units: {description: Units of O(units) that are active., type: list, elements: str, sample: [sglang-dsv4-decode]}
    boot_id: {description: Id of this boot., type: str, sample: 2b3a6e0c-0b6a-4d3c-9c51-3f2c0a6f6b1d}
    reboot_required: {description: Whether a reboot is due., type: bool, sample: true}
    reboot_reasons: {description: Why., type: list, elements: str, sample: ["module 580.126.09 is installed, 580.95.05 is loaded"]}
    findings:
      description: What is wrong.
      type: list
      elements: dict
      contains:
        id: {description: Name of the finding., type: str, sample: driver_not_held}
        severity: {description: "V(error), V(warning) or V(info).", type: str, sample: warning}
        what: {description: What is wrong., type: str, sample: "not held, an upgrade may move them: libnvidia-compute-580"}
        hint: {description: How to mend it., type: str, sample: hold them}
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
