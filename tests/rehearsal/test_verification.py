# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""verify.yml on a rehearsal host that serves: it changes nothing, and finds what we break.

Needs a deployed host: ``make rehearse``, then ``REHEARSAL_VERIFY=1 pytest tests/rehearsal``.
REHEARSAL_NAME and REHEARSAL_SSH_PORT choose another host, REHEARSAL_EXTRA gives ansible-playbook more arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "blackwell-dsv4"
NAME = os.environ.get("REHEARSAL_NAME", "rehearsal")
TRIO = "sglang-dsv4-prefill sglang-dsv4-decode sglang-dsv4-router"

ASKED = os.environ.get("REHEARSAL_VERIFY") == "1"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ASKED, reason="needs a rehearsal host that serves: REHEARSAL_VERIFY=1")]

# Files with mode, owner, size and time, units, sockets of the host's own processes, packages. Left out: the journal, what a login
# writes, and the log in which the stand-in commands note that they were called.
STATE = r"""
export LC_ALL=C
find / -xdev \( -path /proc -o -path /sys -o -path /var/log/journal -o -path /root/.ansible -o -path /tmp \) -prune -o -type f \
  ! -path /var/log/rehearsal-calls.log ! -path '/run/systemd/*' -printf '%p %m %U:%G %s %T@\n' | sort
find /run /dev/shm -xdev -type f ! -path '/run/systemd/*' ! -path '/run/motd*' ! -path '/run/log/*' -printf '%p %m %U:%G %s %T@\n' | sort
find / -xdev \( -path /proc -o -path /sys -o -path /root/.ansible -o -path /tmp -o -path /run \) -prune \
  -o \( -type d -o -type l \) -printf '%p %m %U:%G %l\n' | sort
find /etc /opt/dsv4/releases /var/lib/dsv4 -xdev -type f ! -path '*/venvs/*' -exec sha256sum {} + | sort
systemctl show 'sglang*' -p Id,ActiveState,SubState,MainPID,NRestarts,UnitFileState,InvocationID,ActiveEnterTimestampMonotonic
systemctl list-unit-files --no-pager --no-legend | sort
ss -ltnpH | grep users: | sed 's/fd=[0-9]*//' | sort
dpkg-query -W | sort
ps -eo pid,lstart,args | grep -E 'sglang|smg' | grep -v grep | sort
"""


def host(command, check=True):
    config = CACHE / "ssh" / (NAME + ".config")
    alias = re.search(r"(?m)^Host (\S+)", config.read_text(encoding="utf-8")).group(1)
    done = subprocess.run(["ssh", "-F", str(config), alias, "bash -s"], input=command, text=True, capture_output=True, check=False, timeout=300)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def verify(tmp_path, **variables):
    """(exit status, output, the report as JSON) of verify.yml."""
    variables.setdefault("verification_report_dir", str(tmp_path / "reports"))
    argv = [str(pathlib.Path(sys.executable).parent / "ansible-playbook"), "verify.yml", "-i", "inventory/rehearsal", "-e", json.dumps(variables)]
    argv += shlex.split(os.environ.get("REHEARSAL_EXTRA", ""))
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False, timeout=600)
    found = sorted((tmp_path / "reports").glob("*/*/verification.json"))
    return done.returncode, done.stdout + done.stderr, json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def checks(report):
    return dict((c["id"], c) for c in report["checks"])


def wait_healthy(*units):
    ask_port = "systemctl show -p ExecStart --value $u | grep -o -- '--port [0-9]*' | head -1 | cut -d' ' -f2"
    ports = host("for u in %s; do %s; done" % (" ".join(units), ask_port)).split()
    ask_health = "curl -s -o /dev/null -m 5 -w '%{http_code} ' http://127.0.0.1:$p/health || true"
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if host("for p in %s; do %s; done" % (" ".join(ports), ask_health)).split() == ["200"] * len(ports):
            return
        time.sleep(1)
    raise AssertionError("%s did not get healthy" % (units,))


def restore_pair():
    host("systemctl disable --now sglang-dsv4 2>/dev/null; systemctl reset-failed 'sglang*' 2>/dev/null; systemctl enable %s 2>/dev/null; "
         "systemctl start sglang-dsv4-prefill sglang-dsv4-decode; systemctl start sglang-dsv4-router" % TRIO, check=False)
    wait_healthy("sglang-dsv4-prefill", "sglang-dsv4-decode", "sglang-dsv4-router")
    time.sleep(3)


@contextlib.contextmanager
def without_flags(unit, *flags):
    """The unit with these flags taken out of its command line, by a drop-in that does not outlive the test."""
    line = re.search(r"(?m)^ExecStart=(.*)$", host("sed -e ':a' -e '/\\\\$/N; s/\\\\\\n//; ta' /etc/systemd/system/%s.service" % unit)).group(1)
    for flag in flags:
        assert flag in line
        line = re.sub(re.escape(flag) + r"\s+\S+", "", line)
    folder = "/run/systemd/system/%s.service.d" % unit
    host("mkdir -p %s; cat > %s/test.conf <<'END'\n[Service]\nExecStart=\nExecStart=%s\nEND\n" % (folder, folder, line)
         + "systemctl daemon-reload; systemctl restart %s" % unit)
    wait_healthy(unit)
    try:
        yield
    finally:
        host("rm -rf %s; systemctl daemon-reload; systemctl restart %s" % (folder, unit))
        restore_pair()


