#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: chat_probe
short_description: Prove that a chat endpoint thinks, calls tools and counts
version_added: "0.1.0"
description:
  - Asks an OpenAI-compatible endpoint questions whose answers are known and judges the raw bytes that come back, whole and streamed.
  - The first cause wins, in the order transport, HTTP status, body, choices, finish reason V(abort), finish reason V(length), shape of the
    fields, leaked markup or special tokens, value. An aborted answer is therefore never reported as a wrong number.
  - Read-only. It never fails because of what it finds; look at RV(checks) and RV(summary).
  - In check mode no request is sent and every check is V(skipped).
options:
  base_url:
    description:
      - Address of the endpoint as seen from the target, without C(/v1).
      - In a prefill/decode deployment this is the router. A port listed in O(role_ports) is refused with the reason
        C(probe_aimed_at_half), since a half cannot answer alone and may be harmed by the attempt.
    type: str
    required: true
  model:
    description: Name under which the model is served.
    type: str
    required: true
  api_key:
    description:
      - Key sent as C(Authorization) bearer token.
      - A placeholder or a key shorter than eight characters is used but not masked, with a warning, because masking it would censor ordinary
        words of the result.
    type: str
  api_key_file:
    description: File on the target that holds the key, so that it never leaves the target. Mutually exclusive with O(api_key).
    type: path
  probes:
    description: Probes to run, in any order; they are reported in a fixed one. All of them by default.
    type: list
    elements: str
    choices:
      - models
      - auth
      - arithmetic
      - thinking
      - thinking_default
      - effort_none
      - effort_high
      - tools
      - tools_answer
      - tools_again
      - tools_nested
      - no_tools
      - structured
      - unicode
      - long_prompt
      - concurrent
      - cancel
      - bad_json
      - too_long
      - unknown_model
      - healthy
  streams:
    description: Ask for whole answers, for streamed ones, or for both and compare them.
    type: str
    choices: [both, whole, stream]
    default: both
  repeat:
    description:
      - How often V(arithmetic), V(thinking) and V(tools) are asked, and how often another probe is asked again after it failed.
      - When some attempts pass and some do not, the check is V(flaky) and keeps the first fault.
    type: int
    default: 3
  concurrency:
    description: Number of requests that the probe V(concurrent) sends at once.
    type: int
    default: 8
  timeout:
    description: Seconds after which one request is given up, however slowly its bytes drip in.
    type: float
    default: 120.0
  ca_path:
    description: File with the certificate authorities to trust when O(base_url) is HTTPS.
    type: path
  max_tokens:
    description: Room for an answer, in tokens.
    type: int
    default: 2048
  retry_truncated:
    description: Ask once more with four times O(max_tokens) when an answer did not fit.
    type: bool
    default: true
  long_prompt_tokens:
    description: Approximate length of the prompt of the probe V(long_prompt).
    type: int
    default: 8192
  context_length:
    description: Context length of the deployment. Without it the probe V(too_long) is skipped.
    type: int
  router:
    description: What stands at O(base_url); decides what an unknown model name must give. V(none) is a server without a router.
    type: str
    choices: [sglang-router, smg, none]
    default: sglang-router
  thinking_key:
    description: Name of the switch in C(chat_template_kwargs) that turns thinking on.
    type: str
    default: thinking
  role_ports:
    description: Ports that belong to a half of the pair, by role.
    type: dict
  workers:
    description: Workers that must be ready before the first question, and whose slots are watched by the probe V(cancel).
    type: list
    elements: dict
    suboptions:
      name:
        description: Name of the role.
        type: str
        required: true
      url:
        description: Base URL of the worker.
        type: str
        required: true
      health_path:
        description: Path that answers 200 when the worker is ready.
        type: str
        default: /health
  readiness_path:
    description: Path below O(base_url) that answers 200 when the endpoint is ready, C(/readiness) on a router.
    type: str
  ready_timeout:
    description: Seconds to wait for O(workers) and O(readiness_path). What is not ready by then makes the run V(inconclusive), not failed.
    type: float
    default: 0.0
  direct_url:
    description: Address of a worker that can answer alone, asked only to explain a missing C(reasoning_content).
    type: str
  journal_units:
    description: Units whose journal is searched for the cause when a request dies inside the server.
    type: list
    elements: str
  unit:
    description: Unit that hints name for flags and logs of the engine.
    type: str
    default: sglang-dsv4-decode
  router_unit:
    description: Unit that hints name for the endpoint.
    type: str
    default: sglang-dsv4-router
  reasoning_parser:
    description: Reasoning parser that the deployment plans, for hints.
    type: str
    default: deepseek-v4
  tool_call_parser:
    description: Tool-call parser that the deployment plans, for hints.
    type: str
    default: deepseekv4
  seed:
    description: Makes the numbers of a run repeatable. Leave it out, so that no cached answer can pass.
    type: int
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
    details: No request is sent; every check is V(skipped).
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
seealso:
  - module: blackwell.dsv4.topology_check
