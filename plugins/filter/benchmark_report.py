# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters of the role benchmark and of the deployment's record."""

from __future__ import annotations

from ansible_collections.blackwell.dsv4.plugins.plugin_utils import benchmark_report as logic


class FilterModule:
    """What becomes of a measurement."""

    def filters(self):
        """Name to function."""
        return {"benchmark_history": logic.history, "benchmark_markdown": logic.markdown, "benchmark_report": logic.report}
