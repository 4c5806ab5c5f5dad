# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role nvidia_driver refuses before it touches a host: its own task file, one made-up host a case, in one run."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jinja2
import pytest
import yaml

from ansible_collections.blackwell.dsv4.plugins.module_utils import driver

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles/nvidia_driver"
SECURE = {
    "id": "secure_boot_key",
    "severity": "error",
    "what": "Secure Boot is on and no enrolled key; enrol at console or disable",
    "hint": "run `mokutil --import /k.der`",
}


def host(state=None, plan=None, expected=True, **variables):
    """Variables of a host on which a driver is to be installed and a reboot is foreseen, but for what a case changes."""
    return {
        "__nvidia_driver_before": {
            "state": {
                "run_installer": False,
                "secure_boot": "off",
                "key_enrolled": None,
                "reboot_reasons": ["module 2 is installed, 1 is loaded"],
                "active_units": [],
                "findings": [],
                **(state or {}),
            }
        },
        "__nvidia_driver_plan": {"install": {"nvidia-utils-580": "1"}, "summary": "install nvidia-utils-580=1", **(plan or {})},
        "__nvidia_driver_reboot_expected": expected,
        "__nvidia_driver_foreign": [],
        "nvidia_driver_reboot_ok": True,
        "__nvidia_driver_local": False,
        **variables,
    }


# id -> (host, what the message must have; nothing: the host passes)
CASES = {
    "DRV-04-guard": (
        host({"active_units": ["sglang-dsv4-decode"]}, nvidia_driver_reboot_ok=None),
        ["nvidia_driver_reboot_ok", "sglang-dsv4-decode", "Nothing was changed"],
    ),
    "DRV-04-refused": (
        host({"active_units": ["sglang-dsv4-decode"]}, nvidia_driver_reboot_ok=False),
        ["sglang-dsv4-decode run on this host", "may stop"],
    ),
    "DRV-14-guard": (
        host({"secure_boot": "on", "key_enrolled": False, "findings": [SECURE]}),
        ["enrol at console or disable", "mokutil --import", "not touched"],
    ),
    "DRV-14-unknown": (host({"secure_boot": "on", "key_enrolled": None, "findings": [SECURE]}), ["enrol at console or disable", "mokutil --import"]),
    "DRV-14-guard-enrolled": (host({"secure_boot": "on", "key_enrolled": True}), []),
    "DRV-14-guard-legacy": (host({"secure_boot": "unsupported"}), []),
    "DRV-14-nothing-to-do": (
        host({"secure_boot": "on", "key_enrolled": None}, {"install": {}, "summary": "nothing to do"}, expected=False),
        [],
    ),
    "ANS-04-guard": (host(__nvidia_driver_local=True), ["local; reboot it yourself and run again", "Nothing was changed"]),
    "ANS-04-by-hand": (host(__nvidia_driver_local=True, nvidia_driver_reboot_ok=False), []),
    "ANS-04-no-reboot": (host(__nvidia_driver_local=True, expected=False), []),
    "ANS-09-guard": (host({"run_installer": True}), ["driver was installed with the .run installer; remove it first", "Nothing was changed"]),
    "ANS-09-users": (host(__nvidia_driver_foreign=[4711]), ["4711", "window", "Nothing was changed"]),
    "ANS-09-window": (host(__nvidia_driver_foreign=[4711], nvidia_driver_stop_foreign=True), []),
    "undecided": (host(nvidia_driver_reboot_ok=None), ["needs a reboot", "module 2 is installed, 1 is loaded"]),
    "undecided-and-none-due": (host(nvidia_driver_reboot_ok=None, expected=False), []),
    "text-for-a-boolean": (host(nvidia_driver_reboot_ok="yes", nvidia_driver_stop_foreign="no"), []),
}