author:
  - blackwell.dsv4 maintainers (@blackwell-dsv4)
"""

EXAMPLES = r"""
- name: Ask the router everything
  blackwell.dsv4.chat_probe:
    base_url: http://127.0.0.1:30001
    model: deepseek-v4-flash
    role_ports:
      prefill: 30000
      decode: 30002
    context_length: 524288
  register: probes

- name: Only the three that must always pass, without streaming
  blackwell.dsv4.chat_probe:
    base_url: http://127.0.0.1:30001
    model: deepseek-v4-flash
    probes: [arithmetic, thinking, tools]
    streams: whole
    repeat: 1
  register: probes

- name: Stop when the endpoint does not hold
  ansible.builtin.assert:
    that: probes.summary.status == 'pass'
    fail_msg: "{{ probes.summary.bad | join(', ') }}"
"""

RETURN = r"""
checks:
  description: One entry a check, always in the same order.
  returned: always
  type: list
  elements: dict
  contains:
    id:
      description: Name of the probe, with C(.whole) or C(.stream) where it is asked both ways.
      type: str
      sample: thinking.stream
    status:
      description: V(pass), V(fail), V(flaky), V(inconclusive) or V(skipped).
      type: str
      sample: fail
    reason:
      description: Stable code of the first cause, C(ok) when it passed.
      type: str
      sample: think_tag_in_content
    evidence:
      description: What was seen, on one line, bounded, with keys taken out.
      type: str
      sample: "3 of 3; content: sum 391. </think> 391; also no_reasoning"
    excerpt:
      description: Beginning and end of the raw body that decided a check that did not pass, bounded, with keys taken out.
      type: str
      sample: '{"id":"c1","object":"chat.completion","choices":[...]}'
    hint:
      description: Flag, unit or log line to look at.
      type: str
      sample: --reasoning-parser deepseek-v4 on sglang-dsv4-decode; look at journalctl -u sglang-dsv4-decode
    seconds:
      description: Time that the check took, all attempts together.
      type: float
      sample: 0.41
    ttft:
      description: Median time to the first token of its streamed answers, in seconds.
      type: float
      sample: 0.083
    tokens:
      description: Median number of completion tokens, as the server counted them.
      type: int
      sample: 17
    attempts:
      description: Number of attempts.
      type: int
      sample: 3
    passed:
      description: Number of attempts that passed.
      type: int
      sample: 0
    finish:
      description: The C(finish_reason) of the answer that decided the check.
      type: str
      sample: stop
    also:
      description: Reasons of later stages that were seen in the same answer.
      type: list
      elements: str
      sample: [no_reasoning]
    notes:
      description: Oddities that are allowed.
      type: list
      elements: str
      sample: []
    overhead:
      description: The part of RV(checks[].seconds) that was not spent waiting for the endpoint.
      type: float
      sample: 0.002
