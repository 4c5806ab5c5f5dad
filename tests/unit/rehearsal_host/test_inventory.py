# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventory of the rehearsal host follows the environment, and hands templates to no connection."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "inventory/rehearsal/hosts.py"


def inventory(**environment):
    done = subprocess.run([str(PROGRAM), "--list"], env=dict({"PATH": os.environ["PATH"]}, **environment), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("environment, cache, name, port", [
    ({"HOME": "/root"}, "/root/.cache/blackwell-dsv4", "rehearsal", 2222),
    ({"HOME": "/root", "XDG_CACHE_HOME": "", "REHEARSAL_NAME": "", "REHEARSAL_SSH_PORT": ""}, "/root/.cache/blackwell-dsv4", "rehearsal", 2222),
    ({"HOME": "/root", "XDG_CACHE_HOME": "/c", "REHEARSAL_NAME": "mine", "REHEARSAL_SSH_PORT": "2230"}, "/c/blackwell-dsv4", "mine", 2230),
])
def test_the_host_is_where_the_environment_says(environment, cache, name, port):
    found = inventory(**environment)["_meta"]["hostvars"]["rehearsal"]
    assert (found["rehearsal_cache"], found["rehearsal_name"], found["ansible_port"]) == (cache, name, port)
    assert found["ansible_ssh_private_key_file"] == cache + "/ssh/id_ed25519" and cache + "/ssh/known_hosts" in found["ansible_ssh_common_args"]


def test_it_carries_all_three_roles_and_no_template():
    found = inventory(HOME="/root")
    assert found["dsv4"]["children"] == ["dsv4_prefill", "dsv4_decode", "dsv4_router"]
    assert all(found[name] == {"hosts": ["rehearsal"]} for name in found["dsv4"]["children"])
    assert "{{" not in json.dumps(found)
