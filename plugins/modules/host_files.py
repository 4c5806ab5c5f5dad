#!/usr/bin/python
# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_files
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
version_added: "0.1.0"
short_description: Several files and folders as they should be, in one call
description:
  - What M(ansible.builtin.copy) with C(content) and M(ansible.builtin.file) do for one path each, for all paths of a step.
    A call to a host costs the better part of a second, so a role that keeps ten small files spends its time on calls.
  - Files are replaced in one step. Folders that are missing above a path are made with mode C(0755).
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  platform:
    support: full
    platforms: posix
options:
  files:
    description: The paths, in the order in which they are brought about.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Where; below O(root) when it does not begin with a slash.
        type: path
        required: true
      state:
        description: What belongs there. V(absent) removes whatever it is, folders with their contents.
        type: str
        choices: [file, directory, absent]
        default: file
      content:
        description: Text of the file.
        type: str
      mode:
        description: Mode, quoted; V(0644) for a file and V(0755) for a folder when it is not given.
        type: str
      owner:
        description: Owner, instead of the call's O(owner).
        type: str
      group:
        description: Group, instead of the call's O(group).
        type: str
  root:
    description: Folder of paths that do not begin with a slash.
    type: path
  owner:
    description: Owner of all files and folders; left alone when it is not given.
    type: str
  group:
    description: Group of all files and folders; left alone when it is not given.
    type: str
"""

EXAMPLES = r"""
- name: Load the modules at boot, and take an old file away
  blackwell.dsv4.host_files:
    owner: root
    group: root
    files:
      - path: /etc/modules-load.d/dsv4-nvidia.conf
        content: |
          nvidia
          nvidia-uvm
      - {path: /etc/dsv4/credentials, state: directory, mode: "0700"}
      - {path: /etc/modprobe.d/dsv4-nvidia.conf, state: absent}
"""

RETURN = r"""
paths:
  description: The paths that were changed, or would be.
  type: list
  elements: str
  returned: always
  sample: [/etc/modules-load.d/dsv4-nvidia.conf]
"""

import json
import os
import tempfile

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import host_files as logic


def bring_about(module, entry):
    """Make one path what the entry says."""
    path, state = entry["path"], entry["state"]
    if state == "absent":
        logic.remove(path)
        return
    logic.make_parents(path)
    if state == "directory":
        os.mkdir(path)
        return
    # Only root reads it before it has its owner and mode.
    descriptor, fresh = tempfile.mkstemp(dir=module.tmpdir)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
        stream.write(entry["content"])
    module.atomic_move(fresh, path)


def attributes(module, entry, changed):
    """Owner, group and mode of a path: (changed, diff)."""
    diff = {}
    wanted = module.load_file_common_arguments({
        # A folder may be a link to where the room is; the link itself has no mode.
        "path": os.path.realpath(entry["path"]) if entry["state"] == "directory" else entry["path"],
        "mode": entry["mode"] or logic.MODES[entry["state"]],
        "owner": entry["owner"] or module.params["owner"],
        "group": entry["group"] or module.params["group"],
    })
    changed = module.set_fs_attributes_if_different(wanted, changed, diff)
    return changed, {side + "_header": entry["path"] for side in diff} | {
        side: json.dumps(values, indent=1, sort_keys=True) + "\n" for side, values in diff.items()}


def main():
    """Argument spec, call, answer."""
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "required": True, "options": {
                "path": {"type": "path", "required": True},
                "state": {"type": "str", "choices": ["file", "directory", "absent"], "default": "file"},
                "content": {"type": "str"},
                "mode": {"type": "str"},
                "owner": {"type": "str"},
                "group": {"type": "str"},
            }, "required_if": [("state", "file", ("content",))]},
            "root": {"type": "path"},
            "owner": {"type": "str"},
            "group": {"type": "str"},
        },
        supports_check_mode=True,
    )
    paths, diffs = [], []
    for entry in module.params["files"]:
        entry["path"] = os.path.join(module.params["root"] or "/", entry["path"])
        try:
            state, content = logic.look(entry["path"])
            fresh = state != entry["state"]
            diff = logic.difference(entry, state, content)
            changed = diff is not None
            if changed:
                diffs.append(diff)
                if not module.check_mode:
                    bring_about(module, entry)
            if entry["state"] != "absent":
                changed, diff = attributes(module, entry, changed)
                # What was just made has no owner and mode from before.
                diffs += [diff] if diff and not fresh else []
        except (logic.HostFilesError, OSError) as error:
            module.fail_json(msg="%s: %s" % (entry["path"], error), paths=paths)
        if changed:
            paths.append(entry["path"])
    module.exit_json(changed=bool(paths), paths=paths, diff=diffs)


if __name__ == "__main__":
    main()
