# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What kernel_build decides from what it found, and what it measures: the role's own variables over what its tasks register."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles/kernel_build"
TOPOLOGY = ROOT / "inventory/blackwell8/group_vars/all/topology.yml"
BUILD = "0123456789abcdef"
WANTED = ["indexer", "indexer_topk", "sparse_mla", "topk"]
# Stand for the role's own key, so that a record can be of this host, and for one that was timed here for other shapes.
SAME, OTHER_SHAPES = "same", "other shapes"


def gpus(busy=False, name="RTX PRO 6000"):
    processes = [{"pid": 7, "name": "sglang::scheduler_TP0", "used_mib": 80000}] if busy else []
    return [{"index": n, "uuid": "GPU-%d" % n, "name": name, "numa_node": n // 4, "compute_capability": "12.0",
             "processes": processes if n == 4 else []} for n in range(8)]


def record(key=SAME, state="complete", build=BUILD, **operations):
    entries = {name: {"choice": "stock", "selftest": "pass", "rows": {}, "reason": "slower"} for name in WANTED}
    for name, entry in operations.items():
        entries[name] = dict(entries[name], **entry)
    return {"schema": 1, "source_hash": build, "key": key, "state": state, "operations": entries, "details": {"seconds": 7}}


def proof(**statuses):
    entries = {name: {"status": "pass", "reason": ""} for name in WANTED}
    entries.update({name: {"status": status, "reason": "h19 length 513: 1 of 512 differ"} for name, status in statuses.items()})
    return {"schema": 1, "source_hash": BUILD, "key": SAME, "operations": entries}


OURS = {"choice": "ours", "rows": {"all": [[1, 64]]}, "reason": "faster than the engine's own in 4 of 4 shapes"}
FAILED = {"selftest": "fail", "reason": "its self-test failed: h19 length 513: 1 of 512 differ"}
NO_GPU = {"rc": 3, "stderr_lines": ["dsv4-sm120: no CUDA GPU: libcuda.so.1: cannot open shared object file"]}
UNMEASURED = "none of ours could be measured"
RAN = {"look": {"rc": 0}, "selftest": {"rc": 0}, "select": {"rc": 0}}


def case(before=None, after=None, policy="measured", busy=False, fault="", wheels=True, engine="/opt/e", kernels=None, **commands):
    return {
        "kernel_build_policy": policy, "kernel_build_engine_path": engine, "kernel_build_kernels": WANTED if kernels is None else kernels,
        "before": before, "after": after, "busy": busy, "fault": fault, "wheels": wheels, "commands": commands,
    }


# name: (what was found, kernels that serve, words of the reason of topk, words of the warning, current)
CASES = {
    "nothing measured, no GPU": (case(look=NO_GPU), [], "no CUDA GPU: libcuda.so.1", UNMEASURED, False),
    "no GPU while ours run on it": (case(look=NO_GPU, busy=True), [], "no CUDA GPU: libcuda.so.1", UNMEASURED, False),
    "measured before on this host": (case(record(topk=OURS)), ["topk"], None, "", True),
    "measured now": (case(None, record(topk=OURS, indexer=OURS), **RAN), ["indexer", "topk"], None, "", False),
    "slower everywhere": (case(None, record(), **RAN), [], "slower", "", False),
    "a wrong kernel": (case(None, record(topk=FAILED, indexer=OURS), **{**RAN, "selftest": {"rc": 1}}), ["indexer"], "h19 length 513",
                       "topk failed the self-test", False),
    # a record that says ours and fail at once is not believed
    "ours and wrong": (case(record(topk={**OURS, "selftest": "fail"})), [], "faster", "topk failed the self-test", True),
    "another driver, GPUs idle": (case(record(key="other", topk=OURS), record(), **RAN), [], "slower", "", False),
    "another driver, GPUs busy": (case(record(key="other", topk=OURS), busy=True, look={"rc": 0}), [], "the GPUs were in use", UNMEASURED, False),
    "other shapes, GPUs busy": (case(record(key=OTHER_SHAPES, topk=OURS), busy=True, look={"rc": 0}), ["topk"], None, "GPU 4 were in use", False),
    "other shapes, GPUs idle": (case(record(key=OTHER_SHAPES, topk=OURS), record(), **RAN), [], "slower", "", False),
    "other shapes, no GPU": (case(record(key=OTHER_SHAPES, topk=OURS), look=NO_GPU, busy=True), [], "no CUDA GPU", UNMEASURED, False),
    "the measurement's own task fails": (case(record(topk=OURS), fault="the measurement failed: Measure | x: y"), [], "Measure | x: y", UNMEASURED, True),
    "another build's record, GPUs busy": (case(record(key="other", build="f" * 16, topk=OURS), busy=True, look={"rc": 0}), [],
                                          "the GPUs were in use", UNMEASURED, False),
    "GPUs busy": (case(busy=True, look={"rc": 0}), [], "not measured, the GPUs were in use", UNMEASURED, False),
    "no time": (case(None, record(state="partial", topk=OURS), **{**RAN, "select": {"rc": 4}}), ["topk"], None, "kernel_build_time_limit", False),
    "no time before, GPUs busy": (case(record(state="partial", topk=OURS), busy=True, look={"rc": 0}), ["topk"], None, "kernel_build_time_limit", False),
    "the self-test's command fails": (case(look={"rc": 0}, selftest={"rc": 2, "stderr_lines": []}), [], "the self-test gave no result: no answer",
                                      UNMEASURED, False),
    "the self-test does not end": (case(look={"rc": 0}, selftest={"rc": 124, "stderr_lines": ["selftest topk: pass"]}), [],
                                   "the self-test gave no result: it did not end in time", UNMEASURED, False),
    "the selection's command fails": (case(record(state="partial", topk=OURS), record(state="partial", topk=OURS),
                                           **{**RAN, "select": {"rc": 1, "stderr_lines": ["dsv4-sm120: no space left"]}}), [],
                                      "the selection gave no result: no space left", UNMEASURED, False),
    "the build fails": (case(fault="the build failed: nvcc", wheels=False), [], "the build failed: nvcc", UNMEASURED, False),
    "no engine": (case(engine=""), [], "not known", UNMEASURED, False),
    "stock": (case(record(topk=OURS), policy="stock"), [], "kernel_build_policy says so", "", None),
    "ours": (case(None, proof(), policy="ours", **RAN), WANTED, None, "", False),
    "ours, proved before": (case(proof(), policy="ours"), WANTED, None, "", True),
    "ours, one wrong": (
        case(None, proof(topk="fail"), policy="ours", **RAN), ["indexer", "indexer_topk", "sparse_mla"], "h19 length 513", "topk failed", False),
    "ours, no GPU": (case(policy="ours", look=NO_GPU), WANTED, None, "ours serve unproved: no CUDA GPU", False),
    "nobody asks for any": (case(kernels=[]), [], None, "", None),
}  # fmt: skip


