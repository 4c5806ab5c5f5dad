# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the preflight modules have in common; the argument spec is in module_utils/preflight.py."""

from __future__ import annotations


class ModuleDocFragment:
    """C(blackwell.dsv4.preflight)."""

    DOCUMENTATION = r"""
options:
  ignore:
    description: Ids of findings that are known and accepted.
    type: list
    elements: str
    default: []
"""
