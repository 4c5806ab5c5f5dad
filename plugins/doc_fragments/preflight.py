# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the preflight modules have in common; the argument spec is in module_utils/preflight.py."""

from __future__ import annotations


class ModuleDocFragment:
    """C(blackwell.dsv4.preflight) for findings, C(blackwell.dsv4.preflight.plan) for the plan that a host is held against."""

    DOCUMENTATION = r"""
options:
  ignore:
    description: Ids of findings that are known and accepted.
    type: list
    elements: str
    default: []
"""

    PLAN = r"""
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
"""
