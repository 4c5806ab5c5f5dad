#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: serving_benchmark
short_description: Measure latency and throughput of an endpoint under load
version_added: "0.1.0"
description:
  - Sends chat requests of given lengths in a given number of concurrent streams and measures time to first token, inter-token latency and
    tokens per second. The load comes from SGLang's own client, the compiled form of C(sglang.benchmark.serving).
  - Prompts are random and no two runs share one, so no prefix cache helps. Thinking is off and the end token is ignored, so every answer has
    the length asked for.
  - The module makes one run. The action plugin of the same name calls it for every workload, number of streams and repetition, shows each
    run as it ends, and keeps to O(time_limit).
  - It never fails because of what the endpoint does; look at RV(runs).
options:
  base_url:
    description: Address of the endpoint, without a path.
    type: str
    required: true
  model:
    description: Name of the served model.
    type: str
    required: true
  tokenizer:
    description: Folder on the target with the model's C(tokenizer.json).
    type: path
    required: true
  client:
    description: Virtual environment on the target that has the wheel of sglang. Only one extension module of it is loaded.
    type: path
    required: true
  workloads:
    description: What is sent. For each workload every number of streams is measured.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: What the figures are called by.
        type: str
        required: true
      input_tokens:
        description: Length of a prompt in tokens, before the chat template.
        type: int
        required: true
      output_tokens:
        description: Length of an answer in tokens.
        type: int
        required: true
      streams:
        description: Numbers of concurrent streams.
        type: list
        elements: int
        required: true
      rounds:
        description: Requests that each stream sends one after the other.
        type: int
        default: 1
  repeats:
    description: How often everything is measured; the spread over the repetitions is the noise.
    type: int
    default: 3
  warm_up:
    description: Run each workload once with one stream first, and forget what it gave.
    type: bool
    default: true
  seed:
    description: Makes the prompts repeatable. Leave it out, so that no prompt is in the prefix cache.
    type: int
  run_timeout:
    description: Seconds after which one run is given up. More streams of the same workload are not tried then.
    type: int
    default: 900
  time_limit:
    description: Seconds for all runs. What was not begun by then is not measured.
    type: int
    default: 7200
  api_key_file:
    description: File on the target that holds the key of the endpoint.
    type: path
  engine_url:
    description: Address of the worker that generates; it is asked for the version of the engine, and whether it still answers after a timeout.
    type: str
  run:
    description: The run to make. The action plugin sets it.
    type: dict
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
    details: Says what would be run and sends nothing.
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
seealso:
  - plugin: blackwell.dsv4.benchmark_report
    plugin_type: filter
  - module: blackwell.dsv4.chat_probe
author:
  - blackwell.dsv4 maintainers (@blackwell-dsv4)
"""

EXAMPLES = r"""
- name: Load the router
  blackwell.dsv4.serving_benchmark:
    base_url: http://127.0.0.1:30001
    model: deepseek-v4-flash
    tokenizer: /opt/dsv4/current/model
    client: /opt/dsv4/benchmark
    workloads:
      - {name: short, input_tokens: 1024, output_tokens: 256, streams: [1, 8, 64], rounds: 4}
      - {name: long, input_tokens: 100000, output_tokens: 256, streams: [1, 4]}
  register: measured
"""

RETURN = r"""
runs:
  description: One entry a run, in the order of the runs.
  returned: always
  type: list
  elements: dict
  contains:
    workload:
      description: Name of the workload.
      type: str
      sample: short
    streams:
      description: Number of concurrent streams.
      type: int
      sample: 8
    repeat:
      description: Number of the repetition, from 1; 0 is a warm-up that failed.
      type: int
      sample: 2
    status:
      description: V(ok), V(failed), V(timeout), or V(not_run) where the time or a timeout before left it out. V(planned) in check mode.
      type: str
      sample: ok
    reason:
      description: Why there are no figures.
      type: str
      sample: ""
    figures:
      description: Medians and 99th percentiles over the run's requests and tokens, milliseconds and tokens per second.
      type: dict
      sample: {"ttft_ms": 98.9, "ttft_p99_ms": 159.2, "itl_ms": 4.6, "itl_p99_ms": 5.3, "tpot_ms": 4.7, "output_tokens_per_s": 442.6}
client:
  description: Version of the client.
  returned: when a run had figures
  type: str
  sample: 0.5.23
engine_version:
  description: What the engine says its version is, empty when it does not say.
  returned: always
  type: str
  sample: 0.5.23
load:
  description: Load average of the host a core, over the minute before the first run.
  returned: always
  type: float
  sample: 0.12
seed:
  description: The seed, for a repetition with the same prompts.
  returned: always
  type: int
  sample: 1202345678
seconds:
  description: Time of all runs together.
  returned: always
  type: float
  sample: 1311.4
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import chat_client, endpoint_key
from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_benchmark as logic


def engine_version(url, key):
    """What the worker says, empty when it says nothing."""
    answer = chat_client.Client(url, api_key=key, timeout=10).get("/server_info")
    document = answer.json() if answer.status == 200 else None
    return str(document.get("version") or "") if isinstance(document, dict) else ""


def main():
    module = AnsibleModule(
        argument_spec={
            "base_url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "tokenizer": {"type": "path", "required": True},
            "client": {"type": "path", "required": True},
            "workloads": {
                "type": "list", "elements": "dict", "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "input_tokens": {"type": "int", "required": True, "no_log": False},
                    "output_tokens": {"type": "int", "required": True, "no_log": False},
                    "streams": {"type": "list", "elements": "int", "required": True},
                    "rounds": {"type": "int", "default": 1},
                },
            },
            "repeats": {"type": "int", "default": 3},
            "warm_up": {"type": "bool", "default": True},
            "seed": {"type": "int"},
            "run_timeout": {"type": "int", "default": 900},
            "time_limit": {"type": "int", "default": 7200},
            "api_key_file": {"type": "path", "no_log": False},
            "engine_url": {"type": "str"},
            "run": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    given = module.params
    key = endpoint_key.read(module, seen=(given["model"], given["base_url"]))
    run = given["run"]
    if not run:
        module.fail_json(msg="run is set by the action plugin of the same name")
    wanted = logic.request(given["base_url"], given["model"], given["tokenizer"], run, key)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    outcome = logic.measure(os.path.join(given["client"], "bin", "python"), wanted, given["run_timeout"])
    version = engine_version(given["engine_url"], key) if given["engine_url"] else ""
    if outcome["status"] == "timeout" and given["engine_url"] and not version:
        # Whoever waits for a dead half waits for minutes; nothing more is worth that.
        outcome.update(status="failed", reason="%s, and the engine no longer answers" % outcome["reason"])
    client = outcome.pop("client")
    module.exit_json(
        changed=False, runs=[dict(run, **outcome)], client=client, engine_version=version, load=round(load, 2), seed=run["seed"], seconds=0.0)


if __name__ == "__main__":
    main()
