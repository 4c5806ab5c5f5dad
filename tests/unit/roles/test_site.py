# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""site.yml over inventories with several hosts, none of which exists."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
PLACES = ("dsv4_prefill", "dsv4_decode", "dsv4_router")


def site(folder, *words, **places):
    """Exit code and output of site.yml with ``words``; places: hosts by group. Nobody listens where the hosts are said to be."""
    inventory = {"all": {"children": {"dsv4": {"children": {
        name: {"hosts": {host: {"ansible_host": "127.0.0.1", "ansible_port": 1} for host in places[name]}} for name in PLACES}}}}}
    shutil.copytree(ROOT / "inventory/blackwell8/group_vars", folder / "group_vars")
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    program = shutil.which("ansible-playbook") or str(pathlib.Path(sys.executable).with_name("ansible-playbook"))
    done = subprocess.run([program, "site.yml", "-i", str(folder), *words], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          check=False, env=dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1"))
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_pair_over_two_hosts_is_refused_before_any_host_is_touched(tmp_path):
    code, text = site(tmp_path, dsv4_prefill=["one"], dsv4_decode=["two"], dsv4_router=["two"])
    assert code != 0
    assert "two is not in dsv4_prefill" in text and "one is not in dsv4_decode and dsv4_router" in text
    assert "UNREACHABLE" not in text and "Gathering Facts" not in text


@pytest.mark.slow
def test_a_wrong_variable_is_named_before_any_host_is_touched(tmp_path):
    words = ["-e", "sglang_dsv4_mode=pdd", "-e", "sglang_dsv4_start_timout=3", "-e", "sglang_dsv4_api_key={{ vault_of_nobody }}"]
    code, text = site(tmp_path, *words, **{name: ["one"] for name in PLACES})
    assert code != 0 and "UNREACHABLE" not in text
    assert "set sglang_dsv4_mode to one of pd, single" in text and "did you mean sglang_dsv4_start_timeout?" in text
    assert "1 error, 1 warning" in text and "vault_of_nobody" not in text


@pytest.mark.slow
def test_hosts_that_serve_a_pair_each_come_one_after_the_other_and_the_first_failure_ends_it(tmp_path):
    code, text = site(tmp_path, **{name: ["one", "two"] for name in PLACES})
    assert code != 0 and "2 hosts: each serves a pair of its own" in text
    assert "[one]: UNREACHABLE" in text and "[two]: UNREACHABLE" not in text


def test_a_cutover_that_fails_goes_back_whatever_tags_were_chosen():
    tasks = yaml.safe_load((ROOT / "playbooks/site.yml").read_text(encoding="utf-8"))[-1]["tasks"][0]["rescue"]
    cutover = yaml.safe_load((ROOT / "roles/sglang_dsv4/tasks/main.yml").read_text(encoding="utf-8"))[-1]
    assert cutover["ansible.builtin.import_tasks"] == "cutover.yml"
    assert [task["tags"] for task in tasks] == [cutover["tags"]] * 2
    assert tasks[0]["ansible.builtin.include_role"]["apply"] == {"tags": cutover["tags"]}
