# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def topology(host):
    """dsv4_topology as the inventory says it."""
    return host.ansible.get_variables()["dsv4_topology"]


@pytest.fixture(scope="module")
def get(host):
    """GET a URL on the host itself; returns (status, JSON or text)."""

    def fetch(url: str):
        done = host.run("curl --silent --show-error --max-time 20 --write-out '\\n%%{http_code}' %s", url)
        assert done.rc == 0, f"{url}: {done.stderr}"
        body, _, status = done.stdout.rpartition("\n")
        try:
            return int(status), json.loads(body)
        except ValueError:
            return int(status), body

    return fetch
