# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The documentation of the topology, from which the README's table is made, has the keys that the code knows."""

from __future__ import annotations

import pathlib

import yaml

from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_plan as sp

FILTER = pathlib.Path(sp.__file__).resolve().parents[1] / "filter" / "serving_plan.yml"
TOPOLOGY = yaml.safe_load(FILTER.read_text(encoding="utf-8"))["DOCUMENTATION"]["options"]["_input"]["suboptions"]
INSTANCE = TOPOLOGY["instances"]["suboptions"]


def test_the_keys_are_those_that_are_accepted():
    assert set(TOPOLOGY) == sp.TOPOLOGY_KEYS
    assert set(INSTANCE) == sp.INSTANCE_KEYS


def test_the_choices_are_those_that_are_accepted():
    assert set(TOPOLOGY["transfer_backend"]["choices"]) == set(sp.TRANSFER_BACKENDS)
    assert set(TOPOLOGY["speculation"]["choices"]) == set(sp.SPECULATIONS)
    assert set(INSTANCE["mode"]["choices"]) == set(sp.MODES)
    assert set(INSTANCE["kernels"]["choices"]) == set(sp.KERNELS)


def test_what_is_required_is_refused_when_it_is_missing():
    """One key at a time is taken away from a topology that has no finding."""
    def instance(mode, number, **more):
        worker = {"gpus": [number], "nccl_port": 29500 + number, "mem_fraction_static": 0.8, "chunked_prefill_size": 4096, "cuda_graph_max_bs_decode": 8}
        return {"mode": mode, "host": "127.0.0.1", "port": 30000 + number, **({} if mode == "router" else worker), **more}

    topology = {
        "served_model_name": "m", "context_length": 8192, "transfer_backend": "mooncake_tcp", "gpu_count": 3, "reasoning_parser": "deepseek-v4",
        "tool_call_parser": "deepseekv4", "instances": {
            "a": instance("prefill", 0, bootstrap_port=8998), "b": instance("decode", 1), "c": instance("single", 2),
            "d": instance("router", 3, metrics_port=29000)},
    }  # fmt: skip

    def errors(changed):
        return [finding for finding in sp.serving_plan(changed)["findings"] if finding["severity"] == "error"]

    def without(mapping, key):
        return {name: value for name, value in mapping.items() if name != key}

    assert errors(topology) == []
    for key, option in TOPOLOGY.items():
        assert bool(errors(without(topology, key))) == bool(option.get("required")), key
    for key, option in INSTANCE.items():
        missing = {**topology["instances"], "b": without(topology["instances"]["b"], key)}
        refused = bool(errors({**topology, "instances": missing}))
        assert refused == bool(option.get("required") or "very server of the model needs" in option["description"]), key
