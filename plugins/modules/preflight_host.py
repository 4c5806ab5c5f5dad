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
  - Copies between the GPUs of an instance and compares the bytes, with a time limit, when nothing uses the GPUs. Where it cannot, a finding says so.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
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
        description: GPU indexes by instance.
        type: dict
        default: {}
      numa:
        description: NUMA node by instance; -1 binds nothing.
        type: dict
        default: {}
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
  p2p:
    description: Run the copy-and-compare test.
    type: bool
    default: true
  p2p_timeout:
    description: Seconds for that test.
    type: float
    default: 120
  ignore:
    description: Ids of findings that are known and accepted.
    type: list
    elements: str
    default: []
  nvml_path:
    description: Virtual environment that has nvidia-ml-py.
    type: path
  boot:
    description: Folder of the kernel images.
    type: path
    default: /boot
  proc_root:
    description: Where the kernel's proc file system is read.
    type: path
    default: /proc
  sys_root:
    description: Where the kernel's sys file system is read.
    type: path
    default: /sys
extends_documentation_fragment:
  - blackwell.dsv4.attributes
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
  sample: [{"id": "iommu_translated", "severity": "warning", "what": "the IOMMU translates the GPUs' DMA", "hint": "put iommu=pt on the kernel command line"}]
ignored:
  description: Findings that O(ignore) names.
  returned: always
  type: list
  elements: dict
  sample: []
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
  description: What was read, C(driver), C(driver_cuda), C(toolkit_cuda), C(iommu), C(acs), C(numa_nodes), C(headers), C(counts), C(p2p), C(cmdline_proposed).
  returned: always
  type: dict
  sample: {"driver_cuda": "13.0", "toolkit_cuda": "13.0"}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import gpu_info, p2p_probe, preflight
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import System


def test_peers(facts: dict, groups: dict, wanted: bool, limit: float) -> dict:
    """Run the copy-and-compare test where that is possible, and say why not where it is not."""
    gpus = {gpu["index"]: gpu for gpu in facts["gpus"]}
    pairs = [(a, b) for a, b in preflight.peer_pairs(groups) if a in gpus and b in gpus]
    if not wanted:
        return {"ran": False, "reason": "switched off", "pairs": []}
    if facts["driver"]["state"] != "ok" or facts["source"] == "lspci":
        return {"ran": False, "reason": f"the driver is not usable ({facts['driver']['state']})", "pairs": []}
    if not pairs:
        return {"ran": False, "reason": "no planned pair of GPUs is there", "pairs": []}
    busy = sorted(
        {
            index
            for pair in pairs
            for index in pair
            if gpus[index]["processes"] or "processes" in gpus[index]["unknown"] or (gpus[index]["utilization_percent"] or 0) > 5
        }
    )
    if busy:
        return {"ran": False, "reason": f"GPUs {busy} are in use", "pairs": []}
    return p2p_probe.probe([(gpus[a]["bus_id"], gpus[b]["bus_id"]) for a, b in pairs], limit)


def main() -> None:
    strings = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "plan": {
                "type": "dict",
                "default": {},
                "options": {
                    "gpu_count": {"type": "int"},
                    "bus_ids": strings,
                    "groups": {"type": "dict", "default": {}},
                    "numa": {"type": "dict", "default": {}},
                },
            },
            "listeners": {"type": "list", "elements": "dict", "default": []},
            "disk": {"type": "list", "elements": "dict", "default": []},
            "memory_gib": {"type": "float", "default": 0},
            "units": strings,
            "family": strings,
            "hold": strings,
            "driver_managed": {"type": "bool", "default": True},
            "driver_version": {"type": "str", "default": ""},
            "mok_certificate": {"type": "str", "default": ""},
            "toolkit_managed": {"type": "bool", "default": True},
            "cuda_home": {"type": "str", "default": "/usr/local/cuda"},
            "p2p": {"type": "bool", "default": True},
            "p2p_timeout": {"type": "float", "default": 120},
            "ignore": strings,
            "nvml_path": {"type": "path"},
            "boot": {"type": "path", "default": "/boot"},
            "proc_root": {"type": "path", "default": "/proc"},
            "sys_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    given = module.params
    system = System(given["proc_root"], given["sys_root"])
    nvml, reason = gpu_info.load_nvml(given["nvml_path"])
    plan = given["plan"]
    facts = gpu_info.gather(system, nvml, plan={key: plan.get(key) for key in ("gpu_count", "bus_ids", "groups")}, nvml_missing=reason)
    result = preflight.host(system, facts, given)
    peers = test_peers(facts, plan.get("groups") or {}, given["p2p"], given["p2p_timeout"])
    findings, ignored = preflight.sort_and_ignore(result["findings"] + preflight.p2p_findings(peers), given["ignore"])
    module.exit_json(
        changed=False,
        findings=findings,
        ignored=ignored,
        ok=not any(item["severity"] == "error" for item in findings),
        table=preflight.table(findings, ignored),
        facts={**result["facts"], "p2p": peers},
    )


if __name__ == "__main__":
    main()
