# SPDX-License-Identifier: GPL-3.0-or-later
"""The host after site, verify, rollback and site again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REPORTS = Path(__file__).resolve().parents[3] / "reports/rehearsal"
PAIR = ("sglang-dsv4-prefill", "sglang-dsv4-decode", "sglang-dsv4-router")
FALLBACK = "sglang-dsv4"


def journal(host, unit):
    return host.run("journalctl --no-pager --lines=40 --unit=%s", unit).stdout


@pytest.mark.parametrize("unit", PAIR)
def test_unit_serves_and_starts_at_boot(host, unit):
    service = host.service(unit)
    assert service.is_running, journal(host, unit)
    assert service.is_enabled


def test_fallback_is_installed_but_off(host):
    service = host.service(FALLBACK)
    assert service.exists
    assert not service.is_running
    assert not service.is_enabled
    assert host.run("systemctl is-failed %s", FALLBACK).stdout.strip() == "inactive"


def test_no_unit_failed(host):
    failed = host.check_output("systemctl list-units --failed --plain --no-legend")
    assert failed == "", failed


@pytest.mark.parametrize("unit", (*PAIR, FALLBACK))
def test_unit_file_is_sound(host, unit):
    checked = host.run("systemd-analyze verify --man=no /etc/systemd/system/%s.service", unit)
    assert checked.rc == 0 and unit not in checked.stderr, checked.stderr


@pytest.mark.parametrize("unit", ("sglang-dsv4-prefill", "sglang-dsv4-decode", FALLBACK))
def test_engine_unit_may_lock_memory_and_restarts(host, unit):
    shown = dict(line.split("=", 1) for line in host.check_output(
        "systemctl show --property=LimitMEMLOCK,Restart,RestartUSec,TimeoutStartUSec %s", unit).splitlines())
    assert shown["Restart"] == "always"
    assert shown["RestartUSec"] == "15s"
    assert shown["LimitMEMLOCK"] in ("infinity", "8388608")  # a machine that may not raise limits cuts it down


def test_router_has_one_prefill_and_one_decode(get, topology):
    status, answer = get(f"http://127.0.0.1:{topology['instances']['router']['port']}/workers")
    assert status == 200
    kinds = sorted(worker["worker_type"] for worker in answer["workers"])
    assert kinds == ["decode", "prefill"]
    assert all(worker["is_healthy"] for worker in answer["workers"])


@pytest.mark.parametrize("instance", ("prefill", "decode"))
def test_worker_listens_on_loopback_only(host, topology, instance):
    port = topology["instances"][instance]["port"]
    assert host.socket(f"tcp://127.0.0.1:{port}").is_listening
    listeners = host.check_output("ss --no-header --listening --tcp --numeric 'sport = :%s'", str(port))
    assert "0.0.0.0:" not in listeners.replace("0.0.0.0:*", "") and "*:" + str(port) not in listeners


def test_release_is_current_and_units_run_its_real_path(host):
    current = host.check_output("readlink --canonicalize /opt/dsv4/current")
    assert current.startswith("/opt/dsv4/releases/")
    for unit in PAIR:
        pid = host.check_output("systemctl show --property=MainPID --value %s", unit)
        program = host.check_output("systemctl show --property=ExecStart --value %s", unit)
        assert int(pid) > 0 and current in program


def test_no_kernel_or_package_is_left_half_done(host):
    assert host.check_output("dpkg --audit") == ""
    assert "installed" in host.check_output("dkms status")


def test_driver_packages_are_held(host):
    held = host.check_output("apt-mark showhold").split()
    assert any(name.startswith("nvidia-") for name in held)


def test_findings(host):
    findings = host.file("/var/lib/dsv4/FINDINGS.md")
    assert findings.exists
    text = findings.content_string
    for word in ("128821", "128822", "--reasoning-parser", "deepseek-v4", "--tool-call-parser", "deepseekv4", "30000", "30001", "30002", "thinking"):
        assert word in text, word


def test_secrets_are_not_readable(host):
    for name in host.check_output("find /etc/dsv4 -type f").splitlines():
        assert host.file(name).mode & 0o077 == 0, name
    assert host.file("/etc/dsv4").mode == 0o700


@pytest.mark.parametrize("path", ("/etc", "/usr", "/var", "/opt", "/srv", "/usr/local", "/var/lib", "/etc/systemd/system"))
def test_permissions_of_system_folders_did_not_change(host, path):
    folder = host.file(path)
    assert (folder.user, folder.group, oct(folder.mode)) == ("root", "root", "0o755")


def test_last_verification_went_through_both_halves():
    newest = max(REPORTS.glob("*/verification.json"), key=lambda path: path.stat().st_mtime)
    found = json.loads(newest.read_text())
    assert found["ok"] and found["mode"] == "pd"
    status = {check["id"]: check["status"] for check in found["checks"]}
    for check in ("arithmetic.whole", "thinking.whole", "tools.whole", "arithmetic.stream", "thinking.stream", "tools.stream",
                  "router.workers", "counters.prefill", "counters.decode"):
        assert status[check] == "pass", check


def test_controller_has_a_copy_of_the_findings(host):
    assert (REPORTS / "FINDINGS.md").read_text() == host.file("/var/lib/dsv4/FINDINGS.md").content_string


def test_the_benchmark_is_kept_with_its_release_and_linked(host):
    folder = host.check_output("ls -t -d /var/lib/dsv4/benchmarks/*-pd").splitlines()[0]
    record = json.loads(host.file(f"{folder}/benchmark.json").content_string)
    assert folder.endswith(f"/{record['release']}-pd") and record["rehearsal"] and record["engine_version"].endswith("+rehearsal")
    assert record["cells"] and not any(cell["gaps"] for cell in record["cells"])
    for cell in record["cells"]:
        assert all(cell["figures"][name]["median"] > 0 for name in ("ttft_ms", "itl_ms", "output_tokens_per_s"))
        # The engine counted what was sent: the prompt asked for, and a few tokens of the chat template.
        assert 0 <= cell["figures"]["input_tokens"]["median"] - cell["input_tokens"] < 16 + cell["input_tokens"] / 10
        assert cell["figures"]["output_tokens"]["median"] == cell["output_tokens"]
    findings = host.file("/var/lib/dsv4/FINDINGS.md").content_string
    for name in ("index.html", "benchmark.json", "ttft.svg", "itl.svg", "throughput.svg"):
        place = f"{Path(folder).name}/{name}"
        assert f"(benchmarks/{place})" in findings
        assert (REPORTS / "benchmarks" / place).read_text() == host.file(f"/var/lib/dsv4/benchmarks/{place}").content_string
