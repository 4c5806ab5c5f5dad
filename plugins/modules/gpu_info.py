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
extends_documentation_fragment:
  - blackwell.dsv4.attributes
  - blackwell.dsv4.host.nvml
  - blackwell.dsv4.host.plan
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
      numa:
        prefill: 0
        decode: 1
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
    processes:
      description: Compute processes.
      type: list
      elements: dict
      contains:
        pid: {description: Process id., type: int, sample: 4711}
        name: {description: Name of the process., type: str, sample: "sglang::scheduler_TP0"}
        used_mib: {description: Its memory on the GPU in MiB., type: int, sample: 78000}
        unit: {description: systemd unit that it belongs to., type: str, sample: sglang-dsv4-decode.service}
        parent: {description: Its parent's process id., type: int, sample: 4700}
        uid: {description: User that it runs as., type: int, sample: 990}
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
  description: Who was asked.
  returned: always
  type: list
  elements: dict
  contains:
    source: {description: "V(nvml), V(nvidia-smi) or V(lspci).", type: str, sample: nvml}
    ok: {description: Whether it answered., type: bool, sample: true}
    reason: {description: Why not., type: str, sample: "nvidia-ml-py cannot be loaded: No module named 'pynvml'"}
driver:
  description: The driver. A value that could not be read is null.
  returned: always
  type: dict
  contains:
    state:
      description: One of V(ok), V(not_installed), V(not_loaded), V(nouveau), V(reboot_required), V(wrong_flavour), V(adapter_init_failed), V(unknown).
      type: str
      sample: ok
    reason: {description: "Why, when it is not V(ok).", type: str, sample: "module 580.95.05 is loaded, 580.126.09 is installed"}
    hint: {description: What to do., type: str, sample: reboot the host}
    loaded_version: {description: Version of the module that is loaded., type: str, sample: 580.95.05}
    loaded_flavour: {description: V(open) or V(proprietary)., type: str, sample: open}
    installed_version: {description: Version of the module on disk for the running kernel., type: str, sample: 580.95.05}
    installed_flavour: {description: V(open) or V(proprietary)., type: str, sample: open}
    installed_signer: {description: Who signed that module., type: str, sample: dsv4 module signing}
    library_version: {description: Version of the driver's library., type: str, sample: 580.95.05}
    cuda_version: {description: CUDA version that the driver offers., type: str, sample: "13.0"}
    kernel: {description: The running kernel., type: str, sample: 6.8.0-90-generic}
    modules: {description: "Loaded modules of the driver, and nouveau.", type: list, elements: str, sample: [nvidia, nvidia_uvm]}
    nouveau_loaded: {description: Whether nouveau is loaded., type: bool, sample: false}
    unknown: {description: Reason of each value that nobody told., type: dict, sample: {}}
p2p:
  description: Peer-to-peer status of each pair, a matrix in the order of RV(gpus). Null when nobody could tell.
  returned: always
  type: dict
  contains:
    read: {description: For reading., type: list, elements: list, sample: [["self", "ok"], ["ok", "self"]]}
    write: {description: For writing., type: list, elements: list, sample: [["self", "ok"], ["ok", "self"]]}
pci:
  description: NVIDIA GPUs on the PCI bus.
  returned: always
  type: list
  elements: dict
  contains:
    bus_id: {description: PCI address with domain., type: str, sample: "0000:03:00.0"}
    device_id: {description: Vendor and device., type: str, sample: "10de:2bb5"}
    driver: {description: Kernel driver that has it., type: str, sample: nvidia}
    slot: {description: Physical slot where the firmware names it., type: str, sample: "5"}
    numa_node: {description: NUMA node., type: int, sample: 0}
    pcie_generation: {description: PCIe generation now., type: int, sample: 5}
    pcie_generation_max: {description: PCIe generation at most., type: int, sample: 5}
    pcie_width: {description: PCIe lanes now., type: int, sample: 16}
    pcie_width_max: {description: PCIe lanes at most., type: int, sample: 16}
    bar1_total_mib: {description: Its largest memory window in MiB., type: int, sample: 131072}
    iommu_group_type: {description: How the IOMMU treats it., type: str, sample: identity}
    bridges: {description: "Bridges above it, root port first.", type: list, elements: str, sample: ["0000:00:03.1"]}
xids:
  description: Errors that the driver reported since this boot.
  returned: always
  type: list
  elements: dict
  contains:
    bus_id: {description: PCI address of the GPU., type: str, sample: "0000:53:00.0"}
    xid: {description: Number., type: int, sample: 79}
    count: {description: How often., type: int, sample: 1}
    text: {description: The driver's words., type: str, sample: GPU has fallen off the bus.}
    remedy: {description: What to do; null where the program is at fault and not the GPU., type: str, sample: power-cycle the host}
counts:
  description: How many GPUs are where.
  returned: always
  type: dict
  contains:
    pci: {description: GPUs on the bus., type: int, sample: 8}
    driver: {description: GPUs that the driver shows., type: int, sample: 8}
    usable: {description: GPUs that a plan can use., type: int, sample: 8}
    plan: {description: "GPUs that O(plan.gpu_count) asks for; null when it does not.", type: int, sample: 8}
findings:
  description: What is wrong with the GPUs.
  returned: always
  type: list
  elements: dict
  contains:
    id: {description: Name of the finding., type: str, sample: gpu_missing_in_driver}
    severity: {description: "V(error), V(warning) or V(info).", type: str, sample: error}
    what: {description: What is wrong., type: str, sample: "the GPU at 0000:53:00.0 (slot 5) is on the PCI bus, but the driver does not show it"}
    hint: {description: How to mend it., type: str, sample: read the kernel log for that address}
unknown:
  description: What could not be read at all, with the reason.
  returned: always
  type: dict
  sample: {"xids": "neither dmesg nor journalctl answered"}
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
            **NVML,
            **PROC,
            **SYS,
            **gpu_info.PLAN,
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
