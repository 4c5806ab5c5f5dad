# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What verify.yml and bench.yml say first of a host on which a run was cut."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("point", [None, {"open": False}, {"open": True}], ids=["no change yet", "verified", "cut"])
def test_a_change_that_was_cut_is_named(tmp_path, point):
    topology = yaml.safe_load((ROOT / "inventory/blackwell8/group_vars/all/topology.yml").read_text(encoding="utf-8"))
    given = {**topology, "dsv4_root": str(tmp_path / "root"), "dsv4_state_dir": str(tmp_path), "ansible_python_interpreter": sys.executable}
    plan = {"import_role": {"name": "blackwell.dsv4.sglang_dsv4", "tasks_from": "plan.yml"}}
    play = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": given, "tasks": [plan]}]
    (tmp_path / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    if point is not None:
        (tmp_path / "return-point.json").write_text(json.dumps({"format": 1, "units": {}, **point}), encoding="utf-8")
    done = subprocess.run(
        [str(pathlib.Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", str(tmp_path / "play.yml")],
        env=dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"), ANSIBLE_NOCOLOR="1"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "changed=0" in done.stdout, done.stdout + done.stderr
    assert ("rollback.yml goes" in done.stdout) == bool(point and point["open"])
