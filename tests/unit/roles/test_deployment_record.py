# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every flag and variable that the plan can render has its root cause and reason in the record's table; what an entry says first."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
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


def check(name, status, reason="ok", evidence="seen", hint=""):
    return {"id": name, "status": status, "reason": reason, "evidence": evidence, "hint": hint}


def record(folder, results):
    """FINDINGS.md after the role ran once for each of ``results`` (checks, status, further variables)."""
    tasks = []
    for checks, status, more in results:
        counts = {word: sum(one["status"] == word for one in checks) for word in ("pass", "skipped", "fail")}
        given = {
            "deployment_record_path": str(folder / "FINDINGS.md"), "deployment_record_copy": "", "sglang_dsv4_release": {"id": "0a1b2c3d4e5f"},
            "sglang_dsv4_plan": serving_plan(topology(), engine="/opt/e", router="/opt/r", model_path="/opt/m", gpus=GPUS),
            "verification_result": {"mode": "pd", "status": status, "counts": counts, "checks": checks}, **more,
        }  # fmt: skip
        tasks.append({"import_role": {"name": "blackwell.dsv4.deployment_record"}, "vars": given})
    play = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": {"ansible_python_interpreter": sys.executable}, "tasks": tasks}]
    (folder / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    done = subprocess.run(
        [str(pathlib.Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", str(folder / "play.yml")],
        env=dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"), ANSIBLE_NOCOLOR="1"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    path = folder / "FINDINGS.md"
    return path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []


@pytest.mark.slow
def test_an_entry_says_first_what_failed_and_what_serves_now(tmp_path):
    checks = [
        check("mode", "pass"),
        check("thinking.whole", "fail", "no_reasoning", "content is \"a | b\nc\"", "the parser on decode"),
        check("auth", "skipped", "no_key", "the endpoint is open"),
    ]
    (entry,) = record(tmp_path, [(checks, "fail", {"sglang_dsv4_return_outcome": "release f00 again"})])
    head, rest = entry.split("### Topology")
    assert "**fail** (1 pass, 1 skipped, 1 fail)" in head and "release f00 again" in head
    assert '- `thinking.whole` fail, no_reasoning: content is "a \\| b c" -> the parser on decode' in head
    assert rest.count("| was tried |") == 3 and "| serves |" not in rest
    assert "- Skipped: auth: the endpoint is open" in head
    assert '| thinking.whole | fail, no_reasoning | content is "a \\| b c" |' in rest and "| mode | pass | seen |" in rest


@pytest.mark.slow
def test_why_speculation_is_off_is_said_as_far_as_it_is_known(tmp_path):
    known = serving_plan(topology(), engine="/opt/e", router="/opt/r", model_path="/opt/m", gpus=GPUS, model_facts={"speculation": "none"})
    entries = record(tmp_path, [([check("mode", "pass")], "pass", {"model_staging_facts": facts, "sglang_dsv4_release": {"id": "%012d" % number}, **more})
                                for number, (facts, more) in enumerate((
                                    ({}, {}), ({"speculation": "none"}, {}), ({"speculation": "mtp"}, {}), ({}, {"sglang_dsv4_plan": known})))])  # fmt: skip
    said = [line for entry in entries for line in entry.splitlines() if "Speculation is off" in line]
    assert [line.split("off: ")[1] for line in said] == [
        "dsv4_topology.speculation says none; whether the checkpoint has a draft was not read in this run.",
        "the checkpoint carries no draft.",
        "dsv4_topology.speculation says none; the checkpoint could serve mtp.",
        "the checkpoint carries no draft.",
    ]


@pytest.mark.slow
def test_check_mode_which_asks_nothing_announces_no_entry(tmp_path):
    passed = ([check("mode", "pass")], "pass", {})
    skipped = ([check("mode", "skipped", "check_mode", "nothing is asked in check mode")], "skipped", {})
    assert len(record(tmp_path, [passed, skipped, passed])) == 1