SOURCES = [ROOT / "inventory/blackwell8/group_vars/all/dsv4.yml", TOPOLOGY, ROLE / "defaults/main.yml", ROLE / "vars/main.yml"]


# Apart from this process, whose other tests import the collection as a plain package: then Ansible no longer finds its filters.
TEMPLATER = """
import json, sys
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar, trust_as_template
collections, role_path, *sources = sys.argv[1:]
init_plugin_loader([collections])
loader = DataLoader()
known = {"role_path": role_path, "ansible_check_mode": False, "ansible_search_path": [role_path]}
for path in sources:
    known.update(loader.load_from_file(path, trusted_as_template=True))
for line in sys.stdin:
    expression, registered = json.loads(line)
    value = Templar(loader, variables={**known, **registered}).template(trust_as_template("{{ %s }}" % expression))
    print(json.dumps(value), flush=True)
"""


@pytest.fixture(scope="module")
def role():
    """The role's variables as its tasks would see them, over what the tasks registered: fn(expression, registered)."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = subprocess.Popen(
        [sys.executable, "-c", TEMPLATER, str(ROOT / ".collections"), str(ROLE), *map(str, SOURCES)], text=True,
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def value(expression, known):
        program.stdin.write(json.dumps([expression, known]) + "\n")
        program.stdin.flush()
        return json.loads(program.stdout.readline())

    yield value
    program.stdin.close()
    assert program.wait(timeout=30) == 0


def registered(role, given):
    """What the role's tasks would have registered in a case."""
    found = {name: value for name, value in given.items() if name.startswith("kernel_build_")}
    found.update({"__kernel_build_%s" % name: value for name, value in given["commands"].items()})
    found["__kernel_build_name"] = {"stdout": BUILD}
    found["__kernel_build_found"] = {"stat": {"exists": given["wheels"]}}
    found["__kernel_build_fault"] = given["fault"]
    found["__kernel_build_wheels"] = {"files": [{"path": "/k/x.whl"}] if given["wheels"] else []}
    found["__kernel_build_gpu_info"] = {"gpus": gpus(given["busy"]), "driver": {"loaded_version": "580.95.05"}}
    for name in ("__kernel_build_instances", "__kernel_build_key"):
        found[name] = role(name, found)
    found["__kernel_build_before"] = found["__kernel_build_after"] = {}
    for name in ("before", "after"):
        if given[name]:
            document = dict(given[name])
            keys = {SAME: found["__kernel_build_key"], OTHER_SHAPES: role("__kernel_build_place", found) + "-0123456789abcdef"}
            document["key"] = keys.get(document["key"], document["key"])
            found["__kernel_build_%s" % name] = document
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_decision(role, name):
    given, serving, reason, warning, current = CASES[name]
    known = registered(role, given)
    applied, stock, kept = (role("__kernel_build_%s" % what, known) for what in ("applied", "stock", "kept"))
    assert applied == serving
    assert set(stock) == set(given["kernel_build_kernels"]) - set(serving)
    if reason is not None:
        assert reason in stock["topk"]
    found = role("__kernel_build_warning", known)
    assert (warning in found) if warning else found == ""
    if serving and given["kernel_build_policy"] == "measured":
        assert kept["operations"]["topk"]
    if current is not None:
        assert role("__kernel_build_current", known) is current


