# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role's variables as a playbook works them out, one made-up host a case."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles/sglang_dsv4"
SERVED = {"speculation": "mtp", "experts": "fp8"}
NOW = {"manifests": {"0a1b2c3d4e5f": {"inputs": {"model": SERVED}, "links": {"model": "/opt/dsv4/models/m@1"}}}}

# host -> (its variables, the facts that the plan is made with)
HOSTS = {
    "bare": ({"__sglang_dsv4_now": {}}, {}),
    "staged_in_this_run": (
        {"__sglang_dsv4_now": NOW, "model_staging_path": "/opt/dsv4/models/m@2", "model_staging_facts": {"speculation": "none", "experts": "fp4"}},
        {"speculation": "none", "experts": "fp4"},
    ),
    "served_before": ({"__sglang_dsv4_now": NOW}, SERVED),
    "another_model_by_hand": ({"__sglang_dsv4_now": NOW, "sglang_dsv4_model_path": "/srv/other"}, {}),
    "released_by_an_older_version": ({"__sglang_dsv4_now": {"manifests": {"0a1b2c3d4e5f": {"inputs": {}, "links": {}}}}}, {}),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variables")
    hosts = {name: variables for name, (variables, _facts) in HOSTS.items()}
    inventory = {"all": {"vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}, "hosts": hosts}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    for name, file in (("a_defaults", "defaults"), ("b_vars", "vars")):
        target = folder / "group_vars/all" / f"{name}.yml"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROLE / file / "main.yml").read_text(encoding="utf-8"), encoding="utf-8")
    copy = {"content": "{{ __sglang_dsv4_model_facts | to_json }}", "dest": str(folder) + "/{{ inventory_hostname }}.json", "mode": "0600"}
    play = [{"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.copy": copy}]}]
    (folder / "play.yml").write_text(yaml.safe_dump(play), encoding="utf-8")
    done = subprocess.run(
        [str(pathlib.Path(sys.executable).with_name("ansible-playbook")), "-i", str(folder / "hosts.yml"), str(folder / "play.yml")],
        cwd=ROOT, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in hosts}


@pytest.mark.parametrize("host", HOSTS)
def test_what_a_run_does_not_say_of_the_model_is_read_from_the_release(host, seen):
    assert seen[host] == HOSTS[host][1]
