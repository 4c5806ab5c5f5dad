# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that turn the topology of the inventory into what a host needs."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError

from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_plan as logic


def serving_plan(topology, engine="", router="", model_path="", **options):
    """See plugins/filter/serving_plan.yml."""
    try:
        plan = logic.serving_plan(topology, engine=engine, router=router, model_path=model_path, **options)
    except TypeError as error:
        raise AnsibleFilterError(str(error)) from error
    plan["findings"] = list(plan["findings"])
    return plan


class FilterModule:
    """The filters of this file."""

    def filters(self):
        """Name to function."""
        return {"serving_plan": serving_plan}
