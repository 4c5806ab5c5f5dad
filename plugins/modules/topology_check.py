#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: topology_check
short_description: Prove that a host serves by the planned topology
version_added: "0.1.0"
description:
  - Right answers do not tell who gave them. This module compares units, processes, GPUs, memory, listeners and what router and engines say of
    themselves with the plan of the filter P(blackwell.dsv4.serving_plan#filter).
  - A single server that stands where the pair should is named C(pd_collapsed), even when every answer is right.
  - Called twice, around the probes. The first call takes a snapshot, the second compares with it, so that a restart in between and an engine
    that never saw the probes are found.
  - Read-only. It never fails because of what it finds; look at RV(checks) and RV(summary).
options:
  plan:
    description: The plan, as P(blackwell.dsv4.serving_plan#filter) returns it.
    type: dict
    required: true
  mode:
    description: What must serve, V(pd) for the pair behind the router or V(single) for the fallback.
    type: str
    choices: [pd, single]
    default: pd
  phase:
    description: V(snapshot) takes down restart counts and counters only, V(check) compares everything.
    type: str
    choices: [snapshot, check]
    default: check
  before:
    description: The RV(snapshot) of a call before the probes. Without it counters are not compared.
    type: dict
    default: {}
  requests:
    description: Number of answers generated between the two calls, RV(blackwell.dsv4.chat_probe#module:summary.requests).
    type: int
    default: 0
  settle_seconds:
    description:
      - Seconds that every unit must have been active without a restart.
      - Counted from the unit's own start, so only a host that was started just now is waited for.
    type: int
    default: 120
  min_kv_tokens:
    description: Least number of tokens that an engine's KV cache must hold.
    type: int
    default: 524288
  warn_kv_tokens:
    description: Number of tokens below which an engine with four GPUs gets a note.
    type: int
    default: 2000000
  kernel_warning:
    description: What kept the kernels of this run from being measured, for a note beside the instances that list some.
    type: str
    default: ""
  api_key:
    description: Key of router and workers.
    type: str
  api_key_file:
    description: File on the target that holds the key. Mutually exclusive with O(api_key).
    type: path
  timeout:
    description: Seconds after which a question to router, engine or driver is given up.
    type: float
    default: 30.0
  nvml_path:
    description: Virtual environment, or site-packages folder, that has nvidia-ml-py. Without it C(nvidia-smi) is asked.
    type: path
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
    details: Nothing is asked; every check is V(skipped), since a host that is only planned has nothing to compare.
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
seealso:
  - module: blackwell.dsv4.chat_probe
  - module: blackwell.dsv4.gpu_info
author:
  - blackwell.dsv4 maintainers (@blackwell-dsv4)
"""

EXAMPLES = r"""
- name: Take down what the probes must not change
  blackwell.dsv4.topology_check:
    phase: snapshot
    plan: "{{ sglang_dsv4_plan }}"
  register: before

- name: Ask the endpoint
  blackwell.dsv4.chat_probe:
    base_url: "{{ sglang_dsv4_plan.endpoint.url }}"
    model: "{{ sglang_dsv4_plan.served_model_name }}"
  register: probes

- name: Compare the host with the plan
  blackwell.dsv4.topology_check:
    plan: "{{ sglang_dsv4_plan }}"
    before: "{{ before.snapshot }}"
    requests: "{{ probes.summary.requests }}"
    nvml_path: /opt/dsv4/tools
  register: topology
"""

RETURN = r"""
checks:
  description: One entry a check, always in the same order; empty for a snapshot.
  returned: always
  type: list
  elements: dict
  contains:
    id:
      description: What was compared, with the instance where there are several.
      type: str
      sample: gpus.decode
    status:
      description: V(pass), V(fail), V(inconclusive) or V(skipped).
      type: str
      sample: pass
    reason:
      description: Stable code, C(ok) when it passed.
      type: str
      sample: ok
    evidence:
      description: What was seen.
      type: str
      sample: holds GPU 4, 5, 6, 7 and no other
    hint:
      description: Unit, flag or command to look at.
      type: str
      sample: ""
    seconds:
      description: Time that the check took.
      type: float
      sample: 0.01
    notes:
      description: Oddities that are allowed.
      type: list
      elements: str
      sample: []
summary:
  description: The checks in short.
  returned: always
  type: dict
  contains:
    status:
      description: The gravest status of all checks.
      type: str
      sample: pass
    ok:
      description: Whether the status is V(pass) or V(flaky).
      type: bool
      sample: true
    counts:
      description: Number of checks by status.
      type: dict
      sample: {"pass": 27, "fail": 0, "flaky": 0, "inconclusive": 0, "skipped": 0}
    bad:
      description: Checks that did not pass, with their reasons.
      type: list
      elements: str
      sample: []
snapshot:
  description: Units and counters as they are now, to be handed to the second call as O(before).
  returned: always
  type: dict
  sample:
    units: {"decode": {"ActiveState": "active", "MainPID": "812", "NRestarts": "0"}}
    counters: {"decode": {"num_requests_total": 12.0, "prompt_tokens_total": 310.0, "generation_tokens_total": 96.0}}
"""

import glob
import os
import sys
import traceback

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import endpoint_key, gpu_info, probes, topology
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import System


def argument_spec():
    return {
        "plan": {"type": "dict", "required": True},
        "mode": {"type": "str", "choices": ["pd", "single"], "default": "pd"},
        "phase": {"type": "str", "choices": ["snapshot", "check"], "default": "check"},
        "before": {"type": "dict", "default": {}},
        "requests": {"type": "int", "default": 0},
        "settle_seconds": {"type": "int", "default": 120},
        "min_kv_tokens": {"type": "int", "default": 524288, "no_log": False},
        "warn_kv_tokens": {"type": "int", "default": 2000000, "no_log": False},
        "kernel_warning": {"type": "str", "default": ""},
        "api_key": {"type": "str", "no_log": True},
        "api_key_file": {"type": "path", "no_log": False},
        "timeout": {"type": "float", "default": 30.0},
        "nvml_path": {"type": "path"},
    }


def nvml(path):
    """pynvml from ``path``, or None."""
    if path:
        sys.path[:0] = sorted(glob.glob(os.path.join(path, "lib", "python3*", "site-packages"))) or [path]
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def main():
    module = AnsibleModule(argument_spec=argument_spec(), mutually_exclusive=[("api_key", "api_key_file")], supports_check_mode=True)
    given = module.params
    missing = [key for key in ("instances", "modes", "endpoint") if key not in given["plan"]]
    if missing or given["mode"] not in given["plan"]["modes"]:
        module.fail_json(msg="plan is no result of the filter serving_plan: it lacks %s" % (", ".join(missing) or "mode " + given["mode"]))
    system = System(timeout=given["timeout"])
    host = topology.Host(
        system, api_key=None if module.check_mode else endpoint_key.read(module), timeout=given["timeout"],
        gpu_facts=lambda: gpu_info.gather(system, nvml(given["nvml_path"]), ("nvml", "nvidia-smi"), peers=False, limit=given["timeout"]))
    try:
        watch = topology.Topology(given["plan"], given["mode"], host, given["settle_seconds"], given["min_kv_tokens"], given["warn_kv_tokens"],
                                  given["kernel_warning"] or "")
        if module.check_mode:
            checks = watch.skipped("check_mode", "nothing is asked in check mode") if given["phase"] == "check" else []
            module.exit_json(changed=False, checks=checks, summary=probes.summarize(checks), snapshot={"units": {}, "counters": {}})
        if given["phase"] == "snapshot":
            module.exit_json(changed=False, checks=[], summary=probes.summarize([]), snapshot=watch.snapshot())
        checks = watch.check(given["before"], given["requests"])
        module.exit_json(changed=False, checks=checks, summary=probes.summarize(checks),
                         snapshot={"units": watch.units or {}, "counters": dict((n, watch.counters(n)) for n in watch.engines)})
    except Exception as exc:
        module.fail_json(msg="topology_check stopped on a fault of its own: %s" % exc, exception=traceback.format_exc())


if __name__ == "__main__":
    main()
