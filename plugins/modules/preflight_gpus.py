#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: preflight_gpus
short_description: Look for what only a working driver can tell of the GPUs
version_added: "0.1.0"
description:
  - Holds the GPUs against the plan, their number, slots, NUMA nodes, peer access and memory windows.
  - Copies between the GPUs of an instance, both ways, and compares the bytes, with a time limit, when nothing uses the GPUs. Where it cannot, a
    finding says so.
  - It never fails because of a finding.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  p2p:
    description: Run the copy-and-compare test.
    type: bool
    default: true
  p2p_timeout:
    description: Seconds that one copy may take.
    type: float
    default: 120
  known:
    description: Findings that were shown before, as M(blackwell.dsv4.preflight_host) returns them; they are not repeated.
    type: list
    elements: dict
    default: []
extends_documentation_fragment:
  - blackwell.dsv4.attributes
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
- name: Hold the GPUs against the plan and copy between them
  blackwell.dsv4.preflight_gpus:
    nvml_path: /opt/dsv4/tools
    plan:
      gpu_count: 8
      groups:
        prefill: [0, 1, 2, 3]
        decode: [4, 5, 6, 7]
      numa:
        prefill: 0
        decode: 1
  register: __preflight_gpus
"""

RETURN = r"""
findings:
  description: Findings that are neither ignored nor known, errors first.
  returned: always
  type: list
  elements: dict
  contains: &finding
    id: {description: Name of the finding., type: str, sample: p2p_wrong_data}
    severity: {description: "V(error), V(warning) or V(info).", type: str, sample: error}
    what: {description: What is wrong., type: str, sample: "copies report success and the data is wrong: 0000:03:00.0 > 0000:04:00.0"}
    hint: {description: How to mend it., type: str, sample: "iommu=pt or off, ACS off"}
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
p2p:
  description: The copy-and-compare test.
  returned: always
  type: dict
  contains:
    ran: {description: Whether it ran., type: bool, sample: true}
    reason: {description: Why not., type: str, sample: "GPUs [0, 1] are in use by sglang-dsv4-prefill.service"}
    pairs:
      description: Each pair and direction.
      type: list
      elements: dict
      contains:
        from: {description: PCI address of the source., type: str, sample: "0000:03:00.0"}
        to: {description: PCI address of the target., type: str, sample: "0000:04:00.0"}
        status:
          description: One of V(ok), V(wrong_data), V(no_peer_access), V(timeout), V(error), V(not_tried).
          type: str
          sample: ok
        reason: {description: Why it is not V(ok)., type: str, sample: 4096 of 4096 bytes differ although the copy reported success}
        gib_per_s: {description: Speed of the largest copy., type: float, sample: 51.2}
counts:
  description: How many GPUs are where.
  returned: always
  type: dict
  contains:
    pci: {description: GPUs on the bus., type: int, sample: 8}
    driver: {description: GPUs that the driver shows., type: int, sample: 8}
    usable: {description: GPUs that a plan can use., type: int, sample: 8}
    plan: {description: "GPUs that O(plan.gpu_count) asks for; null when it does not.", type: int, sample: 8}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import gpu_info, preflight
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import NVML, PROC, SYS, System


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "p2p": {"type": "bool", "default": True},
            "p2p_timeout": {"type": "float", "default": 120},
            "known": {"type": "list", "elements": "dict", "default": []},
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
    peers = preflight.copy_between_peers(facts, given["plan"].get("groups") or {}, given["p2p"], given["p2p_timeout"])
    findings = preflight.gpu_findings(facts, given["plan"]) + preflight.p2p_findings(peers)
    module.exit_json(changed=False, **preflight.answer(findings, given["ignore"], given["known"]), p2p=peers, counts=facts["counts"])


if __name__ == "__main__":
    main()
