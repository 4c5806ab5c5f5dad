#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host that molecule/rehearsal_host boots, and how to reach it, which follows the environment. One host carries all three
roles, as on blackwell8.

A program, since templates in connection variables would be worked out again for every task.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

PLACES = ("dsv4_prefill", "dsv4_decode", "dsv4_router")


def inventory(environment):
    """What Ansible reads."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path(environment["HOME"], ".cache")) / "blackwell-dsv4"
    variables = {
        "rehearsal_cache": str(cache),
        "rehearsal_name": environment.get("REHEARSAL_NAME") or "rehearsal",
        "ansible_host": "127.0.0.1",
        "ansible_port": int(environment.get("REHEARSAL_SSH_PORT") or 2222),
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(cache / "ssh/id_ed25519"),
        "ansible_ssh_common_args": "-o IdentitiesOnly=yes -o UserKnownHostsFile=%s -o GlobalKnownHostsFile=/dev/null" % (cache / "ssh/known_hosts"),
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    groups = {name: {"hosts": ["rehearsal"]} for name in PLACES}
    return {"_meta": {"hostvars": {"rehearsal": variables}}, "dsv4": {"children": list(PLACES)}, **groups}


if __name__ == "__main__":
    print(json.dumps(inventory(os.environ), indent=1))
