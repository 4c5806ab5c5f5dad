# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role as a playbook sees it: exit status, what a rescue can tell, reports, secrets."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "plugins" / "module_utils"))

from endpoint import Endpoint, Reply  # noqa: E402
from topology_host import PLAN  # noqa: E402

KEY = "dsv4-Zq81-planted-key"
ANSIBLE = pathlib.Path(sys.executable).parent / "ansible-playbook"
pytestmark = pytest.mark.slow


def plan_for(endpoint):
    plan = json.loads(json.dumps(PLAN))
    plan["endpoint"]["url"] = endpoint.url
    for name in ("prefill", "decode"):
        plan["instances"][name]["url"] = endpoint.url
    return plan


def run(tmp_path, scenes, *arguments):
    """Plays ``scenes`` (name: variables) in one run of ansible-playbook: (output, {name: what rescue and always saw})."""
    plays = []
    for number, (name, variables) in enumerate(scenes.items()):
        given = {
            "verification_probes": ["models", "arithmetic", "thinking", "tools"], "verification_streams": "whole", "verification_timeout": 5,
            "verification_report_dir": str(tmp_path / "reports" / str(number)),
        }
        given.update(variables)
        seen = "{{ {'failed': scene_failed | default(''), 'result': verification_result | default({})} | to_json }}"
        plays.append({
            "name": name, "hosts": "host%d" % number, "gather_facts": False, "connection": "local", "vars": given, "tasks": [{
                "block": [{"import_role": {"name": "blackwell.dsv4.verification"}}],
                "rescue": [{"set_fact": {"scene_failed": "{{ ansible_failed_task.name }}: {{ ansible_failed_result.msg | default('?') }}"},
                            "tags": ["always"]}],
                "always": [{"copy": {"content": seen, "dest": str(tmp_path / ("scene%d.json" % number)), "mode": "0600"},
                            "no_log": True, "diff": False, "check_mode": False, "tags": ["always"]}],
            }],
        })
    (tmp_path / "play.yml").write_text(yaml.safe_dump(plays), encoding="utf-8")
    inventory = "".join("host%d ansible_python_interpreter=%s\n" % (n, sys.executable) for n in range(len(scenes)))
    (tmp_path / "hosts").write_text(inventory, encoding="utf-8")
    environment = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"))
    done = subprocess.run([str(ANSIBLE), "-i", str(tmp_path / "hosts"), "--tags", "verification_probes", str(tmp_path / "play.yml"), *arguments],
                          cwd=tmp_path, env=environment, text=True, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    seen = dict((name, json.loads((tmp_path / ("scene%d.json" % n)).read_text(encoding="utf-8"))) for n, name in enumerate(scenes))
    return done.stdout + done.stderr, seen


def once(status):
    """The first chat request fails, the others are right."""
    return lambda request: Reply(status, {"error": {"message": "Stream error from decode server"}}) if request["number"] == 0 else None


def chats(reply):
    return lambda request: reply(request) if request["number"] is not None else None


# name: (hook of the endpoint, more variables, does the role fail, status, words of its last word)
SCENES = {
    "good": (None, {}, False, "pass", ""),
    "flaky": (once(500), {}, False, "flaky", ""),
    "flaky and strict": (once(500), {"verification_strict": True}, True, "flaky", "server_error"),
    "inconclusive": (chats(lambda r: Reply(400, {"error": {"message": "not so"}})), {}, True, "inconclusive", "request_rejected"),
    "failing": (chats(lambda r: Endpoint.answer(r["payload"], "sum 391</think>391")), {}, True, "fail", "--reasoning-parser deepseek-v4"),
    "not enforced": (chats(lambda r: Endpoint.answer(r["payload"], "392")), {"verification_enforce": False}, False, "fail", ""),
    "still loading": (lambda r: Reply(503) if r["path"] == "/health" else None, {}, True, "inconclusive", "prefill not ready"),
}


def test_what_a_playbook_can_tell(tmp_path):
    with contextlib.ExitStack() as stack:
        scenes = {}
        for name, (hook, more, *dummy) in SCENES.items():
            scenes[name] = dict(more, verification_plan=plan_for(stack.enter_context(Endpoint(hook))))
        broken = dict(scenes["good"]["verification_plan"], instances={}, findings=[{"severity": "error", "what": "two listeners on port 30000"}])
        scenes["a plan with findings"] = {"verification_plan": broken}
        output, seen = run(tmp_path, scenes)
    for name, (hook, more, fails, status, words) in SCENES.items():
        result = seen[name]["result"]
        assert result["status"] == status, (name, result["message"])
        assert bool(seen[name]["failed"]) == fails and words in seen[name]["failed"], (name, seen[name]["failed"])
        if fails:
            assert seen[name]["failed"].startswith("Decide | Fail when the endpoint is not proved"), "only the last task fails"
    assert "two listeners on port 30000" in seen["a plan with findings"]["failed"] and seen["a plan with findings"]["result"] == {}
    assert "WARNING: flaky in mode pd" in output
    assert "FAIL    thinking.whole" in output and "pass    arithmetic.whole" in output
    report = pathlib.Path(seen["good"]["result"]["report_dir"])
    assert sorted(p.name for p in report.iterdir()) == ["index.html", "junit.xml", "verification.json"]


def test_check_mode_asks_nothing_and_writes_nothing(tmp_path):
    with Endpoint() as endpoint:
        plan = {"verification_plan": plan_for(endpoint)}
        output, seen = run(tmp_path, {"dry": plan, "the fallback is wanted": {"sglang_dsv4_mode": "single", **plan}}, "--check")
        assert endpoint.requests == []
    assert seen["dry"]["failed"] == "" and seen["dry"]["result"]["status"] == "skipped"
    assert [answer["result"]["mode"] for answer in seen.values()] == ["pd", "single"]
    assert not (tmp_path / "reports").exists()


def test_the_plan_says_where_the_key_lies(tmp_path):
    (tmp_path / "api-key").write_text(KEY + "\n", encoding="utf-8")
    with Endpoint(api_key=KEY) as endpoint:
        plan = dict(plan_for(endpoint), auth={"api_key": True, "api_key_file": str(tmp_path / "api-key")})
        output, seen = run(tmp_path, {"keyed": {"verification_plan": plan, "verification_probes": ["auth", "arithmetic"]}})
        checks = {check["id"]: check["status"] for check in seen["keyed"]["result"]["checks"]}
    assert checks["auth"] == "pass" and set(checks.values()) == {"pass"}, output
    assert KEY not in output


def test_the_key_is_in_no_output_and_no_report(tmp_path):
    hook = chats(lambda r: Reply(500, {"error": {"message": "refused %s" % r["headers"].get("Authorization")}}))
    (tmp_path / "key.yml").write_text(json.dumps({"verification_api_key": KEY}), encoding="utf-8")
    with Endpoint(hook) as endpoint:
        output, seen = run(tmp_path, {"keyed": {"verification_plan": plan_for(endpoint)}}, "-vvv", "--diff", "-e", "@%s" % (tmp_path / "key.yml"))
        assert any(r["headers"].get("Authorization") == "Bearer " + KEY for r in endpoint.requests)
    assert "server_error" in seen["keyed"]["failed"]
    assert "Zq81" not in output and "Zq81" not in json.dumps(seen)
    for path in pathlib.Path(seen["keyed"]["result"]["report_dir"]).iterdir():
        assert "Zq81" not in path.read_text(encoding="utf-8")
