# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host as planned passes every comparison; each way to be otherwise is found by its own name."""

from __future__ import annotations

import copy
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from topology_host import PLAN, FakeHost, the_plan  # noqa: E402

from ansible_collections.blackwell.dsv4.plugins.module_utils import topology  # noqa: E402


def run(spoil=None, mode="pd", requests=20, settle=0, served=20, plan=None):
    plan = plan or PLAN
    host = FakeHost(plan, mode)
    watch = topology.Topology(plan, mode, host, settle_seconds=settle)
    before = watch.snapshot()
    host.serve(served)
    if spoil:
        spoil(host)
    checks = watch.check(before, requests)
    assert [c["id"] for c in checks] == watch.ids()
    return dict((c["id"], c) for c in checks)


@pytest.mark.parametrize("mode", ["pd", "single"])
def test_a_host_as_planned_passes(mode):
    checks = run(mode=mode)
    assert set(c["status"] for c in checks.values()) == {"pass"}, [c for c in checks.values() if c["status"] != "pass"]


def test_ids_are_the_same_whatever_is_found():
    first = list(run())
    second = list(run(lambda h: (h.state["decode"].update(ActiveState="failed"), setattr(h, "source", None), h.infos.clear())))
    assert first == second


def fallback_serves(host):
    host.state["single"].update(ActiveState="active", SubState="running", UnitFileState="enabled")
    host.endpoint_info = dict(host.infos["decode"], disaggregation_mode="null")
    host.workers = None
    for name in ("prefill", "decode", "router"):
        host.state[name].update(ActiveState="inactive", SubState="dead", UnitFileState="disabled", MainPID="0", ControlGroup="")
        host.members[name] = []
    host.health.clear()
    host.infos.clear()
    host.counters.clear()


