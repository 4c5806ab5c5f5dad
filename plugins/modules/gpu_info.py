#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_info
short_description: Gather facts of the NVIDIA GPUs of a host
version_added: "0.1.0"
description:
  - Asks the driver's library (NVML, through nvidia-ml-py), else C(nvidia-smi), else the PCI bus, and says which of them answered.
  - Each value is known, or null with its reason in RV(gpus[].unknown). A GPU that answers badly keeps its row.
  - Compares the PCI bus, the driver and the plan, and names a missing GPU by its slot.
  - Never fails because of a driver that is missing, broken or does not answer; what is wrong is in RV(findings).
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  sources:
    description: Where to ask, in this order. The first that answers is taken.
    type: list
    elements: str
    choices: [nvml, nvidia-smi, lspci]
    default: [nvml, nvidia-smi, lspci]
  nvidia_smi:
    description: Name or path of nvidia-smi.
    type: str
    default: nvidia-smi
  p2p:
    description: Ask for the peer-to-peer status of each pair.
    type: bool
    default: true
  timeout:
    description: Seconds after which the driver's library is given up.
    type: float
    default: 30
  plan:
    description: What the inventory wants of the GPUs.
    type: dict
    default: {}
    suboptions:
      gpu_count:
        description: How many GPUs the host must have.
        type: int
      bus_ids:
        description: PCI addresses that must have a GPU.
        type: list
        elements: str
        default: []
      groups:
        description: GPU indexes by the name of the instance that uses them.
        type: dict
        default: {}
extends_documentation_fragment:
  - blackwell.dsv4.attributes
  - blackwell.dsv4.host.nvml
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
- name: Gather GPU facts
  blackwell.dsv4.gpu_info:
    nvml_path: /opt/dsv4/tools
    plan:
      gpu_count: 8
      groups:
        prefill: [0, 1, 2, 3]
        decode: [4, 5, 6, 7]
  register: __host_gpus

- name: Ask the PCI bus only
  blackwell.dsv4.gpu_info:
    sources: [lspci]
"""

RETURN = r"""
gpus:
  description: The GPUs in the order of RV(source).
  returned: always
  type: list
  elements: dict
  contains:
    index: {description: Number of the GPU in this order., type: int, sample: 0}
    uuid: {description: UUID., type: str, sample: GPU-00000000-0000-4000-8000-000000000000}
    bus_id: {description: PCI address with domain., type: str, sample: "0000:03:00.0"}
    slot: {description: Physical slot where the firmware names it., type: str, sample: "5"}
    name: {description: Product name., type: str, sample: NVIDIA RTX PRO 6000 Blackwell Server Edition}
    serial: {description: Serial number., type: str, sample: "1234567890"}
    compute_capability: {description: Compute capability., type: str, sample: "12.0"}
    memory_total_mib: {description: Memory in MiB., type: int, sample: 97887}
    memory_used_mib: {description: Memory in use in MiB., type: int, sample: 4}
    bar1_total_mib: {description: Size of BAR1 in MiB., type: int, sample: 131072}
    numa_node: {description: NUMA node; -1 where the firmware gives none., type: int, sample: 0}
    pcie_generation: {description: PCIe generation now (GPUs at rest go down)., type: int, sample: 5}
    pcie_generation_max: {description: PCIe generation at most., type: int, sample: 5}
    pcie_width: {description: PCIe lanes now., type: int, sample: 16}
    pcie_width_max: {description: PCIe lanes at most., type: int, sample: 16}
    ecc: {description: Whether ECC is on., type: bool, sample: true}
    mig: {description: Whether MIG is on., type: bool, sample: false}
    persistence: {description: Whether persistence mode is on., type: bool, sample: true}
    power_limit_w: {description: Power limit in watts., type: float, sample: 600.0}
    power_draw_w: {description: Power draw in watts., type: float, sample: 31.0}
    temperature_c: {description: Temperature in degrees Celsius., type: int, sample: 31}
    utilization_percent: {description: Utilization., type: int, sample: 0}
    processes: {description: "Compute processes with pid, name, used_mib, unit, parent and uid.", type: list, elements: dict, sample: []}
    usable: {description: Whether a plan can use this GPU., type: bool, sample: true}
    unusable_reason: {description: Why not., type: str, sample: GPU requires reset}
    wedged: {description: "Busy, drawing power and holding memory with no process on it.", type: bool, sample: false}
    unknown: {description: Reason of each value that is null., type: dict, sample: {"serial": "Not Supported"}}