def test_a_reason_does_not_follow_who_uses_the_gpus(role):
    """It is part of the release: on a host that cannot run them a second run must find the same."""
    idle, busy = (registered(role, CASES[name][0]) for name in ("nothing measured, no GPU", "no GPU while ours run on it"))
    assert role("__kernel_build_stock", idle) == role("__kernel_build_stock", busy)


def fresh(role):
    """What is registered before anything was worked out from the topology, which a test may change."""
    found = {name: value for name, value in registered(role, case()).items() if name not in ("__kernel_build_instances", "__kernel_build_key")}
    return found | {"kernel_build_topology": yaml.safe_load(TOPOLOGY.read_text(encoding="utf-8"))["dsv4_topology"]}


PLACE = {
    "driver": lambda known: known["__kernel_build_gpu_info"]["driver"].update(loaded_version="580.126.09"),
    "another GPU": lambda known: known["__kernel_build_gpu_info"]["gpus"][3].update(uuid="GPU-new"),
    "another model": lambda known: [gpu.update(name="RTX 9000") for gpu in known["__kernel_build_gpu_info"]["gpus"]],
    "engine": lambda known: known.update(kernel_build_engine_path="/opt/other"),
    "build": lambda known: known.update(__kernel_build_name={"stdout": "f" * 16}),
}
SHAPES = {
    "context": lambda known: known["kernel_build_topology"].update(context_length=65536),
    "batch": lambda known: known["kernel_build_topology"]["instances"]["decode"].update(cuda_graph_max_bs_decode=32),
    "heads": lambda known: known["kernel_build_topology"]["instances"]["decode"].update(gpus=[4, 5]),
    "speculation": lambda known: known["kernel_build_topology"].update(speculation="mtp"),
    "kernels": lambda known: known.update(kernel_build_kernels=["topk"]),
}
NO_CHANGES = {
    "who uses the GPUs": lambda known: known["__kernel_build_gpu_info"].update(gpus=gpus(busy=True)),
    "a port": lambda known: known["kernel_build_topology"]["instances"]["decode"].update(port=30005),
    "memory": lambda known: known["kernel_build_topology"]["instances"]["decode"].update(mem_fraction_static=0.8),
}


@pytest.mark.parametrize("name", [*PLACE, *SHAPES, *NO_CHANGES])
def test_what_asks_for_a_new_measurement(role, name):
    changed = fresh(role)
    {**PLACE, **SHAPES, **NO_CHANGES}[name](changed)
    key, place = ([role("__kernel_build_" + what, known) for known in (fresh(role), changed)] for what in ("key", "place"))
    assert (key[0] != key[1]) is (name not in NO_CHANGES)
    assert (place[0] != place[1]) is (name in PLACE)


def test_the_deployments_shapes(role):
    known = fresh(role)
    known["kernel_build_topology"]["speculation"] = "mtp"
    document = json.loads(role("__kernel_build_deployment", known))
    assert document == {"schema": 1, "context_length": 524288, "instances": {
        "decode": {"heads": 16, "max_batch": 64, "rows_per_request": 4, "kernels": document["instances"]["decode"]["kernels"]}}}
    assert set(document["instances"]["decode"]["kernels"]) == set(WANTED)
    environment = role("__kernel_build_environment", known)
    assert environment["PYTHONPATH"] == "/opt/dsv4/kernels/%s/site" % BUILD and environment["CUDA_VISIBLE_DEVICES"] == "GPU-4"
    assert environment["HOME"].startswith("/opt/dsv4/kernels/cache/")


def test_the_package_reads_what_the_role_writes(role, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "files/kernels/src"))
    contests = importlib.import_module("dsv4_sm120.contests")
    found = contests.deployment(json.loads(role("__kernel_build_deployment", registered(role, case()))))
    assert (found.heads, found.rows, found.context_length) == ((16,), (1, 4, 16, 64), 524288)
    assert set(found.operations) == set(WANTED)


def test_check_mode_gives_the_reason_of_a_real_run_unless_that_would_measure(role):
    """Another reason is another release, which a check would announce and a run would not make."""
    for name in ("nothing measured, no GPU", "no GPU while ours run on it", "GPUs busy"):
        known = registered(role, CASES[name][0])
        assert role("__kernel_build_stock", {**known, "ansible_check_mode": True}) == role("__kernel_build_stock", known), name
    dry = {**registered(role, case(look={"rc": 0})), "ansible_check_mode": True}
    assert role("__kernel_build_stock", dry)["topk"] == "nothing was measured on this host with this build"
