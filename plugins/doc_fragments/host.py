# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the modules that read a host find what they read, and the plan that they hold its GPUs against.

The argument spec is in module_utils/host_system.py, that of the plan in module_utils/gpu_info.py.
"""

from __future__ import annotations


class ModuleDocFragment:
    """One option each: C(blackwell.dsv4.host.proc), C(blackwell.dsv4.host.sys), C(blackwell.dsv4.host.boot), C(blackwell.dsv4.host.nvml) and
    C(blackwell.dsv4.host.plan).
    """

    PROC = r"""
options:
  proc_root:
    description: Where the kernel's proc file system is read.
    type: path
    default: /proc
"""

    SYS = r"""
options:
  sys_root:
    description: Where the kernel's sys file system is read.
    type: path
    default: /sys
"""

    BOOT = r"""
options:
  boot:
    description: Folder of the kernel images.
    type: path
    default: /boot
"""

    NVML = r"""
options:
  nvml_path:
    description:
      - Virtual environment, or site-packages folder, that has nvidia-ml-py.
      - Without it, the interpreter's own packages are searched.
    type: path
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
