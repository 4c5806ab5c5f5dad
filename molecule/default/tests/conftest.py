# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import testinfra

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "molecule/rehearsal_host"))

from rehearsal.machine import Machine  # noqa: E402


@pytest.fixture(scope="session")
def host():
    """The rehearsal host by SSH: testinfra does not render the templates in the inventory's connection variables."""
    machine = Machine()
    return testinfra.get_host(f"ssh://{machine.name}", ssh_config=str(machine.ssh_config))


@pytest.fixture(scope="session")
def inventory():
    """The host's variables as the inventory says them; templates stay unrendered."""
    answer = subprocess.run(
        ["ansible-inventory", "--inventory", str(ROOT / "inventory/rehearsal"), "--host", "rehearsal"], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


@pytest.fixture(scope="session")
def topology(inventory):
    return inventory["dsv4_topology"]


@pytest.fixture(scope="session")
def get(host):
    """GET a URL on the host itself; returns (status, JSON or text)."""

    def fetch(url: str):
        done = host.run("curl --silent --show-error --max-time 20 --write-out '\\n%%{http_code}' %s", url)
        assert done.rc == 0, f"{url}: {done.stderr}"
        body, unused, status = done.stdout.rpartition("\n")
        try:
            return int(status), json.loads(body)
        except ValueError:
            return int(status), body

    return fetch
