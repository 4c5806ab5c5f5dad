# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Driver cases on a real systemd host that is booted for them: real apt, real SSH, real reboots, stand-ins for what needs a GPU.

    PYTHONPATH=.collections pytest tests/host        (as root; some twenty minutes on two cores)

The tests build on each other: one host lives through all of them, from bare to rolled back. It is a host of its own
(REHEARSAL_NAME, REHEARSAL_SSH_PORT) beside that of `make rehearse`, and no service is started on it. REHEARSAL_KEEP=1 leaves it
behind, REHEARSAL_KEEP=reuse goes on with one that was left.
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
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOST = [sys.executable, str(ROOT / "molecule/rehearsal_host/host.py")]
A, B, NEXT_BRANCH = "580.95.05", "580.126.09", "590.48.01"
KERNEL = "6.12.57+deb13-amd64"

pytestmark = pytest.mark.slow


class Run:
    """What ansible-playbook said."""

    def __init__(self, done, seconds):
        self.code, self.text, self.seconds = done.returncode, done.stdout + done.stderr, seconds
        # Wrapped lines of the output joined again, so that a sentence can be looked for.
        self.flat = re.sub(r"\s+", " ", self.text)
        match = re.search(r"(?m)^rehearsal\s+: ok=(\d+)\s+changed=(\d+)", done.stdout)
        self.changed = int(match.group(2)) if match else None

    def ending(self):
        """How it ended, in words."""
        return "succeeds" + (", changed=0" if self.changed == 0 else "") if self.code == 0 else "fails"

    def said(self, pattern):
        """The part of the output that a pattern finds."""
        found = re.search(pattern, self.flat)
        assert found, (pattern, self.text)
        return found.group(0)


