#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: driver_packages
short_description: Keep the packages of the NVIDIA driver as one set
version_added: "0.1.0"
description:
  - Installs the driver's packages in one version from one origin in one transaction, moves the siblings along, and holds the whole set.
  - Waits for apt's locks up to a limit, and names the holder when the limit passes. It ends nobody.
  - Lets dpkg finish packages that were left half way, once; when that fails, names them, the kernel and the build log.
  - In check mode a repository that is not configured yet is read into a temporary folder, so that the plan has exact versions on a bare host.
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
options:
  names:
    description: Packages that must be installed.
    type: list
    elements: str
    default: []
  family:
    description: Patterns of the packages that carry the driver's version (the patterns of apt preferences).
    type: list
    elements: str
    default: []
  version:
    description:
      - Version of the driver, without the package revision.
      - Empty keeps the installed version of O(branch), else takes the newest offered one.
    type: str
    default: ""
  branch:
    description: Branch of the driver.
    type: int
  origin:
    description: Origin (o= of the repository's Release file) that may give the family. Empty allows any.
    type: str
    default: ""
  hold:
    description: Patterns of installed packages to hold.
    type: list
    elements: str
    default: []
  scope:
    description: Patterns of all packages that this set covers; those that are left half way are repaired. Default is O(family).
    type: list
    elements: str
    default: []
  exact:
    description: Exact versions by package, for a rollback; other packages of O(scope) are removed.
    type: dict
    default: {}
  absent:
    description: Packages that must not be installed.
    type: list
    elements: str
    default: []
  keep_holds:
    description: Exactly these packages of O(scope) are held. Not given, the installed packages that fit O(hold) are.
    type: list
    elements: str
  repository:
    description: A deb822 source, read only while it is not configured on the host.
    type: str
    default: ""
  repository_key:
    description: Public key of O(repository), ASCII armored.
    type: str
    default: ""
  lock_timeout:
    description: Seconds to wait for apt's locks.
    type: int
    default: 600
extends_documentation_fragment:
  - blackwell.dsv4.attributes
  - blackwell.dsv4.host.boot
  - blackwell.dsv4.host.proc
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  platform:
    support: full
    platforms: debian
"""

EXAMPLES = r"""
- name: Install and hold the driver
  blackwell.dsv4.driver_packages:
    names: [nvidia-dkms-580-open, libnvidia-compute-580, nvidia-utils-580]
    family: ["nvidia-*-580", "nvidia-*-580-open", "libnvidia-*-580"]
    hold: ["nvidia-*-580", "nvidia-*-580-open", "libnvidia-*-580"]
    version: 580.95.05
    origin: NVIDIA
"""

RETURN = r"""
version:
  description: Version of the driver that the set has, or would have.
  returned: always
  type: str
  sample: 580.95.05
install:
  description: Exact versions of what was (or would be) installed.
  returned: always
  type: dict
  sample: {"nvidia-utils-580": "580.95.05-0ubuntu1"}
remove:
  description: What was (or would be) removed.
  returned: always
  type: list
  elements: str
  sample: []
hold:
  description: What was (or would be) newly held.
  returned: always
  type: list
  elements: str
  sample: [nvidia-utils-580]
repaired:
  description: Packages that were left half way before.
  returned: always
  type: list
  elements: str
  sample: []
packages:
  description: Versions of the installed packages of the set.
  returned: always
  type: dict
  sample: {"nvidia-utils-580": "580.95.05-0ubuntu1"}
held:
  description: Held packages of the set.
  returned: always
  type: list
  elements: str
  sample: [nvidia-utils-580]
summary:
  description: The plan in one line.
  returned: always
  type: str
  sample: install nvidia-utils-580=580.95.05-0ubuntu1; hold nvidia-utils-580
finding:
  description: What went wrong. More keys depend on RV(finding.id), such as C(pid) of the process that holds apt's lock.
  returned: failure
  type: dict
  contains:
    id:
      description:
        - One of V(package_not_offered), V(package_version_not_offered), V(packages_conflict), V(driver_packages_not_configured),
          V(apt_locked), V(apt_update_failed), V(apt_mark_failed), V(apt_failed).
      type: str
      sample: package_not_offered
    what: {description: What it is., type: str, sample: package nvidia-open-590 not offered by configured repositories}
    hint: {description: How to mend it., type: str, sample: let it end and run again}
"""

import glob
import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import driver, driver_packages
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import BOOT, PROC, System


def summary(plan: driver_packages.Plan) -> str:
    """The plan in one line."""
    parts = []
    if plan.broken:
        parts.append("finish configuring " + ", ".join(plan.broken))
    if plan.install:
        parts.append("install " + ", ".join(f"{name}={version}" if version else name for name, version in sorted(plan.install.items())))
    if plan.remove:
        parts.append("remove " + ", ".join(plan.remove))
    released = [name for name in plan.unhold if name not in plan.hold]
    if released:
        parts.append("release " + ", ".join(released))
    if plan.hold:
        parts.append("hold " + ", ".join(plan.hold))
    return "; ".join(parts) or "nothing to do"


def still_broken(
    apt: driver_packages.Apt, system: System, scope: list[str], boot: str, ending: driver_packages.Problem | None
) -> driver_packages.Problem | None:
    """The problem to report when packages are still half way."""
    left = driver_packages.broken_packages(apt.packages(), scope)
    if not left:
        return ending
    logs = sorted(
        glob.glob(system.at("/var/lib/dkms/nvidia/*/build/make.log")) + glob.glob(system.at("/var/lib/dkms/nvidia/*/*/*/log/make.log")),
        key=os.path.getmtime,
    )
    dkms, _reason = driver.dkms_entries(system)
    problem = driver_packages.half_way(
        left, dkms, driver.module_facts(system)["loaded_version"], logs[-1] if logs else None, driver.bootable_kernels(system, boot)
    )
    if ending is not None:
        problem.more["apt"] = ending.more.get("apt")
    return problem


def run(module: AnsibleModule, apt: driver_packages.Apt, system: System) -> dict:
    given = module.params
    scope = given["scope"] or given["family"]
    wanted = driver_packages.Wanted(
        given["names"],
        given["family"],
        given["version"],
        given["branch"],
        given["origin"],
        given["exact"],
        given["absent"],
        given["hold"],
        given["keep_holds"],
        scope,
    )
    before = apt.packages()
    held = apt.held()

    def plan_now(packages: list[dict], held_now: list[str], complete: bool) -> driver_packages.Plan:
        asked = (
            set(wanted.names) | set(wanted.exact) | {entry["name"] for entry in packages if driver.in_family(entry["name"], wanted.family)}
        )
        if driver_packages.satisfied(wanted, packages):
            return driver_packages.decide(wanted, packages, held_now, {}, {})
        return driver_packages.decide(wanted, packages, held_now, apt.policy(asked), apt.origins(), complete, apt.names)

    complete = not module.check_mode
    try:
        plan = plan_now(before, held, True)
    except driver_packages.Problem as first:
        if module.check_mode:
            reason = apt.look_ahead()
            if reason is not None:
                module.warn(f"the repository cannot be read ahead of its installation: {reason}")
                if not any(system.listed("/var/lib/apt/lists")) or first.ident != "package_not_offered":
                    raise
                plan = driver_packages.Plan(wanted.version or None, {name: "" for name in wanted.names}, [], [], [], [])
            else:
                plan = plan_now(before, held, complete)
        else:
            apt.update()
            plan = plan_now(before, held, True)
    result = {
        "changed": plan.changed,
        "version": plan.version,
        "install": plan.install,
        "remove": plan.remove,
        "hold": plan.hold,
        "repaired": plan.broken,
        "summary": summary(plan),
    }
    lock = apt.lock_held() if plan.changed and module.check_mode else None
    if lock:
        module.warn(f"{driver_packages.holder_words(lock)}; a run waits for it, {apt.lock_timeout:g} s at most")
    after, held_after = before, held
    if plan.changed and not module.check_mode:
        ending = None
        if plan.broken:
            said = apt.configure()
            left = still_broken(apt, system, scope, given["boot"], None)
            if left is not None:
                left.more["dpkg"] = said[-2000:]
                raise left
        apt.mark("unhold", plan.unhold)
        try:
            apt.apply(plan)
        except driver_packages.Problem as problem:
            ending = problem
        if ending is not None:
            raise still_broken(apt, system, scope, given["boot"], ending) or ending
        # What the dependencies brought along is held as well.
        after = apt.packages()
        final = driver_packages.decide(wanted, after, apt.held(), {}, {}, True) if not (plan.broken and wanted.exact) else plan
        apt.mark("unhold", [name for name in final.unhold if name not in final.install])
        apt.mark("hold", final.hold)
        result["hold"] = sorted(set(plan.hold) | set(final.hold))
        held_after = apt.held()
    inside = [entry for entry in after if driver.in_family(entry["name"], scope) or entry["name"] in wanted.names]
    result["packages"] = {entry["name"]: entry["version"] for entry in inside}
    result["held"] = [name for name in held_after if driver.in_family(name, scope) or name in wanted.names]
    if plan.changed:
        result["diff"] = {
            "before": "".join(
                f"{entry['name']} {entry['version']}{' held' if entry['name'] in held else ''}\n"
                for entry in before
                if driver.in_family(entry["name"], scope)
            ),
            "after": result["summary"] + "\n"
            if module.check_mode
            else "".join(f"{entry['name']} {entry['version']}{' held' if entry['name'] in held_after else ''}\n" for entry in inside),
        }
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "default": []},
            "family": {"type": "list", "elements": "str", "default": []},
            "version": {"type": "str", "default": ""},
            "branch": {"type": "int"},
            "origin": {"type": "str", "default": ""},
            "hold": {"type": "list", "elements": "str", "default": []},
            "scope": {"type": "list", "elements": "str", "default": []},
            "exact": {"type": "dict", "default": {}},
            "absent": {"type": "list", "elements": "str", "default": []},
            "keep_holds": {"type": "list", "elements": "str"},
            "repository": {"type": "str", "default": ""},
            "repository_key": {"type": "str", "default": "", "no_log": False},
            "lock_timeout": {"type": "int", "default": 600},
            **BOOT,
            **PROC,
        },
        supports_check_mode=True,
    )
    system = System(module.params["proc_root"])
    apt = driver_packages.Apt(system, module.params["lock_timeout"], module.params["repository"], module.params["repository_key"])
    try:
        result = run(module, apt, system)
    except driver_packages.Problem as problem:
        apt.forget()
        module.fail_json(
            msg=f"{problem.what}. {problem.hint}".strip(),
            finding={"id": problem.ident, "what": problem.what, "hint": problem.hint, **problem.more},
        )
    apt.forget()
    module.exit_json(**result)


if __name__ == "__main__":
    main()