summary:
  description: The checks in short.
  returned: always
  type: dict
  contains:
    status:
      description: The gravest status of all checks, in the order V(skipped), V(pass), V(flaky), V(inconclusive), V(fail).
      type: str
      sample: fail
    ok:
      description: Whether the status is V(pass) or V(flaky).
      type: bool
      sample: false
    counts:
      description: Number of checks by status.
      type: dict
      sample: {"pass": 30, "fail": 2, "flaky": 0, "inconclusive": 0, "skipped": 1}
    bad:
      description: Checks that did not simply pass, with their reasons.
      type: list
      elements: str
      sample: ["thinking.whole: think_tag_in_content"]
    requests:
      description: Number of answers with HTTP 200 that were generated for the probes.
      type: int
      sample: 52
    seconds:
      description: Time of the whole run.
      type: float
      sample: 6.2
    overhead:
      description: Time that was not spent waiting for the endpoint, over all checks.
      type: float
      sample: 0.06
    overhead_most:
      description: The most of it in one check.
      type: float
      sample: 0.008
"""

import traceback

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import endpoint_key, probes


def argument_spec():
    return {
        "base_url": {"type": "str", "required": True},
        "model": {"type": "str", "required": True},
        "api_key": {"type": "str", "no_log": True},
        "api_key_file": {"type": "path", "no_log": False},
        "probes": {"type": "list", "elements": "str", "choices": list(probes.NAMES)},
        "streams": {"type": "str", "choices": ["both", "whole", "stream"], "default": "both"},
        "repeat": {"type": "int", "default": 3},
        "concurrency": {"type": "int", "default": 8},
        "timeout": {"type": "float", "default": 120.0},
        "ca_path": {"type": "path"},
        "max_tokens": {"type": "int", "default": 2048, "no_log": False},
        "retry_truncated": {"type": "bool", "default": True},
        "long_prompt_tokens": {"type": "int", "default": 8192, "no_log": False},
        "context_length": {"type": "int"},
        "router": {"type": "str", "choices": ["sglang-router", "smg", "none"], "default": "sglang-router"},
        "thinking_key": {"type": "str", "default": "thinking", "no_log": False},
        "role_ports": {"type": "dict"},
        "workers": {
            "type": "list", "elements": "dict",
            "options": {
                "name": {"type": "str", "required": True},
                "url": {"type": "str", "required": True},
                "health_path": {"type": "str", "default": "/health"},
            },
        },
        "readiness_path": {"type": "str"},
        "ready_timeout": {"type": "float", "default": 0.0},
        "direct_url": {"type": "str"},
        "journal_units": {"type": "list", "elements": "str"},
        "unit": {"type": "str", "default": "sglang-dsv4-decode"},
        "router_unit": {"type": "str", "default": "sglang-dsv4-router"},
        "reasoning_parser": {"type": "str", "default": "deepseek-v4"},
        "tool_call_parser": {"type": "str", "default": "deepseekv4"},
        "seed": {"type": "int"},
    }


def journal_reader(module):
    """The last lines of a unit's journal, nothing when it cannot be read."""
    program = module.get_bin_path("journalctl")

    def read(unit):
        if not program:
            return []
        rc, out, dummy = module.run_command([program, "-u", unit, "-n", "200", "-o", "cat", "--no-pager", "--since", "-15min"],
                                            environ_update={"LC_ALL": "C"})
        return out.splitlines() if rc == 0 else []

    return read


def main():
    module = AnsibleModule(argument_spec=argument_spec(), mutually_exclusive=[("api_key", "api_key_file")], supports_check_mode=True)
    given = dict(module.params)
    given.pop("api_key_file")
    if module.check_mode:
        checks = probes.skipped_checks(probes.Options(**given), "check_mode", "no request is sent in check mode")
        module.exit_json(changed=False, checks=checks, summary=probes.summarize(checks, requests=0, seconds=0.0, overhead=0.0))
    given["api_key"] = endpoint_key.read(module, seen=(module.params["model"], module.params["base_url"]), warn=True)
    try:
        suite = probes.Suite(probes.Options(**given), journal=journal_reader(module))
    except ValueError as exc:
        module.fail_json(msg=str(exc))
    try:
        checks = suite.run()
    except Exception as exc:
        # A fault of the module itself must not look like one of the server.
        module.fail_json(msg="chat_probe stopped on a fault of its own: %s" % exc, exception=traceback.format_exc())
    module.exit_json(changed=False, checks=checks, summary=suite.summary())


if __name__ == "__main__":
    main()
