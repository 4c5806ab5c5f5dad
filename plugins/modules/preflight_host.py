#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: preflight_host
short_description: Look for everything on a host that would go wrong later
version_added: "0.1.0"
description:
  - Reads operating system, kernel and headers, GPUs, driver, Secure Boot, IOMMU and ACS, BAR sizes, PCIe width, NUMA nodes, memory, disk, ports,
    the CUDA toolkit, shadowed libraries, the clock, and who else uses the GPUs.
  - Returns all findings at once, each with severity, what, and how to mend it. It changes nothing and never fails because of a finding.
  - Copies between GPUs are the business of M(blackwell.dsv4.preflight_gpus), which needs the driver.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  listeners:
    description: Ports that the deployment opens, each with C(port) and C(what).
    type: list
    elements: dict
    default: []
  disk:
    description: Space that is needed, each with C(path), C(need_gib), C(what), and C(unless), a path that means it is there already.
    type: list
    elements: dict
    default: []
  memory_gib:
    description: Main memory that is needed.
    type: float
    default: 0
  units:
    description: Our units; their ports and processes are no findings.
    type: list
    elements: str
    default: []
  family:
    description: Patterns of the packages that carry the driver's version; the vendor's when empty.
    type: list
    elements: str
    default: []
  hold:
    description: Patterns of the packages that must be held; those of the driver when empty.
    type: list
    elements: str
    default: []
  driver_managed:
    description: The role nvidia_driver runs afterwards, so what it mends is no error.
    type: bool
    default: true
  driver_version:
    description: Version of the driver that will be installed.
    type: str
    default: ""
  mok_certificate:
    description: Certificate with which modules are signed under Secure Boot.
    type: str
    default: ""
  toolkit_managed:
    description: The CUDA toolkit is installed afterwards.
    type: bool
    default: true
  cuda_home:
    description: Folder of the CUDA toolkit that is used.
    type: str
    default: /usr/local/cuda
extends_documentation_fragment:
  - blackwell.dsv4.attributes
  - blackwell.dsv4.host.boot
  - blackwell.dsv4.host.nvml
  - blackwell.dsv4.host.plan
  - blackwell.dsv4.host.proc
  - blackwell.dsv4.host.sys
  - blackwell.dsv4.preflight
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
- name: Look the host over
  blackwell.dsv4.preflight_host:
    plan:
      gpu_count: 8
      groups:
        prefill: [0, 1, 2, 3]
        decode: [4, 5, 6, 7]
      numa:
        prefill: 0
        decode: 1
    memory_gib: 256
    ignore: [time_not_synchronized]
  register: __preflight
"""

RETURN = r"""
findings:
  description: Findings that are not ignored, errors first.
  returned: always
  type: list
  elements: dict
  contains: &finding
    id: {description: Name of the finding., type: str, sample: iommu_translated}
    severity: {description: "V(error), V(warning) or V(info).", type: str, sample: warning}
    what: {description: What is wrong., type: str, sample: the IOMMU translates the GPUs' DMA}
    hint: {description: How to mend it., type: str, sample: put iommu=pt on the kernel command line}
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
facts:
  description: What was read.
  returned: always
  type: dict
  contains:
    driver:
      description: "As M(blackwell.dsv4.gpu_info) returns it, and what the next boot would have."
      type: dict
      contains:
        state: {description: State of the driver in a word., type: str, sample: ok}
        target_kernel: {description: Kernel that will boot., type: str, sample: 6.8.0-90-generic}
        target_version: {description: Version of the module for that kernel., type: str, sample: 580.95.05}
        secure_boot: {description: "V(on), V(off), V(unsupported) or V(unknown).", type: str, sample: "off"}
        reboot_required: {description: Whether a reboot is due., type: bool, sample: false}
        reboot_reasons: {description: Why., type: list, elements: str, sample: []}
    driver_cuda: {description: CUDA version that the driver offers., type: str, sample: "13.0"}
    toolkit_cuda: {description: Version of the CUDA toolkit., type: str, sample: "13.0"}
    toolkit:
      description: The CUDA toolkit.
      type: dict
      contains:
        home: {description: Folder that was looked at., type: str, sample: /usr/local/cuda}
        target: {description: Where that folder leads., type: str, sample: /usr/local/cuda-13.0}
        nvcc: {description: The compiler., type: str, sample: /usr/local/cuda/bin/nvcc}
        version: {description: Its version., type: str, sample: "13.0"}
    iommu:
      description: The IOMMU.
      type: dict
      contains:
        running: {description: "As the kernel's groups show it, V(off), V(pt), V(translated) or V(unknown).", type: str, sample: pt}
        asked_running: {description: As the running command line asks., type: str, sample: pt}
        asked_configured: {description: As the next boot's command line asks., type: str, sample: pt}
    acs: {description: "Whether ACS redirects, by bridge; null where it may not be read.", type: dict, sample: {"0000:00:03.1": false}}
    numa_nodes: {description: NUMA nodes of the host., type: list, elements: int, sample: [0, 1]}
    headers: {description: "Whether headers are there or offered, by kernel; null where nobody could tell.", type: dict, sample: {"6.8.0-90-generic": true}}
    counts: {description: "GPUs as in M(blackwell.dsv4.gpu_info).", type: dict, sample: {"pci": 8, "driver": 8, "usable": 8, "plan": 8}}
    cmdline_proposed: {description: Arguments that the kernel command line should get., type: list, elements: str, sample: [iommu=pt]}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import gpu_info, preflight
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import BOOT, NVML, PROC, SYS, System


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "listeners": {"type": "list", "elements": "dict", "default": []},
            "disk": {"type": "list", "elements": "dict", "default": []},
            "memory_gib": {"type": "float", "default": 0},
            "units": preflight.STRINGS,
            "family": preflight.STRINGS,
            "hold": preflight.STRINGS,
            "driver_managed": {"type": "bool", "default": True},
            "driver_version": {"type": "str", "default": ""},
            "mok_certificate": {"type": "str", "default": ""},
            "toolkit_managed": {"type": "bool", "default": True},
            "cuda_home": {"type": "str", "default": "/usr/local/cuda"},
            **BOOT,
            **NVML,
            **PROC,
            **SYS,
            **gpu_info.PLAN,
            **preflight.IGNORE,
        },
        supports_check_mode=True,
    )
    given = module.params
    system = System(given["proc_root"], given["sys_root"])
    facts = preflight.gather(system, given)
    result = preflight.host(system, facts, given)
    module.exit_json(changed=False, **preflight.answer(result["findings"], given["ignore"]), facts=result["facts"])


if __name__ == "__main__":
    main()
