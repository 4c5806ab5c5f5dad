# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases and units as systemd and the processes themselves have them."""

from __future__ import annotations

import json
import re

import pytest

WORKERS = ("sglang-dsv4-prefill", "sglang-dsv4-decode")
EVERY = (*WORKERS, "sglang-dsv4-router", "sglang-dsv4")


def show(host, unit, name):
    return host.check_output("systemctl show --value --property=%s %s", name, unit).strip()


@pytest.mark.parametrize("unit,most", [(unit, 3.0 if unit.endswith("router") else 5.0) for unit in EVERY])
def test_exposure(host, unit, most):
    text = host.run("systemd-analyze security --no-pager %s", unit).stdout
    assert float(re.search(r"Overall exposure level for \S+: ([\d.]+)", text).group(1)) <= most, text[-300:]


@pytest.mark.parametrize("unit", (*WORKERS, "sglang-dsv4-router"))
def test_the_process_runs_from_the_current_release_as_its_own_user(host, unit):
    pid = show(host, unit, "MainPID")
    current = host.check_output("readlink -f /opt/dsv4/current")
    assert host.check_output("readlink /proc/%s/cwd", pid) == current + "/run"
    assert host.check_output("stat -c %%U /proc/%s", pid) == "dsv4"


def hard_limit(limits, name):
    """A line of /proc/PID/limits: the hard limit as a number."""
    value = re.search(r"(?m)^%s\s+\S+\s+(\S+)" % name, limits).group(1)
    return float("inf") if value == "unlimited" else int(value)


@pytest.mark.parametrize("unit", WORKERS)
@pytest.mark.parametrize("name,wanted", [("Max locked memory", float("inf")), ("Max open files", 1048576)])
def test_svc_08_the_running_process_has_its_limits(host, unit, name, wanted):
    # A machine without CAP_SYS_RESOURCE lets nobody have more than its init has; everywhere else the unit's word counts.
    most = hard_limit(host.check_output("cat /proc/1/limits"), name)
    has = hard_limit(host.check_output("cat /proc/%s/limits", show(host, unit, "MainPID")), name)
    assert has == wanted or has == most < wanted


@pytest.mark.parametrize("unit", WORKERS)
def test_svc_10_caches_lie_in_the_units_own_folder(host, unit):
    environment = dict(line.split("=", 1) for line in host.check_output(
        "sh -c %s", "tr '\\0' '\\n' < /proc/%s/environ" % show(host, unit, "MainPID")).splitlines() if "=" in line)
    folder = environment["HOME"]
    assert folder.startswith("/var/cache/dsv4/%s/" % unit.rsplit("-", 1)[1])
    assert environment["TRITON_CACHE_DIR"].startswith(folder)
    assert host.file(folder).user == "dsv4" and host.file(folder).mode == 0o750


def test_the_release_is_complete_by_its_manifest(host):
    manifest = json.loads(host.file("/opt/dsv4/current/manifest.json").content_string)
    assert len(manifest["files"]) > 10
    for name, entry in manifest["files"].items():
        assert host.file("/opt/dsv4/current/" + name).sha256sum == entry["sha256"], name
    for name, target in manifest["links"].items():
        assert host.file("/opt/dsv4/current/" + name).linked_to == target
    for unit in EVERY:
        installed = host.file("/etc/systemd/system/%s.service" % unit)
        assert installed.sha256sum == manifest["files"]["units/%s.service" % unit]["sha256"]
        assert not installed.is_symlink


def test_old_releases_are_pruned(host):
    assert len(host.file("/opt/dsv4/releases").listdir()) <= 4


def test_keys_would_lie_where_only_root_reads(host):
    folder = host.file("/etc/dsv4/credentials")
    assert folder.mode == 0o700 and folder.user == "root"
    assert host.file("/etc/dsv4").mode == 0o700


def test_only_the_router_leaves_the_loopback_interface(host):
    listeners = host.check_output("ss -Hltn").splitlines()
    addresses = {}
    for line in listeners:
        address, port = line.split()[3].rsplit(":", 1)
        addresses.setdefault(int(port), set()).add(address)
    plan = json.loads(host.file("/opt/dsv4/current/plan.json").content_string)
    for listener in plan["listeners"]:
        if listener["what"] in ("http", "bootstrap", "router metrics") and listener["port"] != plan["endpoint"]["port"]:
            assert addresses.get(listener["port"], {"127.0.0.1"}) <= {"127.0.0.1"}, listener
    assert plan["endpoint"]["port"] in addresses


def test_the_return_point_is_closed(host):
    assert json.loads(host.file("/var/lib/dsv4/return-point.json").content_string)["open"] is False