SPOILED = {
    "fallback serves": (fallback_serves, "mode", "pd_collapsed", "answers at"),
    "fallback runs beside the pair": (lambda h: h.state["single"].update(ActiveState="active"), "mode", "pd_collapsed", "sglang-dsv4 is active"),
    "router serves from a plain worker": (lambda h: h.workers[0].update(worker_type="regular"), "mode", "pd_collapsed", "plain worker"),
    "a half stands at the public port": (lambda h: setattr(h, "endpoint_info", {"disaggregation_mode": "decode"}), "mode", "pd_collapsed", "decode half"),
    "unit failed": (lambda h: h.state["prefill"].update(ActiveState="failed", Result="exit-code"), "unit.prefill", "unit_failed", "exit-code"),
    "unit stopped": (lambda h: h.state["prefill"].update(ActiveState="inactive"), "unit.prefill", "unit_not_active", "inactive"),
    "unit loading": (lambda h: h.state["decode"].update(ActiveState="activating", SubState="start-post"), "unit.decode", "waiting", "activating"),
    "unit in a restart loop": (lambda h: h.state["decode"].update(ActiveState="activating", SubState="auto-restart", NRestarts="35"),
                               "unit.decode", "unit_restarting", "35"),
    "unit not enabled": (lambda h: h.state["router"].update(UnitFileState="disabled"), "unit.router", "unit_not_enabled", "disabled"),
    "fallback enabled": (lambda h: h.state["single"].update(UnitFileState="enabled"), "unit.single", "unit_enabled", "enabled"),
    "fallback failed": (lambda h: h.state["single"].update(ActiveState="failed", Result="timeout"), "unit.single", "unit_failed", "timeout"),
    "fallback not installed": (lambda h: h.state["single"].update(LoadState="not-found"), "unit.single", "unit_missing", "not-found"),
    "fallback's processes live on": (lambda h: h.members["single"].append(999), "unit.single", "processes_left", "999"),
    "schedulers gone": (lambda h: h.kill_schedulers("decode"), "process.decode", "zombie_server", "no scheduler"),
    "a scheduler gone": (lambda h: h.members["decode"].pop(), "process.decode", "schedulers_missing", "3 of 4"),
    "engine unhealthy": (lambda h: h.health.update(prefill=503), "health.prefill", "unhealthy", "503"),
    "router lost a worker": (lambda h: h.workers.pop(), "router.workers", "router_worker_missing", "30002"),
    "router has a stranger": (lambda h: h.workers.append({"url": "http://198.51.100.7:30000", "worker_type": "prefill", "is_healthy": True}),
                              "router.workers", "router_worker_extra", "198.51.100.7"),
    "router mixes up kinds": (lambda h: h.workers[0].update(worker_type="decode"), "router.workers", "router_worker_kind", "planned prefill"),
    "router calls a worker sick": (lambda h: h.workers[1].update(is_healthy=False), "router.workers", "router_worker_unhealthy", "30002"),
    "router's list is closed": (lambda h: setattr(h, "workers", None), "router.workers", "router_workers_unreadable", "404"),
    "prefill never saw the probes": (lambda h: h.counters["prefill"].update(num_requests_total=10.0, prompt_tokens_total=100.0, generation_tokens_total=50.0),
                                     "counters.prefill", "counters_not_moved", "+0"),
    "half of the probes went elsewhere": (lambda h: h.counters["decode"].update(num_requests_total=20.0), "counters.decode", "counters_not_moved", "+10"),
    "counters began anew": (lambda h: h.counters["decode"].update(num_requests_total=1.0), "counters.decode", "counters_went_back", "-9"),
    "no metrics": (lambda h: h.counters.pop("decode"), "counters.decode", "counters_unreadable", "refused"),
    "context too short": (lambda h: h.infos["decode"].update(context_length=8192), "server.decode", "server_differs", "want 524288, is 8192"),
    "parser not wired": (lambda h: h.infos["decode"].update(reasoning_parser=None), "server.decode", "server_differs",
                         "reasoning_parser: want deepseek-v4, is none"),
    "speculation on": (lambda h: h.infos["decode"].update(speculative_algorithm="EAGLE"), "server.decode", "server_differs", "speculative_algorithm"),
    "experts misrouted": (lambda h: h.infos["decode"].update(moe_runner_backend="cutlass"), "server.decode", "server_differs",
                          "moe_runner_backend: want flashinfer_mxfp4, is cutlass"),
    "no server info": (lambda h: h.infos.pop("prefill"), "server.prefill", "server_info_unreadable", "refused"),
    "small KV cache": (lambda h: h.infos["decode"].update(max_total_num_tokens=400000), "kv.decode", "kv_too_small", "400000"),
    "kernels not applied": (lambda h: h.logs.update(decode=["ready"]), "kernels.decode", "kernels_unproved", "says nothing"),
    "kernels left out": (lambda h: h.logs.update(decode=["dsv4_sm120 0.1.0 build 3f2a pid 7 applied: topk; left out: indexer; chosen by x"]),
                         "kernels.decode", "kernels_differ", "applied topk"),
    "one scheduler without kernels": (lambda h: h.logs["decode"].append("dsv4_sm120 0.1.0 build 3f2a (sm_120a) pid 9 applied: nothing; left out: topk"),
                                      "kernels.decode", "kernels_differ", "applied none"),
    "kernels where none are planned": (lambda h: h.logs.update(prefill=["dsv4_sm120 0.1.0 applied: topk; left out: nothing"]),
                                       "kernels.prefill", "kernels_unplanned", "topk"),
    "on another GPU": (lambda h: h.held[4].append(h.members["prefill"][1]), "gpus.prefill", "gpus_unplanned", "GPU 4"),
    "not on its GPU": (lambda h: h.held.update({2: []}), "gpus.prefill", "gpus_not_held", "GPU 2"),
    "a stranger on its GPU": (lambda h: h.held[1].append(4242), "gpus.prefill", "foreign_process", "4242"),
    "a GPU fell off": (lambda h: h.plan["instances"]["decode"]["gpu_uuids"].__setitem__(0, "GPU-gone"), "gpus.decode", "gpu_missing", "GPU-gone"),
    "memory uneven": (lambda h: h.used.update({0: 97000, 1: 15, 2: 15, 3: 15}), "gpu_memory.prefill", "gpu_memory_uneven", "97000"),
    "memory on the other node": (lambda h: h.pages.update(dict((p, "7f0 bind:1 anon=900 N0=900\n") for p in h.members["decode"][1:])),
                                 "numa.decode", "numa_memory_elsewhere", "0.0 %"),
    "memory not bound": (lambda h: h.pages.update(dict((p, "7f0 default anon=900 N1=900\n") for p in h.members["decode"][1:])),
                         "numa.decode", "numa_not_bound", "0 of 4"),
    "listener nobody planned": (lambda h: h.listen("decode", "0.0.0.0", 45678), "listeners", "unplanned_listener", "45678"),
    "worker open to the network": (lambda h: h.listening[0].update(address="0.0.0.0"), "listeners", "listener_wrong_address", "30000"),
    "metrics open to the network": (lambda h: next(s for s in h.listening if s["port"] == 29000).update(address="::"),
                                    "listeners", "listener_wrong_address", "29000"),
    "bootstrap missing": (lambda h: h.listening.remove(next(s for s in h.listening if s["port"] == 8998)), "listeners", "listener_missing", "8998"),
    "port of a stranger": (lambda h: next(s for s in h.listening if s["port"] == 30001).update(inode="1"), "listeners", "port_of_a_stranger", "30001"),
    "Xid": (lambda h: h.xids.append({"bus_id": "0000:41:00.0", "xid": 79, "count": 1, "text": "GPU has fallen off the bus.", "remedy": "power cycle"}),
            "xid", "xid_seen", "79"),
    "restarted in between": (lambda h: h.restart("decode"), "stable", "restarted_during_verification", "main pid"),
}


