#!/usr/bin/python
# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: release
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
version_added: "0.1.0"
short_description: Write, activate and prune releases
description:
  - A release is a folder below C(<root>/releases) named by the hash of what is in it. It is written beside its place
    and moved there whole; its C(manifest.json) holds the hash of every file.
  - With O(state=active) its unit files are put where systemd reads them and the links C(current) and C(previous) are
    switched, each in one step. Units are neither loaded, stopped nor started.
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
  root:
    description: Folder that holds C(releases), C(current) and C(previous).
    type: path
    default: /opt/dsv4
  state:
    description:
      - V(present) writes the release when it is not there or damaged.
      - V(active) installs its units and switches the links; the release must be complete.
      - V(pruned) removes old releases, and environments and keys that no release uses any more.
    type: str
    choices: [present, active, pruned]
    default: present
  files:
    description: What to write, for O(state=present).
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Path inside of the release.
        type: str
        required: true
      content:
        description: Text of the file. The word C(@RELEASE@) becomes the release's path.
        type: str
        required: true
      mode:
        description: Mode of the file.
        type: str
        default: "0644"
  links:
    description: Symbolic links inside of the release, name to target.
    type: dict
    default: {}
  inputs:
    description: What else decides the release's name and is kept in its manifest.
    type: dict
    default: {}
  id:
    description: The release, for O(state=active).
    type: str
  served:
    description: Where C(current) and C(previous) pointed before the change, for O(state=active), as P(blackwell.dsv4.return_point#module) kept it.
      A release that a run was cut over is never the former one then. Without it they are read.
    type: dict
  unit_dir:
    description: Where systemd reads units.
    type: path
    default: /etc/systemd/system
  units:
    description: Names of the unit files to install, for O(state=active).
    type: list
    elements: str
    default: []
  keep:
    description: How many releases stay, for O(state=pruned). Those that O(protect), C(current) and C(previous) name
      and those that installed O(units) run from stay anyhow.
    type: int
    default: 3
  keys:
    description: Files with keys, for O(state=pruned). They go when no release that stays was made with C(api_key) among its O(inputs).
    type: list
    elements: path
    default: []
  protect:
    description: Releases that stay, for O(state=pruned).
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Write the release
  blackwell.dsv4.release:
    files:
      - path: units/sglang-dsv4-router.service
        content: "{{ lookup('ansible.builtin.template', 'router.service.j2') }}"
    links:
      router: "{{ sglang_runtime_router_path }}"
    inputs:
      model: deepseek-v4-flash@main
  register: written

- name: Put it in place
  blackwell.dsv4.release:
    state: active
    id: "{{ written.id }}"
    units: [sglang-dsv4-router.service]
"""

RETURN = r"""
id:
  description: Name of the release.
  type: str
  returned: for O(state=present) and O(state=active)
  sample: 1f0c2ab94d37
path:
  description: Its folder.
  type: str
  returned: for O(state=present) and O(state=active)
  sample: /opt/dsv4/releases/1f0c2ab94d37
previous:
  description: The release that V(previous) points to afterwards.
  type: str
  returned: for O(state=active)
  sample: 77d0f3e8a1bc
units:
  description: Unit files that differed.
  type: list
  elements: str
  returned: for O(state=active)
  sample: [sglang-dsv4-router.service]
damage:
  description: Why a release that was there is written anew.
  type: list
  elements: str
  returned: for O(state=present)
  sample: ["/opt/dsv4/releases/1f0c2ab94d37/units/sglang-dsv4.service was changed"]
removed:
  description: What was pruned.
  type: list
  elements: str
  returned: for O(state=pruned)
  sample: [/opt/dsv4/releases/77d0f3e8a1bc]
"""

import os
import shutil

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import host_files
from ansible_collections.blackwell.dsv4.plugins.module_utils import release as logic


def write(module, given):
    """state=present"""
    files = sorted(given["files"], key=lambda entry: entry["path"])
    for entry in files:
        logic.check_path(entry["path"])
    identifier = logic.release_id(files, given["links"], given["inputs"])
    path = logic.folder(given["root"], identifier)
    there = os.path.lexists(path)
    damage = logic.problems(path) if there else []
    answer = {"id": identifier, "path": path, "damage": damage}
    if there and not damage:
        module.exit_json(changed=False, **answer)
    current = logic.linked(given["root"], "current")
    diff = []
    for entry in logic.rendered(files, path):
        before = ""
        if current:
            old = logic.folder(given["root"], current)
            before = (logic.read_text(os.path.join(old, entry["path"])) or "").replace(old, path)
        if before != entry["content"]:
            diff.append({"before_header": "%s (release %s)" % (entry["path"], current or "none"),
                         "after_header": "%s (release %s)" % (entry["path"], identifier),
                         "before": before, "after": entry["content"]})
    if not module.check_mode:
        logic.build(given["root"], identifier, files, given["links"], given["inputs"])
    module.exit_json(changed=True, diff=diff, **answer)


def activate(module, given):
    """state=active"""
    identifier, root = given["id"], given["root"]
    path = logic.folder(root, identifier)
    if module.check_mode and not os.path.isdir(path):
        module.exit_json(changed=True, id=identifier, path=path, previous=logic.linked(root, "current"),
                         units=given["units"])
    found = logic.problems(path)
    if found:
        module.fail_json(msg="release %s is not complete: %s" % (identifier, "; ".join(found[:5])), problems=found)
    different = logic.unit_differences(path, given["unit_dir"], given["units"])
    now = {name: logic.linked(root, name) for name in ("current", "previous")}
    links = logic.wanted_links(identifier, given["served"] or now)
    diff = [{"before_header": os.path.join(given["unit_dir"], name), "after_header": os.path.join(
        given["unit_dir"], name), "before": installed or "", "after": wanted}
        for name, (installed, wanted) in sorted(different.items())]
    diff += [{"before_header": os.path.join(root, name), "after_header": os.path.join(root, name),
              "before": "%s\n" % (now[name] or "none"), "after": "%s\n" % (links[name] or "none")}
             for name in sorted(links) if links[name] != now[name]]
    if not module.check_mode:
        for name, (unused, wanted) in sorted(different.items()):
            host_files.write_atomic(os.path.join(given["unit_dir"], name), wanted)
        # previous first: killed in between, the next run reads the same current and says the same again.
        for name in ("previous", "current"):
            if links[name] != now[name]:
                logic.switch(root, name, links[name])
    module.exit_json(changed=bool(diff), diff=diff, id=identifier, path=path, previous=links["previous"],
                     units=sorted(different))


def prune(module, given):
    """state=pruned"""
    root = given["root"]
    protected = set(given["protect"]) | logic.releases_of_units(given["unit_dir"], given["units"], root)
    gone, unused = logic.prunable(root, given["keep"], protected)
    keys = logic.unneeded_keys(root, gone, given["keys"])
    folders = [logic.folder(root, name) for name in gone] + unused
    removed = folders + keys
    if not module.check_mode:
        for path in folders:
            shutil.rmtree(path)
        for path in keys:
            os.unlink(path)
    module.exit_json(changed=bool(removed), removed=removed, diff={
        "before": "".join("%s\n" % path for path in removed), "after": ""})


def main():
    """Argument spec, call, answer."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/dsv4"},
            "state": {"type": "str", "choices": ["present", "active", "pruned"], "default": "present"},
            "files": {"type": "list", "elements": "dict", "default": [], "options": {
                "path": {"type": "str", "required": True},
                "content": {"type": "str", "required": True},
                "mode": {"type": "str", "default": "0644"},
            }},
            "links": {"type": "dict", "default": {}},
            "inputs": {"type": "dict", "default": {}},
            "id": {"type": "str"},
            "served": {"type": "dict"},
            "unit_dir": {"type": "path", "default": "/etc/systemd/system"},
            "units": {"type": "list", "elements": "str", "default": []},
            "keep": {"type": "int", "default": 3},
            "keys": {"type": "list", "elements": "path", "default": [], "no_log": False},
            "protect": {"type": "list", "elements": "str", "default": []},
        },
        required_if=[("state", "active", ("id",)), ("state", "present", ("files",))],
        supports_check_mode=True,
    )
    given = module.params
    try:
        {"present": write, "active": activate, "pruned": prune}[given["state"]](module, given)
    except (logic.ReleaseError, OSError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