source:
  description: Who answered (V(nvml), V(nvidia-smi), V(lspci)), or V(none).
  returned: always
  type: str
  sample: nvml
sources:
  description: Who was asked, with the reason of each that did not answer.
  returned: always
  type: list
  elements: dict
  sample: [{"source": "nvml", "ok": true, "reason": null}]
driver:
  description:
    - Module loaded and installed (version and flavour), library version, C(cuda_version) that the driver offers, and C(state), one of
      V(ok), V(not_installed), V(not_loaded), V(nouveau), V(reboot_required), V(wrong_flavour), V(adapter_init_failed), V(unknown),
      with C(reason) and C(hint).
  returned: always
  type: dict
  sample: {"state": "ok", "loaded_version": "580.95.05", "loaded_flavour": "open", "installed_version": "580.95.05", "cuda_version": "13.0"}
p2p:
  description: Peer-to-peer status by capability (C(read), C(write)), a matrix in the order of RV(gpus). Null when nobody could tell.
  returned: always
  type: dict
  sample: {"read": [["self", "ok"], ["ok", "self"]]}
pci:
  description: NVIDIA GPUs on the PCI bus, with the driver they are bound to, and the bridges above each.
  returned: always
  type: list
  elements: dict
  sample: [{"bus_id": "0000:03:00.0", "device_id": "10de:2bb5", "driver": "nvidia", "numa_node": 0}]
xids:
  description: Xids since this boot.
  returned: always
  type: list
  elements: dict
  sample: [{"bus_id": "0000:53:00.0", "xid": 79, "count": 1}]
counts:
  description: GPUs on the bus, in the driver, usable, and in the plan.
  returned: always
  type: dict
  sample: {"pci": 8, "driver": 8, "usable": 8, "plan": 8}
findings:
  description: What is wrong with the GPUs, each with C(id), C(severity), C(what) and C(hint).
  returned: always
  type: list
  elements: dict
  sample: []
unknown:
  description: What could not be read at all, with the reason.
  returned: always
  type: dict
  sample: {}
seconds:
  description: How long it took.
  returned: always
  type: float
  sample: 0.12
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import gpu_info
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import NVML, PROC, SYS, System


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sources": {
                "type": "list",
                "elements": "str",
                "choices": ["nvml", "nvidia-smi", "lspci"],
                "default": ["nvml", "nvidia-smi", "lspci"],
            },
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "p2p": {"type": "bool", "default": True},
            "timeout": {"type": "float", "default": 30},
            "plan": {
                "type": "dict",
                "default": {},
                "options": {
                    "gpu_count": {"type": "int"},
                    "bus_ids": {"type": "list", "elements": "str", "default": []},
                    "groups": {"type": "dict", "default": {}},
                },
            },
            **NVML,
            **PROC,
            **SYS,
        },
        supports_check_mode=True,
    )
    wanted = module.params
    nvml, reason = gpu_info.load_nvml(wanted["nvml_path"]) if "nvml" in wanted["sources"] else (None, None)
    facts = gpu_info.gather(
        System(wanted["proc_root"], wanted["sys_root"], timeout=wanted["timeout"]),
        nvml,
        wanted["sources"],
        wanted["nvidia_smi"],
        wanted["p2p"],
        wanted["plan"],
        wanted["timeout"],
        reason,
    )
    module.exit_json(changed=False, **facts)


if __name__ == "__main__":
    main()
