#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: findings
short_description: Append an entry to a Markdown record when something changed
version_added: "0.1.0"
description:
  - Keeps the deployment record of a host, an append-only Markdown file.
  - An entry is appended only when O(key) differs from that of the last entry of its O(series), so an unchanged run writes nothing.
  - The date of an entry is taken on the target, in UTC.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  path:
    description: The record. Folders that are missing above it are made.
    type: path
    required: true
  preamble:
    description: Text that starts a record that does not exist yet.
    type: str
    default: "# Findings"
  title:
    description: Heading of the entry, after the date.
    type: str
    required: true
  body:
    description: Markdown of the entry, without its heading.
    type: str
    required: true
  key:
    description: What the entry stands for (a hash of release, topology and verdict). Letters, digits and C(._:-).
    type: str
    required: true
  series:
    description: Entries of one series are compared among themselves, so that one of another does not hide the last of them.
    type: str
    default: record
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  platform:
    support: full
    platforms: linux
"""

EXAMPLES = r"""
- name: Write the deployment down
  blackwell.dsv4.findings:
    path: /var/lib/dsv4/FINDINGS.md
    title: "release 0a1b2c3d4e5f: pass"
    body: "{{ lookup('ansible.builtin.template', 'entry.md.j2') }}"
    key: "0a1b2c3d4e5f:pd:pass"
"""

RETURN = r"""
path:
  description: The record.
  returned: always
  type: str
  sample: /var/lib/dsv4/FINDINGS.md
previous_key:
  description: Key of the newest entry of the series before this run; null when there is none.
  returned: always
  type: str
  sample: 0a1b2c3d4e5f:pd:pass
"""

import datetime
import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import findings, host_files


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "preamble": {"type": "str", "default": "# Findings"},
            "title": {"type": "str", "required": True},
            "body": {"type": "str", "required": True},
            "key": {"type": "str", "required": True, "no_log": False},
            "series": {"type": "str", "default": findings.RECORD},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    try:
        before = ""
        if os.path.exists(path):
            with open(path, encoding="utf-8") as record:
                before = record.read()
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        after = findings.appended(
            before, module.params["preamble"], date, module.params["title"], module.params["body"], module.params["key"],
            module.params["series"],
        )
        if after is not None and not module.check_mode:
            host_files.make_parents(path)
            host_files.write_atomic(path, after)
    except (findings.FindingsError, OSError, UnicodeDecodeError) as error:
        module.fail_json(msg=f"{path}: {error}")
    result = {"changed": after is not None, "path": path, "previous_key": findings.last_key(before, module.params["series"])}
    if after is not None:
        result["diff"] = {"before": before, "after": after, "before_header": path, "after_header": path}
    module.exit_json(**result)


if __name__ == "__main__":
    main()