@pytest.mark.parametrize("name", list(SPOILED))
def test_what_is_otherwise_is_named(name):
    spoil, identity, reason, words = SPOILED[name]
    check = run(spoil, plan=copy.deepcopy(PLAN))[identity]
    assert check["reason"] == reason, check
    assert check["status"] == ("inconclusive" if reason == "waiting" else "fail")
    assert words in check["evidence"], check
    assert check["hint"], check


def test_a_collapsed_pair_is_named_even_when_every_probe_passes():
    checks = run(fallback_serves)
    assert checks["mode"]["reason"] == "pd_collapsed"
    assert "-e verification_mode=single" in checks["mode"]["hint"]
    assert checks["unit.single"]["reason"] == "unit_active"


def test_a_host_that_is_still_loading_is_not_failed():
    """PD-03 seen from the host: decode is up, prefill loads, the router lacks it."""
    def loading(host):
        host.state["prefill"].update(ActiveState="activating", SubState="start-post")
        host.kill_schedulers("prefill")
        host.health["prefill"] = 503
        host.infos.pop("prefill")
        host.counters.pop("prefill")
        host.logs["prefill"] = []
        host.workers.pop(0)
        host.listening[:] = [s for s in host.listening if s["port"] not in (30000, 8998)]

    checks = run(loading)
    assert [c for c in checks.values() if c["status"] == "fail"] == []
    assert checks["unit.prefill"]["reason"] == checks["router.workers"]["reason"] == "waiting"
    assert checks["health.decode"]["status"] == "pass"


def test_single_mode_wants_the_trio_off():
    checks = run(lambda h: h.state["router"].update(ActiveState="active"), mode="single")
    assert (checks["mode"]["reason"], checks["unit.router"]["reason"]) == ("pair_still_active", "unit_active")
    assert run(lambda h: h.state["prefill"].update(ActiveState="failed"), mode="single")["unit.prefill"]["reason"] == "unit_failed"


def test_a_small_kv_cache_is_noted_and_not_failed():
    check = run(lambda h: h.infos["decode"].update(max_total_num_tokens=1500000))["kv.decode"]
    assert check["status"] == "pass" and "2000000" in check["notes"][0]


def test_a_journal_that_no_longer_reaches_back_proves_nothing():
    check = run(lambda h: h.logs.update(decode=[]))["kernels.decode"]
    assert (check["status"], check["reason"]) == ("skipped", "journal_rotated")