def test_it_passes_within_its_time_and_changes_nothing(tmp_path):
    before = host(STATE)
    status, output, report = verify(tmp_path)
    after = host(STATE)
    assert status == 0, output[-4000:]
    assert "changed=0" in output
    assert report["status"] == "pass", report["message"]
    assert after == before, "\n".join(sorted(set(before.splitlines()) ^ set(after.splitlines())))
    probes = report["parts"]["probes"]
    topology = sum(c["seconds"] for c in report["checks"] if c["group"] == "topology")
    print("probes %.1f s, topology %.1f s, overhead at most %.0f ms a probe" % (probes["seconds"], topology, probes["overhead_most"] * 1000))
    assert probes["seconds"] + topology < 20 and probes["overhead_most"] < 0.05
    assert sorted(p.name for p in pathlib.Path(report["report_dir"]).iterdir()) == ["index.html", "junit.xml", "verification.json"]


def test_check_mode_asks_nothing(tmp_path):
    before = host("journalctl -u sglang-dsv4-router --no-pager -o cat | wc -l")
    argv_env = os.environ.get("REHEARSAL_EXTRA", "")
    os.environ["REHEARSAL_EXTRA"] = argv_env + " --check"
    try:
        status, output, report = verify(tmp_path)
    finally:
        os.environ["REHEARSAL_EXTRA"] = argv_env
    assert status == 0 and "checks skipped: " in output and report is None
    assert host("journalctl -u sglang-dsv4-router --no-pager -o cat | wc -l") == before


@pytest.mark.parametrize(("flag", "probe", "reason"), [
    ("--reasoning-parser", "thinking.whole", "no_reasoning"),
    ("--tool-call-parser", "tools.stream", "tool_markup_in_content"),
])
def test_a_parser_flag_that_is_missing_is_named(tmp_path, flag, probe, reason):
    with without_flags("sglang-dsv4-decode", flag):
        status, output, report = verify(tmp_path)
    found = checks(report)
    assert status != 0 and report["status"] == "fail"
    assert found[probe]["reason"] == reason, found[probe]
    assert found["server.decode"]["reason"] == "server_differs" and flag in found["server.decode"]["hint"]
    assert flag in found[probe]["hint"] and "sglang-dsv4-decode" in found[probe]["hint"]
    assert flag in output


def test_the_fallback_where_the_pair_should_serve(tmp_path):
    host("systemctl disable --now %s; systemctl enable --now sglang-dsv4" % TRIO)
    try:
        wait_healthy("sglang-dsv4")
        status, output, report = verify(tmp_path)
        found = checks(report)
        assert status != 0 and found["mode"]["reason"] == "pd_collapsed" and "pd_collapsed" in output
        status, output, report = verify(tmp_path, verification_mode="single")
        assert status == 0, output[-3000:]
        assert checks(report)["unit.router"]["status"] == "pass" and report["mode"] == "single"
    finally:
        restore_pair()
    status, output, report = verify(tmp_path, verification_mode="single", verification_probes=["models"])
    assert status != 0 and checks(report)["mode"]["reason"] == "pair_still_active"


def test_a_server_without_schedulers(tmp_path):
    """PD-10 on a real unit: active, healthy, and dead inside."""
    pids = host("systemctl show -p ControlGroup --value sglang-dsv4-decode | xargs -I{} cat /sys/fs/cgroup{}/cgroup.procs").split()
    host("for p in %s; do grep -aq '^sglang::scheduler' /proc/$p/cmdline && kill -STOP $p; done; true" % " ".join(pids))
    try:
        port = host("systemctl show -p ExecStart --value sglang-dsv4-decode | grep -o -- '--port [0-9]*' | head -1 | cut -d' ' -f2").strip()
        host("curl -s -X POST -H 'content-type: application/json' -d '{\"zombie\": true}' http://127.0.0.1:%s/_rehearsal/fault" % port)
        status, output, report = verify(tmp_path, verification_timeout=4, verification_probes=["models", "arithmetic", "thinking"])
        found = checks(report)
        assert status != 0 and found["process.decode"]["reason"] == "zombie_server", found["process.decode"]
        assert found["unit.decode"]["status"] == "pass" and found["health.decode"]["status"] == "pass"
        assert found["arithmetic.whole"]["reason"].startswith("timeout")
    finally:
        host("systemctl restart sglang-dsv4-decode")
        restore_pair()


def test_a_restart_in_between(tmp_path):
    """KRN-12 on real units: the decode worker dies while the probes run, systemd starts it again."""
    argv = [sys.executable, "-c", "import time; time.sleep(9)"]
    pid = host("systemctl show -p MainPID --value sglang-dsv4-decode").strip()
    killer = subprocess.Popen(["bash", "-c", "%s && ssh -F %s %s kill -9 %s" % (
        shlex.join(argv), CACHE / "ssh" / (NAME + ".config"), re.search(r"(?m)^Host (\S+)", (CACHE / "ssh" / (NAME + ".config")).read_text()).group(1), pid)])
    try:
        status, output, report = verify(tmp_path, verification_timeout=5, verification_repeat=12, verification_probes=["arithmetic", "thinking", "tools"])
    finally:
        killer.wait(60)
        restore_pair()
    found = checks(report)
    assert status != 0 and report["status"] == "fail"
    assert found["stable"]["reason"] == "restarted_during_verification" or found["unit.decode"]["reason"] in ("unit_restarting", "unit_not_active"), (
        found["stable"], found["unit.decode"])
