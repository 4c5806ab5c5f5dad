# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every flag and variable that the plan can render has its root cause and reason in the record's table."""

from __future__ import annotations

import itertools
import pathlib

import yaml

from ansible_collections.blackwell.dsv4.plugins.filter.argv_flags import argv_flags
from ansible_collections.blackwell.dsv4.plugins.module_utils.serving_plan import serving_plan

ROOT = pathlib.Path(__file__).resolve().parents[3]
REASONS = yaml.safe_load((ROOT / "roles/deployment_record/vars/main.yml").read_text(encoding="utf-8"))["__deployment_record_reasons"]
GPUS = [{"index": index, "uuid": f"GPU-00000000-0000-4000-8000-{index:012d}", "numa_node": index // 4} for index in range(8)]


def topology(**changes):
    text = (ROOT / "inventory/blackwell8/group_vars/all/topology.yml").read_text(encoding="utf-8")
    return {**yaml.safe_load(text)["dsv4_topology"], **changes}


def plans():
    """The plan under every switch that adds a flag or a variable."""
    switches = itertools.product(
        ("mooncake_tcp", "nixl"), ("none", "mtp", "dspark"), ("enabled", "disabled"), ("sglang-router", "smg"), (GPUS, [])
    )
    for backend, speculation, p2p, router, gpus in switches:
        yield serving_plan(
            topology(transfer_backend=backend, speculation=speculation),
            engine="/opt/e", router="/opt/r", model_path="/opt/m", gpus=gpus, p2p=p2p, router_kind=router,
            kernel_path="/opt/k", kernel_selection="/opt/s.json", api_key=True, site_path="/opt/s", chat_template="/opt/t.jinja", engine_version="0.5.20",
            cuda_home="/usr/local/cuda", pcie_ipc_allreduce=p2p == "enabled", direct_swa_kv=True, deepgemm_hc_prenorm=True,
            model_facts={"speculation": speculation},
        )  # fmt: skip


def test_every_flag_and_variable_has_a_reason():
    names = set()
    for plan in plans():
        for instance in plan["instances"].values():
            names |= {item["flag"] for item in argv_flags(instance["argv"])} | set(instance["environment"])
    assert names, "no plan was rendered"
    assert not names - set(REASONS)


def test_a_reason_is_a_sentence_for_each_column():
    for name, why in REASONS.items():
        assert set(why) == {"cause", "reason"}, name
        assert all(len(text) > 2 for text in why.values()), name