def with_record(**record):
    """The plan as a host's record of the kernels makes it."""
    plan = copy.deepcopy(PLAN)
    plan["instances"]["decode"].update(kernels=record["applied"], kernel_build=record["build"])
    plan["stock_kernels"] = [{"instance": "decode", "kernel": name, "line": "decode: %s is the engine's own: %s" % (name, why)}
                             for name, why in record["stock"].items()]
    return plan


LINE = "[2026-01-01 00:00:00 TP%d] dsv4_sm120 0.1.0+sm120a build %s (sm_120a) pid 7 applied: %s; left out: nothing; chosen by DSV4_SM120_KERNELS"


@pytest.mark.parametrize(("said", "reason", "words"), [
    ([("3f2a", "topk")] * 4, "ok", "applied: topk"),
    ([("3f2a", "topk, indexer")] * 4, "kernels_differ", "applied unasked: indexer"),
    ([("3f2a", "nothing")] * 4, "kernels_differ", "not applied: topk"),
    ([("3f2a", "indexer")] * 4, "kernels_differ", "not applied: topk; applied unasked: indexer"),
    ([("77aa", "topk")] * 4, "kernels_of_another_build", "the record is of build 3f2a, the scheduler runs 77aa"),
    ([("3f2a", "topk")] * 3 + [("77aa", "topk")], "kernels_of_another_build", "runs 77aa"),
    ([("3f2a", "topk")] * 3 + [("3f2a", "nothing")], "kernels_differ", "applied none"),
])
def test_what_the_schedulers_applied_is_held_against_the_record(said, reason, words):
    def logs(host):
        measured(host, "topk")
        host.logs["decode"] = [LINE % (rank, build, applied) for rank, (build, applied) in enumerate(said)]

    check = run(logs, plan=with_record(applied=["topk"], build="3f2a", stock={"indexer": "slower", "sparse_mla": "slower"}))["kernels.decode"]
    assert check["reason"] == reason and words in check["evidence"], check
    assert bool(check["notes"]) == (reason == "ok")


def test_kernels_on_stock_are_noted_with_their_reason_and_a_warning():
    def stock(host):
        host.state["decode"]["Environment"] = "X=1"
        host.logs["decode"] = ["ready"]

    plan = with_record(applied=[], build="3f2a", stock={"topk": "its self-test failed: h19 length 513", "indexer": "not measured"})
    check = run(stock, plan=plan)["kernels.decode"]
    assert check["status"] == "pass" and check["notes"] == [
        "decode: topk is the engine's own: its self-test failed: h19 length 513", "decode: indexer is the engine's own: not measured"]
    host = FakeHost(plan, "pd")
    stock(host)
    watch = topology.Topology(plan, "pd", host, kernel_warning="the GPUs were busy")
    checks = {check["id"]: check for check in watch.check()}
    assert checks["kernels.decode"]["notes"][-1] == "the GPUs were busy" and checks["kernels.prefill"]["notes"] == []


def measured(host, *kernels):
    host.state["decode"]["Environment"] = 'SGLANG_PLUGINS=dsv4_sm120 "X=a b" DSV4_SM120_KERNELS=%s' % ",".join(kernels)


def test_kernels_that_measurement_left_out_are_noted():
    def slower(host):
        measured(host, "topk")
        host.logs["decode"] = ["dsv4_sm120 0.1.0 build 3f2a (sm_120a) pid 7 applied: topk; left out: nothing; chosen by DSV4_SM120_KERNELS"]

    check = run(slower)["kernels.decode"]
    assert check["status"] == "pass" and check["notes"][0].endswith(": indexer, indexer_topk, sparse_mla"), check
    check = run(lambda h: (h.state["decode"].update(Environment="X=1"), h.logs.update(decode=["ready"])))["kernels.decode"]
    assert check["status"] == "pass" and check["notes"][0].endswith(": indexer, indexer_topk, sparse_mla, topk"), check
    check = run(lambda h: measured(h, "topk", "indexer"))["kernels.decode"]
    assert check["reason"] == "kernels_differ"
    check = run(lambda h: measured(h, "topk", "moe"))["kernels.decode"]
    assert check["reason"] == "kernels_unplanned" and "moe" in check["evidence"]