class Host:
    def __init__(self, folder):
        self.folder = folder
        self.environment = {
            **os.environ,
            "REHEARSAL_NAME": os.environ.get("REHEARSAL_NAME", "cases"),
            "REHEARSAL_SSH_PORT": os.environ.get("REHEARSAL_SSH_PORT", "2299"),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        copies = [{"ansible.builtin.import_role": {"name": "blackwell.dsv4.preflight", "tasks_from": "gpus.yml"}}]
        plays = {
            "driver": [{"hosts": "dsv4", "gather_facts": True, "roles": ["blackwell.dsv4.nvidia_driver"]}],
            "preflight": [{"hosts": "dsv4", "gather_facts": True, "roles": ["blackwell.dsv4.preflight"]}],
            "gpus": [{"hosts": "dsv4", "gather_facts": True, "roles": ["blackwell.dsv4.nvidia_driver"], "tasks": copies}],
            "copies": [{"hosts": "dsv4", "gather_facts": False, "tasks": copies}],
            "site": [{"ansible.builtin.import_playbook": str(ROOT / "playbooks/site.yml")}],
            "rollback": [
                {
                    "hosts": "dsv4",
                    "gather_facts": True,
                    "tasks": [{"ansible.builtin.import_role": {"name": "blackwell.dsv4.nvidia_driver", "tasks_from": "rollback.yml"}}],
                }
            ],
        }
        for name, play in plays.items():
            (folder / f"{name}.yml").write_text(yaml.safe_dump(play), encoding="utf-8")

    def command(self, *argv):
        return subprocess.run([*HOST, *argv], env=self.environment, capture_output=True, text=True, check=False)

    def play(self, name, *arguments, **variables):
        began = time.monotonic()
        extra = ["-e", json.dumps(variables)] if variables else []
        done = subprocess.run(
            ["ansible-playbook", "-i", "inventory/rehearsal", str(self.folder / f"{name}.yml"), *arguments, *extra],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        run = Run(done, time.monotonic() - began)
        (self.folder / f"{name}-{int(began)}.log").write_text(run.text, encoding="utf-8")
        return run

    def module(self, name, **options):
        done = subprocess.run(
            ["ansible", "-i", "inventory/rehearsal", "dsv4_decode", "-m", f"blackwell.dsv4.{name}", "-a", json.dumps(options)],
            cwd=ROOT,
            env={**self.environment, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json", "ANSIBLE_DISPLAY_FAILED_STDERR": "false"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "=> {" in done.stdout, done.stdout + done.stderr
        return json.loads("{" + done.stdout.split("=> {", 1)[1])

    def shell(self, line):
        done = self.command("shell", line)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def packages(self):
        return self.shell(
            r"dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\n' | grep -E 'nvidia|libcuda|cuda-toolkit' | grep -v '^un' || true"
        )

    def held(self):
        return self.shell("apt-mark showhold").split()

    def kernel(self, **keys):
        """Change the machine below the host; it counts from the next boot on, the firmware's answers at once."""
        self.shell(f"echo {shlex.quote(json.dumps(keys))} > /etc/rehearsal/kernel.json")

    @contextlib.contextmanager
    def described(self, gpu=None, **keys):
        """The GPUs with other keys for a while: of the whole description, or of one GPU (its index and its keys)."""
        path = "/etc/rehearsal/gpus.json"
        before = self.shell(f"cat {path}")
        description = {**json.loads(before), **keys}
        for index, more in (gpu or {}).items():
            description["gpus"][index].update(more)
        self.shell(f"echo {shlex.quote(json.dumps(description))} > {path}")
        try:
            yield
        finally:
            self.shell(f"echo {shlex.quote(before)} > {path}")

    @contextlib.contextmanager
    def gpu_user(self, indexes):
        """A process of somebody else on some GPUs."""
        gpus = [gpu["uuid"] for gpu in json.loads(self.shell("cat /etc/rehearsal/gpus.json"))["gpus"]]
        self.shell("systemd-run --quiet --collect --unit=gpu-user sleep 600")
        pid = int(self.shell("systemctl show -P MainPID gpu-user"))
        entry = {"pid": pid, "gpus": [gpus[index] for index in indexes], "used_mib_per_gpu": 2000, "name": "train"}
        self.shell(f"mkdir -p -m 1777 /run/rehearsal/gpu-processes; echo {shlex.quote(json.dumps(entry))} > /run/rehearsal/gpu-processes/{pid}.json")
        try:
            yield pid
        finally:
            self.shell(f"systemctl stop gpu-user; rm -f /run/rehearsal/gpu-processes/{pid}.json")

    def boot_id(self):
        return self.shell("cat /proc/sys/kernel/random/boot_id").strip()

    def reboot(self):
        """As an operator does, past the role."""
        before = self.boot_id()
        self.command("shell", "systemctl reboot")
        end = time.monotonic() + 120
        while time.monotonic() < end:
            done = self.command("shell", "cat /proc/sys/kernel/random/boot_id; systemctl is-system-running --wait")
            if done.returncode == 0 and before not in done.stdout:
                return
            time.sleep(1)
        raise AssertionError("the host did not come back")


ROOTS = {"proc_root": "/run/rehearsal/root/proc", "sys_root": "/run/rehearsal/root/sys"}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    machine = Host(tmp_path_factory.mktemp("host"))
    done = machine.command("up", *([] if os.environ.get("REHEARSAL_KEEP") == "reuse" else ["--fresh"]))
    assert done.returncode == 0, done.stdout + done.stderr
    yield machine
    if not os.environ.get("REHEARSAL_KEEP"):
        machine.command("down")


def case(*ids):
    """A test that stands for these cases, as its pytest id says."""
    return pytest.mark.parametrize("cases", [pytest.param(ids, id="-and-".join(ids))])


def topology_on_other_ports():
    """Rehearsal hosts share the machine's network, and another one may serve."""
    topology = yaml.safe_load((ROOT / "inventory/rehearsal/group_vars/all/topology.yml").read_text(encoding="utf-8"))["dsv4_topology"]
    for instance in topology["instances"].values():
        instance.update({key: value + 700 for key, value in instance.items() if key.endswith("port")})
    return topology


@case("ANS-01")
def test_check_mode_on_the_bare_host_passes_and_names_what_it_would_do(cases, host, outcome):
    files = "find /etc /opt /usr/local /var/lib/dsv4 -newer /etc/hostname -type f 2>/dev/null | sort | xargs -r sha256sum"
    before, boot = host.shell(files), host.boot_id()
    run = host.play("site", "--check", "--diff", dsv4_topology=topology_on_other_ports())
    assert run.code == 0, run.text
    assert f"nvidia-kernel-open-dkms={A}-1" in run.flat and "reboot: expected" in run.flat and run.changed > 5
    assert "copies between GPUs were not tested: the driver is not usable (nouveau)" in run.flat
    assert host.packages() == "" and host.shell(files) == before and host.boot_id() == boot
    print(f"check mode on the bare host: {run.seconds:.0f} s")
    left = "as before" if host.shell(files) == before else "not as before"
    outcome("succeeds, the host is as before", f"{run.ending()}, the host is {left}", run.said("packages: install [^,]*, .{60}"))


def test_ubuntus_names_resolve_from_its_own_folder(host):
    variables = yaml.safe_load((ROOT / "roles/nvidia_driver/vars/main.yml").read_text(encoding="utf-8"))
    names = [name.replace("{{ __nvidia_driver_suffix }}", "-580") for name in variables["__nvidia_driver_distributions"]["Ubuntu"]["packages"]]
    run = host.play("driver", "--check", nvidia_driver_packages=names, nvidia_driver_repo_url="file:///srv/rehearsal/apt/ubuntu2404/x86_64")
    assert run.code == 0, run.text
    assert all(f"{name}={A}-0ubuntu1" in run.flat for name in names) and host.packages() == ""


@case("DRV-12-booted")
def test_a_package_that_is_not_offered_is_known_before_anything_changes(cases, host, outcome):
    for arguments in (["--check"], []):
        run = host.play("driver", *arguments, nvidia_driver_packages=["nvidia-open-590"])
        assert run.code != 0
        assert (
            "package nvidia-open-590 not offered by configured repositories; offered: " in run.flat
            and "nvidia-open" in run.flat.split("offered: ")[1]
        )
    assert host.packages() == "" and host.shell("ls /etc/apt/preferences.d").strip() == ""
    words = run.said("package nvidia-open-590 not offered .*?offered: [^.']*")
    outcome("fails, nothing installed", f"{run.ending()}, {'something' if host.packages() else 'nothing'} installed", words)


@case("DRV-14-booted")
def test_secure_boot_without_a_key_stops_before_anything_changes(cases, host, outcome):
    host.kernel(secure_boot=True)
    run = host.play("driver")
    assert (
        run.code != 0
        and "Secure Boot is on and no enrolled key; enrol at console or disable" in run.flat
        and "mokutil --import" in run.flat
    )
    assert host.packages() == ""
    words = run.said("Secure Boot is on and no enrolled key; enrol at console or disable: .{120}")
    outcome("fails, nothing installed", f"{run.ending()}, {'something' if host.packages() else 'nothing'} installed", words)


@case("DRV-08-booted", "DRV-14-signed")
def test_with_an_enrolled_key_the_driver_comes_up_signed_after_one_reboot(cases, host, outcome):
    host.shell("mkdir -p /var/lib/dsv4/mok; echo certificate > /var/lib/dsv4/mok/MOK.der; echo key > /var/lib/dsv4/mok/MOK.priv")
    digest = host.shell("sha256sum /var/lib/dsv4/mok/MOK.der").split()[0]
    host.kernel(secure_boot=True, enrolled_keys=[digest])
    assert "nouveau" in host.shell("cat /run/rehearsal/root/proc/modules")
    before = host.boot_id()
    run = host.play("driver", nvidia_driver_mok_certificate="/var/lib/dsv4/mok/MOK.der", nvidia_driver_mok_key="/var/lib/dsv4/mok/MOK.priv")
    assert run.code == 0, run.text
    assert host.boot_id() != before
    modules = host.shell("cat /run/rehearsal/root/proc/modules")
    assert "nvidia " in modules and "nouveau" not in modules
    assert digest in host.shell(f"cat /lib/modules/{KERNEL}/updates/dkms/nvidia.ko")
    assert host.shell("grep -c /var/lib/dsv4/mok/MOK /etc/dkms/framework.conf.d/dsv4-signing.conf").strip() == "2"
    assert host.shell("nvidia-smi -L").count("GPU-") == 8
    print(f"install and reboot: {run.seconds:.0f} s")
    boot = "another boot" if host.boot_id() != before else "the same boot"
    outcome("succeeds, another boot, 8 GPUs", f"{run.ending()}, {boot}, {host.shell('nvidia-smi -L').count('GPU-')} GPUs")


@case("ANS-10-booted", "DRV-08-again")
def test_the_second_run_changes_nothing_although_a_newer_driver_is_offered(cases, host, outcome):
    assert B in host.shell("apt-cache policy nvidia-driver-cuda")
    before, boot = host.packages(), host.boot_id()
    run = host.play("driver", nvidia_driver_mok_certificate="/var/lib/dsv4/mok/MOK.der", nvidia_driver_mok_key="/var/lib/dsv4/mok/MOK.priv")
    assert run.code == 0 and run.changed == 0, run.text
    # Not pinned in the inventory: what is installed stays.
    key = {"nvidia_driver_mok_certificate": "/var/lib/dsv4/mok/MOK.der", "nvidia_driver_mok_key": "/var/lib/dsv4/mok/MOK.priv"}
    run = host.play("driver", nvidia_driver_version="", **key)
    assert run.code == 0 and run.changed == 0, run.text
    assert host.packages() == before and host.boot_id() == boot
    print(f"second run: {run.seconds:.0f} s")
    host.kernel(secure_boot=False)
    without = host.play("driver")
    assert without.code == 0 and without.changed == 1, without.text
    assert host.shell("ls /etc/dkms/framework.conf.d/dsv4-signing.conf 2>/dev/null || true") == ""
    outcome("succeeds, changed=0", run.ending())


def test_facts_of_eight_gpus_take_less_than_a_second(host):
    facts = host.module("gpu_info", nvml_path="/opt/dsv4/tools", plan={"gpu_count": 8}, **ROOTS)
    assert facts["source"] == "nvml" and facts["counts"] == {"pci": 8, "driver": 8, "usable": 8, "plan": 8}
    assert facts["seconds"] < 1.0 and facts["driver"]["state"] == "ok" and not facts["findings"]
    print(f"facts of eight GPUs: {facts['seconds']} s")


@case("FAB-04-booted")
def test_copies_between_idle_gpus_are_compared_once_the_driver_is_there(cases, host, outcome):
    run = host.play("gpus")
    assert run.code == 0 and run.changed == 0 and "p2p_" not in run.flat, run.text
    groups = {"prefill": [0, 1, 2, 3], "decode": [4, 5, 6, 7]}
    result = host.module("preflight_gpus", nvml_path="/opt/dsv4/tools", plan={"gpu_count": 8, "groups": groups}, **ROOTS)
    assert result["p2p"]["ran"] and [pair["status"] for pair in result["p2p"]["pairs"]] == ["ok"] * 24 and result["findings"] == []
    with host.described(p2p=[{"gpus": [0, 1], "copy": "wrong_data"}]):
        foul = host.play("copies")
        assert foul.code != 0 and "copies report success and the data is wrong: 0000:03:00.0 > 0000:04:00.0" in foul.flat
        assert "sglang_dsv4_p2p to disabled" in foul.flat and "preflight_ignore: p2p_wrong_data" in foul.flat
        assert host.play("copies", preflight_ignore=["p2p_wrong_data"]).code == 0
    with host.described(p2p=[{"gpus": [4, 5], "copy": "hang"}]):
        run = host.play("copies", preflight_p2p_timeout=10)
        assert run.code != 0 and "a copy never ended: 0000:83:00.0 > 0000:84:00.0 (no end within 10 s" in run.flat
    with host.gpu_user([0, 1]):
        run = host.play("gpus")
        assert run.code == 0 and "GPUs [0, 1] are in use, so nothing is copied" in run.flat and "p2p_" not in run.flat
        # Without the driver's role before it, the module itself sees who uses them.
        assert "copies between GPUs were not tested: GPUs [0, 1] are in use by gpu-user.service" in host.play("copies").flat
    outcome("fails", foul.ending(), foul.said("copies report success and the data is wrong: [^(]*"))


@case("DRV-09-booted", "DRV-11-pin")
def test_every_package_of_the_set_is_held_and_a_lost_hold_is_drift(cases, host, outcome):
    names = {line.split()[1] for line in host.packages().splitlines()}
    assert len(names) > 10 and names == set(host.held()) and "cuda-toolkit-13-0" in names
    assert f"Candidate: {A}-1" in host.shell("apt-cache policy libnvidia-ml1")
    assert (
        float(
            host.shell(
                "python3 -c \"import subprocess, time; t = time.time(); subprocess.run(['apt-cache', 'policy'], stdout=-3); print(time.time() - t)\""
            )
        )
        < 10
    )
    host.shell("apt-mark unhold libnvidia-ml1")
    assert "not held, an upgrade may move them: libnvidia-ml1" in host.play("preflight").flat
    assert host.shell("apt-get -s -q dist-upgrade | grep -c ^Inst || true").strip() == "0"  # the pin alone keeps it where it is
    run = host.play("driver")
    assert run.code == 0 and "hold libnvidia-ml1" in run.flat and set(host.held()) == names
    outcome("all held again", "all held again" if set(host.held()) == names else "not all held", run.said("packages: hold \\S+"))


@case("ANS-02-booted")
def test_a_held_lock_is_waited_for_and_its_holder_named(cases, host, outcome):
    holder = "import fcntl, time; f = open('/var/lib/dpkg/lock-frontend', 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); time.sleep({})"
    install = {"names": ["nvidia-open"], "family": ["nvidia-open"], "version": A, "origin": "NVIDIA"}
    host.shell(f"systemd-run --quiet --collect --unit=lock-holder python3 -c {shlex.quote(holder.format(300))}; sleep 1")
    refused = host.module("driver_packages", lock_timeout=4, **install)
    assert refused["finding"]["id"] == "apt_locked" and "python3 -c import fcntl" in refused["msg"]
    assert str(refused["finding"]["pid"]) == host.shell("systemctl show -P MainPID lock-holder").strip()
    host.shell("systemctl stop lock-holder")
    host.shell(f"systemd-run --quiet --collect --unit=lock-holder python3 -c {shlex.quote(holder.format(15))}; sleep 1")
    began = time.monotonic()
    assert host.module("driver_packages", lock_timeout=120, **install)["changed"] is True
    assert time.monotonic() - began > 8
    assert host.module("driver_packages", absent=["nvidia-open"], family=["nvidia-open"])["remove"] == ["nvidia-open"]
    outcome("apt_locked", refused["finding"]["id"], re.sub(r"process \d+", "process PID", refused["msg"]))


@case("DRV-02-booted")
def test_a_module_that_does_not_build_leaves_names_and_a_host_that_works(cases, host, outcome):
    host.kernel(dkms_fails=[KERNEL])
    run = host.play("driver", nvidia_driver_version=B)
    assert run.code != 0
    for words in (
        "driver packages are not configured",
        "nvidia-kernel-open-dkms (iF, half_configured)",
        f"no module for kernel {KERNEL}",
        f"module {A} is loaded and goes on working",
        f"/var/lib/dkms/nvidia/{B}/build/make.log",
    ):
        assert words in run.flat, words
    again = host.play("driver", nvidia_driver_version=B)
    assert again.code != 0 and "driver packages are not configured" in again.flat
    log = host.shell("cat /var/log/apt/history.log")
    assert (
        log.count(f"nvidia-kernel-open-dkms:amd64 ({A}-1, {B}-1)") + log.count(f"nvidia-kernel-open-dkms:all ({A}-1, {B}-1)") <= 1
    )  # apt was not asked again
    host.kernel()
    outcome("fails", run.ending(), run.said("driver packages are not configured: .*?until the next boot"))


@case("DRV-04-booted")
def test_an_upgrade_without_a_reboot_is_reboot_required_and_nothing_else(cases, host, outcome):
    run = host.play("driver", nvidia_driver_version=B, nvidia_driver_reboot_ok=False)
    assert f"module {B} is installed, {A} is loaded" in run.flat and "Reboot it yourself and run again" in run.flat
    assert run.code != 0 and "reboot_required" in run.flat  # nothing can be served like this
    facts = host.module("gpu_info", nvml_path="/opt/dsv4/tools", **ROOTS)
    assert (
        facts["driver"]["state"] == "reboot_required"
        and facts["driver"]["loaded_version"] == A
        and facts["driver"]["installed_version"] == B
    )
    assert "mismatch" in host.command("shell", "nvidia-smi").stdout
    assert B in host.packages() and A not in host.packages()
    outcome("fails, reboot_required", f"{run.ending()}, {facts['driver']['state']}", run.said("module \\S+ is installed, \\S+ is loaded"))


@case("ANS-06-booted")
def test_a_reboot_past_the_limit_says_how_to_go_on_and_the_next_run_does(cases, host, outcome):
    before = host.packages()
    late = host.play("driver", nvidia_driver_version=B, nvidia_driver_reboot_timeout=1)
    assert late.code != 0 and "It may still" in late.flat and "Nothing is installed twice" in late.flat
    host.command("up")
    run = host.play("driver", nvidia_driver_version=B)
    assert run.code == 0, run.text
    assert "packages: install" not in run.flat and host.packages() == before
    assert host.module("gpu_info", nvml_path="/opt/dsv4/tools", **ROOTS)["driver"]["state"] == "ok"
    outcome("fails, then succeeds", f"{late.ending()}, then {run.ending().split(',')[0]}", late.said("was told to reboot and did not come back in time"))


def test_the_rollback_brings_the_former_set_back_exactly(host):
    point = json.loads(host.shell("ls /var/lib/dsv4/driver/*.json | sort | tail -1 | xargs cat"))
    plan = host.play("rollback")
    assert plan.code != 0 and "nvidia_driver_rollback_confirm=true" in plan.flat and B in host.packages()
    run = host.play("rollback", nvidia_driver_rollback_confirm=True)
    assert run.code == 0, run.text
    have = {line.split()[1]: line.split()[2] for line in host.packages().splitlines()}
    assert have == point["packages"] and set(host.held()) == set(point["held"]) and set(have.values()) == {f"{A}-1", "13.0.2-1"}
    again = host.play("rollback", nvidia_driver_rollback_confirm=True)
    assert again.code == 0 and again.changed == 0
    forward = host.play("driver")
    assert forward.code == 0 and forward.changed == 0, forward.text


def test_another_branch_and_back_leave_the_same_set(host):
    before, held = host.packages(), host.held()
    run = host.play("driver", nvidia_driver_branch=590, nvidia_driver_version=NEXT_BRANCH)
    assert run.code == 0, run.text
    have = {line.split()[1]: line.split()[2] for line in host.packages().splitlines()}
    assert {version for name, version in have.items() if name != "cuda-toolkit-13-0"} == {f"{NEXT_BRANCH}-1"}
    facts = host.module("gpu_info", nvml_path="/opt/dsv4/tools", **ROOTS)["driver"]
    assert facts["loaded_version"] == NEXT_BRANCH and facts["state"] == "ok"
    run = host.play("rollback", nvidia_driver_rollback_confirm=True)
    assert run.code == 0, run.text
    assert host.packages() == before and host.held() == held
    assert host.module("gpu_info", nvml_path="/opt/dsv4/tools", **ROOTS)["driver"]["loaded_version"] == A


@case("DRV-01-booted")
def test_the_proprietary_flavour_is_found_and_replaced(cases, host, outcome):
    host.shell("apt-mark unhold nvidia-kernel-open-dkms")
    host.shell(f"DEBIAN_FRONTEND=noninteractive apt-get install -y -q nvidia-kernel-dkms={A}-1 nvidia-kernel-open-dkms- >/dev/null")
    assert "open kernel module required on Blackwell; found proprietary" in host.play("preflight").flat
    run = host.play("driver")
    assert run.code == 0, run.text
    assert "nvidia-kernel-dkms " not in host.packages() and "nvidia-kernel-open-dkms" in host.packages()
    assert "MIT/GPL" in host.shell("modinfo nvidia")
    outcome("succeeds, open", f"{run.ending()}, {'open' if 'MIT/GPL' in host.shell('modinfo nvidia') else 'proprietary'}")


@case("FAB-14-booted")
def test_a_managed_command_line_takes_one_reboot_and_then_none(cases, host, outcome):
    before = host.boot_id()
    run = host.play("driver", nvidia_driver_manage_cmdline=True, nvidia_driver_reboot_ok=False)
    assert run.code == 0 and "the running command line lacks iommu=pt" in run.flat and host.boot_id() == before
    wanted = host.play("preflight")
    assert "iommu.configured=pt, iommu.running=translated, reboot_required=true" in wanted.flat
    again = host.play("driver", nvidia_driver_manage_cmdline=True, nvidia_driver_reboot_ok=False)
    assert again.code == 0 and again.changed == 0 and "the running command line lacks iommu=pt" in again.flat
    run = host.play("driver", nvidia_driver_manage_cmdline=True)
    assert run.code == 0 and host.boot_id() != before and "iommu=pt" in host.shell("cat /run/rehearsal/root/proc/cmdline").split()
    assert host.play("driver", nvidia_driver_manage_cmdline=True).changed == 0
    assert "iommu" not in " ".join(re.findall(r"(?:error|warning)\s+(\S+)", host.play("preflight").text))
    words = wanted.said("iommu.configured=pt, iommu.running=translated, reboot_required=true")
    outcome("succeeds, then changed=0", f"{run.ending()}, then changed={again.changed}", words)


@case("FAB-02-booted")
def test_acs_above_the_gpus_is_named_and_cleared_at_every_boot(cases, host, outcome):
    host.kernel(acs_redirect=["0000:00:03.1", "0000:02:01.0"])
    host.reboot()
    named = host.play("preflight")
    assert "ACS redirects peer traffic at 0000:00:03.1, 0000:02:01.0" in named.flat
    run = host.play("driver", nvidia_driver_manage_cmdline=True, nvidia_driver_disable_acs=True)
    assert run.code == 0 and "acs_redirect" not in host.play("preflight").flat
    host.reboot()
    gone = "still there" if "acs_redirect" in host.play("preflight").flat else "then gone"
    assert gone == "then gone"
    assert host.play("driver", nvidia_driver_manage_cmdline=True, nvidia_driver_disable_acs=True).changed == 0
    host.kernel(lspci_denied=True)
    assert "acs_unknown" in host.play("preflight").flat
    host.kernel()
    outcome("named, then gone", ("named, " if "acs_redirect" in named.flat else "") + gone, named.said("ACS redirects peer traffic at [^,]*, [0-9a-f:.]*"))


def test_a_gpu_that_the_driver_lost_is_named_and_stops_the_role(host):
    with host.described(gpu={2: {"fault": "missing"}}):
        run = host.play("driver", nvidia_driver_manage_cmdline=True, nvidia_driver_settle_timeout=10)
    assert run.code != 0 and "7 of 8 GPUs can be used" in run.flat
    assert "the GPU at 0000:53:00.0 is on the PCI bus, but the driver does not show it" in run.flat


def test_the_driver_can_be_removed_whole(host):
    run = host.play("rollback", nvidia_driver_rollback_to="removed", nvidia_driver_rollback_confirm=True)
    assert run.code == 0, run.text
    assert "nvidia-driver-cuda" not in host.packages() and host.held() == []
    assert host.shell("ls /etc/apt/preferences.d /etc/apt/sources.list.d").split() == [
        "/etc/apt/preferences.d:",
        "/etc/apt/sources.list.d:",
    ]
