# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""chat_probe and topology_check as Ansible runs them, and the action that reports."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "module_utils"))

from endpoint import Endpoint, Reply  # noqa: E402
from test_probe_cases import run_module  # noqa: E402
from topology_host import PLAN  # noqa: E402

from ansible_collections.blackwell.dsv4.plugins.action.verification_report import ActionModule  # noqa: E402
from ansible_collections.blackwell.dsv4.plugins.module_utils import probes  # noqa: E402
from ansible_collections.blackwell.dsv4.plugins.modules import chat_probe, topology_check, verification_report  # noqa: E402

KEY = "dsv4-Zq81-planted-key"


@pytest.mark.parametrize("module", [chat_probe, topology_check, verification_report])
def test_the_documentation_is_whole(module):
    document = yaml.safe_load(module.DOCUMENTATION)
    returned = yaml.safe_load(module.RETURN)
    assert yaml.safe_load(module.EXAMPLES)

    def options(found):
        for name, option in found.items():
            assert option.get("type") and option.get("description"), name
            options(option.get("suboptions", {}))

    def values(found):
        for name, value in found.items():
            assert value.get("type") and value.get("description"), name
            assert "sample" in value or "contains" in value, name
            values(value.get("contains", {}))

    options(document["options"])
    values(returned)
    if hasattr(module, "argument_spec"):
        spec = module.argument_spec()
        assert set(spec) == set(document["options"])
        for name, option in document["options"].items():
            assert spec[name].get("default") == option.get("default"), name
            assert spec[name]["type"] == option["type"], name
            assert spec[name].get("choices") == option.get("choices"), name


def test_what_is_returned_is_documented():
    contains = yaml.safe_load(chat_probe.RETURN)["checks"]["contains"]
    assert set(probes.Check("x", "pass", "ok")) == set(contains)
    with Endpoint() as endpoint:
        result = run_module("chat_probe", {"base_url": endpoint.url, "model": "deepseek-v4-flash", "probes": ["models"]})
    assert set(result["summary"]) == set(yaml.safe_load(chat_probe.RETURN)["summary"]["contains"])


def test_check_mode_sends_nothing_and_lists_the_same_checks():
    with Endpoint() as endpoint:
        arguments = {"base_url": endpoint.url, "model": "deepseek-v4-flash", "context_length": 20000}
        dry = run_module("chat_probe", dict(arguments, _ansible_check_mode=True))
        assert endpoint.requests == []
        wet = run_module("chat_probe", arguments)
    assert [c["id"] for c in dry["checks"]] == [c["id"] for c in wet["checks"]]
    assert set(c["status"] for c in dry["checks"]) == {"skipped"} and dry["checks"][0]["reason"] == "check_mode"
    assert dry["summary"]["status"] == "skipped" and dry["changed"] is False
    assert wet["summary"]["status"] == "pass" and wet["changed"] is False


def test_topology_in_check_mode_is_skipped_whatever_the_host_is():
    dry = run_module("topology_check", {"plan": PLAN, "_ansible_check_mode": True})
    assert set(c["status"] for c in dry["checks"]) == {"skipped"} and dry["snapshot"] == {"units": {}, "counters": {}}


def test_topology_on_a_machine_that_is_nothing_of_the_plan_fails_and_does_not_stop():
    plan = json.loads(json.dumps(PLAN))
    for instance in plan["instances"].values():
        instance.update(url="http://127.0.0.1:9")
    plan["endpoint"]["url"] = "http://127.0.0.1:9"
    result = run_module("topology_check", {"plan": plan, "settle_seconds": 0})
    found = dict((c["id"], c) for c in result["checks"])
    assert result["summary"]["status"] == "fail"
    assert found["router.workers"]["reason"] == "router_workers_unreadable"
    assert found["health.decode"]["reason"] == "unhealthy"


@pytest.mark.parametrize("arguments", [{"plan": {}}, {"plan": {"instances": {}, "modes": {}, "endpoint": {}}}])
def test_a_plan_that_is_none_is_refused_with_a_sentence(arguments):
    assert "no result of the filter serving_plan" in run_module("topology_check", arguments)["msg"]


def test_a_base_url_that_is_none_is_refused_with_a_sentence():
    assert "base_url must be" in run_module("chat_probe", {"base_url": "127.0.0.1:30001", "model": "m"})["msg"]


def test_the_key_from_a_file_is_used_and_not_shown(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY + "\n", encoding="utf-8")
    with Endpoint(api_key=KEY) as endpoint:
        result = run_module("chat_probe", {"base_url": endpoint.url, "model": "deepseek-v4-flash", "api_key_file": str(path),
                                           "probes": ["auth", "arithmetic"], "streams": "whole"})
        assert endpoint.requests[-1]["headers"]["Authorization"] == "Bearer " + KEY
    assert [c["status"] for c in result["checks"]] == ["pass"] * 3, result
    assert KEY not in json.dumps(result)


@pytest.mark.parametrize(("served", "given", "identity", "status", "reason"), [
    (KEY, "dsv4-another-key-1", "arithmetic.whole", "fail", "unauthorized"),
    (KEY, None, "arithmetic.whole", "inconclusive", "key_missing"),
    (None, KEY, "auth", "fail", "auth_open"),
])
def test_keys_that_do_not_fit(served, given, identity, status, reason):
    with Endpoint(api_key=served) as endpoint:
        arguments = {"base_url": endpoint.url, "model": "deepseek-v4-flash", "probes": ["auth", "arithmetic"], "streams": "whole", "repeat": 1}
        if given:
            arguments["api_key"] = given
        checks = dict((c["id"], c) for c in run_module("chat_probe", arguments)["checks"])
    assert (checks[identity]["status"], checks[identity]["reason"]) == (status, reason)


def test_an_answer_in_drips_is_bounded_by_the_limit():
    def drip(request):
        return Reply(body=b": wait\n\n" * 200, kind="text/event-stream", chunked=True, pause=0.05) if request["number"] is not None else None

    with Endpoint(drip) as endpoint:
        result = run_module("chat_probe", {"base_url": endpoint.url, "model": "deepseek-v4-flash", "probes": ["arithmetic"],
                                           "streams": "stream", "timeout": 0.7})
    assert result["checks"][-1]["reason"] == "timeout" and result["checks"][-1]["seconds"] < 3


def test_reports_are_pruned_by_age_and_nothing_else_is_touched(tmp_path):
    names = ["20260101T000000Z", "20260101T000000Z-2", "20260101T000000Z-10", "20260102T000000Z", "20260103T000000Z"]
    for name in names + ["notes", "20260101T000000Z.part", "FINDINGS.md"]:
        os.mkdir(tmp_path / name)
    ActionModule._prune(str(tmp_path), 3)
    left = {"20260101T000000Z-10", "20260102T000000Z", "20260103T000000Z", "notes", "20260101T000000Z.part", "FINDINGS.md"}
    assert set(os.listdir(tmp_path)) == left
    ActionModule._prune(str(tmp_path), 0)
    assert len(os.listdir(tmp_path)) == 6
