# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the modules that read a host find what they read; the argument spec is in module_utils/host_system.py."""

from __future__ import annotations


class ModuleDocFragment:
    """One option each: C(blackwell.dsv4.host.proc), C(blackwell.dsv4.host.sys), C(blackwell.dsv4.host.boot), C(blackwell.dsv4.host.nvml)."""

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