def test_idle_gpus_must_be_clean():
    plan = copy.deepcopy(PLAN)
    plan["instances"]["decode"].update(gpus=[4, 5], gpu_uuids=plan["instances"]["decode"]["gpu_uuids"][:2], tp_size=2)
    assert run(plan=plan)["gpus.idle"]["status"] == "pass"
    check = run(lambda h: (h.held.update({7: [31337]}), h.used.update({7: 100998})), plan=plan)["gpus.idle"]
    assert check["reason"] == "gpu_not_idle" and "31337" in check["evidence"]


def test_settle_time_counts_from_the_start_of_the_units():
    for up, settle, waited in ((5000, 120, 0), (30, 120, 90), (120, 120, 0)):
        host = FakeHost(PLAN, "pd")
        host.clock = host.started + up
        watch = topology.Topology(PLAN, "pd", host, settle_seconds=settle)
        begun = host.clock
        watch.check(watch.snapshot(), 0)
        assert host.clock - begun == waited


def test_without_systemd_the_rest_is_still_compared():
    def no_systemd(host):
        host.systemd = False

    host = FakeHost(PLAN, "pd")
    host.systemd = False
    watch = topology.Topology(PLAN, "pd", host, settle_seconds=0)
    before = watch.snapshot()
    host.serve(5)
    checks = dict((c["id"], c) for c in watch.check(before, 5))
    assert checks["unit.decode"]["reason"] == "no_systemd"
    for identity in ("mode", "router.workers", "counters.prefill", "counters.decode", "server.decode", "gpus.prefill", "gpus.decode", "process.decode"):
        assert checks[identity]["status"] == "pass", checks[identity]


def test_what_cannot_be_read_is_skipped_and_says_why():
    checks = run(lambda h: (setattr(h, "source", None), setattr(h, "listening", None), h.pages.clear()))
    for identity in ("gpus.decode", "gpu_memory.decode", "numa.decode", "listeners", "xid", "gpus.idle"):
        assert checks[identity]["status"] == "skipped" and checks[identity]["evidence"], checks[identity]


def test_counters_without_probes_or_snapshot_are_skipped():
    assert run(requests=0)["counters.decode"]["reason"] == "no_probes"
    host = FakeHost(PLAN, "pd")
    assert dict((c["id"], c) for c in topology.Topology(PLAN, "pd", host, 0).check({}, 5))["counters.decode"]["reason"] == "no_snapshot"


def test_the_key_is_in_no_evidence():
    key = "dsv4-Zq81-planted-key"
    host = FakeHost(PLAN, "pd")
    host.api_key = key
    host.logs["decode"] = ["dsv4_sm120 applied topk --api-key %s" % key]
    host.infos["decode"]["reasoning_parser"] = key
    checks = topology.Topology(PLAN, "pd", host, 0).check({}, 0)
    assert key not in repr(checks)


def test_counters_are_summed_over_labels():
    text = ('# HELP sglang:num_requests_total x\nsglang:num_requests_total{tp_rank="0"} 3.0\nsglang:num_requests_total{tp_rank="1"} 4\n'
            'sglang:prompt_tokens_total 1.5e3\nother_total 9\n')
    assert topology.parse_counters(text) == {"num_requests_total": 7.0, "prompt_tokens_total": 1500.0}


@pytest.mark.parametrize(("text", "node"), [
    ("7f bind:1 anon=5 N1=5\n", 1), ("7f default anon=5 N1=5\n", None), ("7f bind=static:0 anon=1 N0=1\n", 0), ("", None),
    ("7f bind:0 anon=5 N0=5\n7f default anon=1 N0=1\n7f default anon=1 N0=1\n", None),
])
def test_numa_maps(text, node):
    assert topology.numa_of(text, {})[0] == node


def test_addresses_of_proc_net():
    assert topology._ipv4("0100007F") == "127.0.0.1"
    assert topology._ipv6("00000000000000000000000001000000") == "::1"
    assert topology._ipv6("0000000000000000FFFF00000100007F") == "127.0.0.1"
    assert topology._ipv6("0" * 32) == "::"


# --- the draft