def stopped(folder, name, hosts):
    """Message of each host that a task file of the role stopped, from one run of ansible-playbook."""
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text(encoding="utf-8"))
    common = {name: value for name, value in defaults.items() if not (isinstance(value, str) and "{{" in value)}
    inventory = {
        "all": {
            "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, **common},
            "hosts": hosts,
        }
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    play = [{"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.include_tasks": str(ROLE / "tasks" / name)}]}]
    (folder / "play.yml").write_text(yaml.safe_dump(play), encoding="utf-8")
    program = shutil.which("ansible-playbook") or str(pathlib.Path(sys.executable).with_name("ansible-playbook"))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_FORKS": "2",
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_DISPLAY_FAILED_STDERR": "false",
        "ANSIBLE_NOCOLOR": "1",
    }
    done = subprocess.run(
        [program, "-i", str(folder / "hosts.yml"), str(folder / "play.yml")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = {}
    for block in done.stdout.split("\n}\n"):
        head, found, body = block.partition(" | FAILED! => {")
        if found:
            failed[head.strip().split("\n")[-1]] = json.loads("{" + body + "\n}")["msg"]
    assert failed, done.stdout + done.stderr
    return failed


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory):
    """Message of each case that the guard stopped."""
    names = {case: case.replace("-", "_").lower() for case in CASES}
    hosts = {names[case]: variables for case, (variables, _words) in CASES.items()}
    failed = stopped(tmp_path_factory.mktemp("guard"), "guard.yml", hosts)
    return {case: failed.get(name) for case, name in names.items()}


@pytest.mark.parametrize("case", [pytest.param(case, id=case) for case in CASES])
def test_the_guard_stops_before_anything_is_touched(case, verdicts, outcome):
    _variables, words = CASES[case]
    if not words:
        assert verdicts[case] is None
    for word in words:
        assert verdicts[case] is not None and word in verdicts[case], verdicts[case]
    outcome("stops" if words else "goes on", "goes on" if verdicts[case] is None else "stops", " ".join((verdicts[case] or "").split()))


def test_a_key_that_cannot_be_fetched_says_where_else_it_may_come_from(tmp_path):
    known = {"__nvidia_driver_key_path": str(tmp_path / "key.asc"), "__nvidia_driver_key_url": "http://127.0.0.1:9/key.pub"}
    said = stopped(tmp_path, "key.yml", {"cut_off": known, "given": {**known, "nvidia_driver_repo_key": "-----BEGIN"}})
    assert list(said) == ["cut_off"], said
    for word in ("http://127.0.0.1:9/key.pub", "refused", "nvidia_driver_repo_key_file", "nvidia_driver_mirrors", "Nothing was changed"):
        assert word in said["cut_off"], said


def files_of(name):
    """The task files that a task file of the role brings in, in order."""
    tasks = yaml.safe_load((ROLE / "tasks" / name).read_text(encoding="utf-8"))
    return [task.get("ansible.builtin.import_tasks") or task.get("ansible.builtin.include_tasks", {}).get("file") for task in tasks]


def test_the_guard_comes_before_every_task_that_changes():
    order = files_of("main.yml")
    assert order[:3] == ["assert.yml", "plan.yml", "guard.yml"] and "key.yml" in files_of("plan.yml")
    changing = (
        "ansible.builtin.copy",
        "ansible.builtin.template",
        "ansible.builtin.file",
        "ansible.builtin.systemd_service",
        "ansible.builtin.apt",
        "ansible.builtin.reboot",
        "blackwell.dsv4.host_files",
    )
    for name in [*order[:3], "key.yml"]:
        for task in yaml.safe_load((ROLE / "tasks" / name).read_text(encoding="utf-8")):
            assert not set(changing) & set(task), f"{name}: {task['name']}"
            if "blackwell.dsv4.driver_packages" in task:
                assert task["check_mode"] is True


def test_dkms_is_asserted_before_the_reboot():
    order = files_of("main.yml")
    assert order.index("install.yml") < order.index("reboot.yml")
    assert files_of("install.yml")[-1] == "dkms.yml"


def test_the_pin_lets_one_version_of_one_origin_in():
    from ansible.plugins.filter.core import regex_replace
    from ansible.plugins.test.core import match

    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["regex_replace"], environment.tests["match"] = regex_replace, match
    text = environment.from_string((ROLE / "templates/nvidia.pref.j2").read_text(encoding="utf-8")).render(
        nvidia_driver_source="cuda",
        __nvidia_driver_other_origins=["Ubuntu"],
        __nvidia_driver_family=["nvidia-*", "libnvidia-*", "!nvidia-container-toolkit"],
        __nvidia_driver_version="580.95.05",
    )
    records = [
        dict(line.split(": ", 1) for line in part.splitlines() if ": " in line and line[0] != "#") for part in text.strip().split("\n\n")
    ]
    records = [record for record in records if "Package" in record]
    assert [(record["Package"], record["Pin"], record["Pin-Priority"]) for record in records] == [
        ("nvidia-container-toolkit", "version *", "500"),
        ("nvidia-* libnvidia-*", "release o=Ubuntu", "-1"),
        ("nvidia-* libnvidia-*", "version 580.95.05-*", "1001"),
    ]


def test_role_and_modules_know_one_family():
    names = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))["__nvidia_driver_family_names"]
    fixed = [name for name in names if "{{" not in name]
    assert fixed == [name for name in driver.FAMILY if name not in ("xserver-xorg-video-nvidia-*", "cuda-drivers-*")]
    assert all(
        driver.in_family(name.replace("{{ nvidia_driver_branch }}", "580"), driver.FAMILY) for name in names if not name.startswith("!")
    )


def test_the_family_has_few_globs():
    """apt tries each glob on every package name, each time that it opens its index: 50 ms a glob."""
    names = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))["__nvidia_driver_family_names"]
    assert sum(1 for name in names if set(name) & set("*?[") and not name.startswith("!")) <= 2
    assert not any(set(name) & set("*?[") for name in names if name.startswith("!"))
