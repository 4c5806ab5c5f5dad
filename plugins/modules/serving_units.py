#!/usr/bin/python
# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_units
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
version_added: "0.1.0"
short_description: Stop, start, enable and disable several units at once
description:
  - Brings units to a state with as few calls of systemctl as possible, so that the two halves stop and start side by
    side. Units that are as wanted are left alone; one that is not there is no error for O(stopped) and O(disabled).
  - Works in this order - O(disabled), O(stopped), reload when a unit file changed, O(enabled), clear the failed state
    of what is stopped or started, O(started).
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
options:
  stopped:
    description: Units that must not run, without C(.service). They are waited for.
    type: list
    elements: str
    default: []
  disabled:
    description: Units that must not start at boot.
    type: list
    elements: str
    default: []
  enabled:
    description: Units that start at boot.
    type: list
    elements: str
    default: []
  started:
    description: Units to start. They are not waited for.
    type: list
    elements: str
    default: []
  reload:
    description: Have systemd read its unit files again first.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Stop the fallback
  blackwell.dsv4.serving_units:
    stopped: [sglang-dsv4]
    disabled: [sglang-dsv4]

- name: Start both halves
  blackwell.dsv4.serving_units:
    enabled: [sglang-dsv4-prefill, sglang-dsv4-decode]
    started: [sglang-dsv4-prefill, sglang-dsv4-decode]
"""

RETURN = r"""
done:
  description: What was done, in order.
  type: list
  elements: str
  returned: always
  sample: ["stop sglang-dsv4", "start sglang-dsv4-prefill sglang-dsv4-decode"]
units:
  description: Facts about the units afterwards.
  type: dict
  returned: always
  sample: {"sglang-dsv4": {"active_state": "inactive", "enabled": false}}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_state as logic


def steps_for(given, units):
    """The systemctl calls that lead to the wanted state, each with the words that tell of it."""
    steps = []

    def add(verb, names, options=()):
        if names:
            steps.append(([verb] + list(options) + ["%s.service" % name for name in names],
                          "%s %s" % (verb, " ".join(names))))

    add("disable", [name for name in given["disabled"] if units[name]["enabled"]])
    add("stop", [name for name in given["stopped"]
                 if units[name]["present"] and units[name]["active_state"] not in ("inactive", "failed")])
    if given["reload"] or any(unit["need_reload"] for unit in units.values()):
        steps.append((["daemon-reload"], "daemon-reload"))
    start = [name for name in given["started"]
             if units[name]["active_state"] not in ("active", "activating", "reloading")]
    add("enable", [name for name in given["enabled"] if not units[name]["enabled"]])
    clear = [name for name in given["stopped"] + given["started"]
             if units[name]["present"] and (units[name]["failed"] or name in start)]
    for name in sorted(set(clear)):
        # A unit that is not loaded has nothing to clear, and systemctl calls that an error.
        steps.append((["reset-failed", "%s.service" % name], "reset-failed %s" % name if units[name]["failed"] else ""))
    add("start", start, ["--no-block"])
    return steps


def main():
    """Argument spec, calls, answer."""
    names = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={"stopped": names, "disabled": names, "enabled": names, "started": names,
                       "reload": {"type": "bool", "default": False}},
        supports_check_mode=True,
    )
    given = module.params
    everything = sorted({name for key in ("stopped", "disabled", "enabled", "started") for name in given[key]})
    units = logic.units(everything)
    steps = steps_for(given, units)
    done = [words for unused, words in steps if words]
    if not module.check_mode:
        for arguments, unused in steps:
            code, out, err = module.run_command(["systemctl"] + arguments)
            if code != 0 and arguments[0] != "reset-failed":
                module.fail_json(msg="systemctl %s failed: %s" % (" ".join(arguments), (err or out).strip()),
                                 done=done, units=logic.units(everything))
        # A unit that failed while it was being stopped is to be "not failed" afterwards.
        if steps:
            for name, unit in logic.units(given["stopped"]).items():
                if unit["failed"]:
                    module.run_command(["systemctl", "reset-failed", "%s.service" % name])
        units = logic.units(everything)
    module.exit_json(changed=bool(done), done=done, units=units, diff={
        "before": "", "after": "".join("%s\n" % words for words in done)})


if __name__ == "__main__":
    main()