def speculating(mode="mtp"):
    """The plan with speculation."""
    return the_plan(speculation=mode)


def drafted(steps, generated, requests=10, log=()):
    """A host whose decode half counts this much since its start."""
    def spoil(host):
        host.counters["decode"] = {"num_requests_total": float(requests), "prompt_tokens_total": 1.0, "generation_tokens_total": float(generated),
                                   "spec_verify_calls_total": float(steps)}
        host.logs["decode"] = list(host.logs["decode"]) + list(log)
    return spoil


def speculation(spoil):
    plan = speculating()
    host = FakeHost(plan, "pd")
    spoil(host)
    return next(c for c in topology.Topology(plan, "pd", host).check() if c["id"] == "speculation.decode")


def test_only_engines_that_verify_drafts_are_asked():
    assert [i for i in run(plan=speculating()) if i.startswith("speculation.")] == ["speculation.decode"]
    assert [i for i in run(plan=speculating(), mode="single") if i.startswith("speculation.")] == ["speculation.single"]
    assert not [i for i in run() if i.startswith("speculation.")]


@pytest.mark.parametrize(("steps", "generated", "status", "reason", "words"), [
    (334, 344, "fail", "nothing_accepted", "0 of 1002 drafted tokens accepted"),
    (333, 343, "skipped", "too_few_drafts", "0 of 999"),
    (334, 345, "pass", "ok", "1 of 1002"),
    (10_000, 10_010, "fail", "nothing_accepted", "0 of 30000"),
    (10_000, 25_000, "pass", "ok", "14990 of 30000"),
    (0, 5_000, "fail", "nothing_drafted", "5000 tokens generated without"),
    (0, 10, "skipped", "too_few_drafts", "0 of 0"),
    (5, 20, "pass", "ok", "5 of 15"),
])
def test_acceptance_is_judged_by_the_counters(steps, generated, status, reason, words):
    check = speculation(drafted(steps, generated))
    assert (check["status"], check["reason"]) == (status, reason) and words in check["evidence"], check
    if reason == "nothing_accepted":
        assert "dsv4_topology.speculation: none" in check["hint"] and "files/moe_methods.json" in check["hint"]


def test_a_draft_that_went_bad_is_judged_by_what_came_last():
    plan = speculating()
    host = FakeHost(plan, "pd")
    drafted(100_000, 250_000)(host)
    watch = topology.Topology(plan, "pd", host)
    before = watch.snapshot()
    drafted(100_400, 250_410, requests=20)(host)
    check = next(c for c in watch.check(before, 10) if c["id"] == "speculation.decode")
    assert (check["reason"], check["evidence"]) == ("nothing_accepted", "0 of 1200 drafted tokens accepted since the probes began")


@pytest.mark.parametrize("line", [
    "[TP0] dsv4_sm120: nextn_moe: NaN in 1 of 40 rows of the draft so far",
    "[TP0] dsv4_sm120: nextn_moe: the draft computes NaN in 40 of its last 40 rows; ending",
])
def test_nan_in_the_draft_is_reported(line):
    check = speculation(drafted(1000, 3000, log=[line]))
    assert (check["status"], check["reason"]) == ("fail", "draft_nan") and check["evidence"] == line[6:]


def test_the_guard_s_words_are_those_that_are_looked_for():
    """Both sides of the line: what the kernel package logs, and what is read here."""
    text = (pathlib.Path(__file__).resolve().parents[4] / "files/kernels/src/dsv4_sm120/nextn_moe/guard.py").read_text(encoding="utf-8")
    said = re.findall(r'f"(NaN in \{bad\}|the draft computes NaN)', text) + re.findall(r'"(dsv4_sm120: nextn_moe: )%s', text)
    assert len(said) == 3, said
    assert all(topology.DRAFT_NAN.search("dsv4_sm120: nextn_moe: " + words) for words in said[:2])


def test_without_counters_nothing_is_claimed():
    assert speculation(lambda h: h.counters.pop("decode"))["reason"] == "counters_unreadable"
    assert speculation(lambda h: h.infos["decode"].pop("speculative_num_draft_tokens"))["reason"] == "server_info_unreadable"
