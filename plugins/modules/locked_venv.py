#!/usr/bin/python
# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: locked_venv
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
version_added: "0.1.0"
short_description: A virtual environment that is exactly what a hash-locked file says
description:
  - Builds a Python virtual environment from a lock with hashes. The folder's name carries the hash of the lock, the
    Python version and the extra wheels, so environments of several releases lie side by side and an unchanged lock
    changes nothing.
  - The environment is built at its final place and marked as finished last. A torn build is removed and made anew.
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
  lock:
    description:
      - The text of the lock, every line C(name==version) with hashes. Use P(ansible.builtin.file#lookup).
    type: str
    required: true
  root:
    description: Folder of the environments; the new one is C(<root>/<name>-<key>).
    type: path
  name:
    description: Name of the environment, for O(root).
    type: str
  path:
    description: A fixed path instead of O(root) and O(name). A lock that changes has it built anew.
    type: path
  python:
    description: The interpreter that the environment is made with.
    type: path
    default: /usr/bin/python3
  python_versions:
    description: Versions of Python, such as V(3.13), that the lock serves; another one is refused. Any will do when it is empty.
    type: list
    elements: str
    default: []
  wheels:
    description: Further wheels on the target that are installed without their dependencies.
    type: list
    elements: path
    default: []
  wheel_dir:
    description: Folder on the target with all wheels; with it no index is asked.
    type: path
  index_url:
    description: Address of the package index; pip's default when it is left out.
    type: str
  ca_bundle:
    description: File with the certificates that the index or a proxy is trusted by.
    type: path
  proxy:
    description: Proxy for the index.
    type: str
  require_hashes:
    description: Refuse a lock that has a line without a hash.
    type: bool
    default: true
  missing_ok:
    description: Packages that a requirement names and that the lock leaves out on purpose. V(*) stands for any.
    type: list
    elements: str
    default: []
  probe:
    description:
      - Python code that the finished environment runs. Its last line of output is JSON; it is kept in the marker and
        returned as RV(facts). When it fails the environment is not finished.
    type: str
    default: ""
  log:
    description: File on the target that receives pip's output while it runs.
    type: path
"""

EXAMPLES = r"""
- name: Install the router's environment
  blackwell.dsv4.locked_venv:
    root: /opt/dsv4/venvs
    name: router
    lock: "{{ lookup('ansible.builtin.file', 'router.txt') }}"
  register: router

- name: Install without internet
  blackwell.dsv4.locked_venv:
    path: /opt/dsv4/tools
    lock: "{{ lookup('ansible.builtin.file', 'tools.txt') }}"
    wheel_dir: /srv/wheels
"""

RETURN = r"""
path:
  description: The environment's folder.
  type: str
  returned: always
  sample: /opt/dsv4/venvs/router-3f2a9c1b7d40
key:
  description: Hash of lock, Python version and extra wheels.
  type: str
  returned: always
  sample: 3f2a9c1b7d40
python:
  description: Version of the interpreter.
  type: str
  returned: always
  sample: 3.13.5 CPython
packages:
  description: What is installed, name to version.
  type: dict
  returned: when the environment exists
  sample: {"sglang-router": "0.3.2"}
facts:
  description: What O(probe) printed.
  type: dict
  returned: when the environment exists
  sample: {"version": "0.3.2"}
tail:
  description: The last lines of pip's output.
  type: str
  returned: failure
  sample: "ERROR: No matching distribution found for sglang-router==0.3.2"
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import locked_venv as logic


def main():
    """Argument spec, call, answer."""
    module = AnsibleModule(
        argument_spec={
            "lock": {"type": "str", "required": True},
            "root": {"type": "path"},
            "name": {"type": "str"},
            "path": {"type": "path"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "python_versions": {"type": "list", "elements": "str", "default": []},
            "wheels": {"type": "list", "elements": "path", "default": []},
            "wheel_dir": {"type": "path"},
            "index_url": {"type": "str", "no_log": True},
            "ca_bundle": {"type": "path"},
            "proxy": {"type": "str", "no_log": True},
            "require_hashes": {"type": "bool", "default": True},
            "missing_ok": {"type": "list", "elements": "str", "default": []},
            "probe": {"type": "str", "default": ""},
            "log": {"type": "path"},
        },
        mutually_exclusive=[("path", "root"), ("path", "name")],
        required_one_of=[("path", "root")],
        required_together=[("root", "name")],
        supports_check_mode=True,
    )
    given = module.params
    # Whatever root's own is: the service user reads what is installed here.
    os.umask(0o022)
    problems = logic.problems_of_lock(given["lock"], given["require_hashes"])
    if problems:
        module.fail_json(msg="the lock is unfit: %s" % "; ".join(problems[:5]), problems=problems)
    try:
        version = logic.python_version(given["python"])
    except logic.VenvError as error:
        if module.check_mode:
            module.exit_json(changed=True, path=given["path"] or "", key="", python="",
                             msg="would first need an interpreter: %s" % error)
        module.fail_json(msg=str(error), tail=error.tail)
    if given["python_versions"] and ".".join(version.split(".")[:2]) not in given["python_versions"]:
        module.fail_json(msg="%s is Python %s; the lock serves %s. Name another interpreter." % (
            given["python"], version, ", ".join(given["python_versions"])))
    wheels = list(given["wheels"]) + logic.wheels_of(logic.split_lock(given["lock"])[2], given["wheel_dir"])
    missing = [wheel for wheel in given["wheels"] if not os.path.isfile(wheel)]
    if missing:
        module.fail_json(msg="no such wheel: %s" % ", ".join(missing))
    key = logic.venv_key(given["lock"], version, wheels, given["probe"])
    path = given["path"] or os.path.join(given["root"], "%s-%s" % (given["name"], key))
    answer = {"path": path, "key": key, "python": version}
    if logic.is_complete(path, key):
        marker = logic.read_marker(path)
        module.exit_json(changed=False, packages=marker.get("packages", {}), facts=marker.get("facts", {}), **answer)
    before = logic.read_marker(path) or {}
    difference = {
        "before_header": path, "after_header": path,
        "before": "".join("%s==%s\n" % item for item in sorted(before.get("packages", {}).items())),
        "after": "".join("%s==%s\n" % pin for pin in sorted(
            filter(None, map(logic.pin_of, logic.logical_lines(given["lock"]))))),
    }
    if module.check_mode:
        module.exit_json(changed=True, diff=difference, packages={}, facts={}, **answer)
    try:
        marker = logic.build(
            path, key, given["lock"], given["python"], version, wheels=given["wheels"],
            wheel_dir=given["wheel_dir"] or "", index_url=given["index_url"] or "",
            ca_bundle=given["ca_bundle"] or "", proxy=given["proxy"] or "", probe=given["probe"],
            missing_ok=given["missing_ok"], log=given["log"])
    except (logic.VenvError, OSError, ValueError) as error:
        module.fail_json(msg=str(error), tail=getattr(error, "tail", "")[-3000:], **answer)
    module.exit_json(changed=True, diff=difference, packages=marker["packages"], facts=marker["facts"], **answer)


if __name__ == "__main__":
    main()
