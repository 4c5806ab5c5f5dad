# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils import driver, driver_packages, driver_return_point
from ansible_collections.blackwell.dsv4.plugins.module_utils.driver_packages import Apt, Problem, Wanted, decide

FAMILY = [
    "nvidia-*-[0-9][0-9][0-9]",
    "nvidia-*-[0-9][0-9][0-9]-open",
    "nvidia-open-[0-9][0-9][0-9]",
    "nvidia-firmware-[0-9]*",
    "libnvidia-*-[0-9][0-9][0-9]",
    "cuda-drivers*",
]
KERNEL = "6.8.0-90-generic"


def question(**more):
    return driver.Question(**{"family": FAMILY, "hold": FAMILY, **more})


def dpkg(*lines):
    return "".join(f"{line}\n" for line in lines)


def healthy(host, version="580.95.05", held=True):
    """A host whose driver is right."""
    host.eight_gpus().loaded(version).modinfo(version)
    host.write(f"boot/vmlinuz-{KERNEL}", "").write("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=LABEL=ROOT quiet\n")
    letters = "hi" if held else "ii"
    host.answer(
        "dpkg-query",
        dpkg(f"{letters}  nvidia-dkms-580-open {version}-0ubuntu1", f"{letters}  libnvidia-compute-580:amd64 {version}-0ubuntu1"),
    )
    host.answer("dkms status", f"nvidia/{version}, {KERNEL}, x86_64: installed\n")
    return host


def ids(state):
    return [item["id"] for item in state["findings"]]


# -- cases: the state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "licence, flavour",
    [pytest.param("NVIDIA", "proprietary", id="DRV-01-host-a"), pytest.param("Dual MIT/GPL", "open", id="DRV-01-host-b")],
)
def test_the_flavour_is_told_by_licence_and_not_by_version(licence, flavour, host, outcome):
    healthy(host).loaded("580.95.05", flavour).modinfo("580.95.05", licence)
    state = driver.state(host, question())
    assert state["installed_version"] == "580.95.05" and state["installed_flavour"] == flavour
    wrong = [item for item in state["findings"] if item["id"] == "driver_wrong_flavour"]
    assert bool(wrong) == (flavour == "proprietary")
    if wrong:
        assert "open kernel module required on Blackwell; found proprietary" in wrong[0]["what"] and wrong[0]["severity"] == "error"
        assert "dkms" not in ids(state) and driver.dkms_problem(state).endswith("needs the open one")
    outcome("error driver_wrong_flavour" if flavour == "proprietary" else "accepted", wrong[0] if wrong else "accepted")


@pytest.mark.parametrize("package", [pytest.param("nvidia-dkms-580", id="DRV-01")])
def test_a_proprietary_package_is_enough_before_any_module_is_loaded(package, host, outcome):
    host.eight_gpus().answer("dpkg-query", dpkg(f"ii  {package} 580.95.05-0ubuntu1 amd64 NVIDIA DKMS package"))
    wrong = [item for item in driver.state(host, question())["findings"] if item["id"] == "driver_wrong_flavour"]
    assert wrong and package in wrong[0]["what"]
    outcome("error driver_wrong_flavour", wrong[0])


DRV_02 = """iF  nvidia-dkms-580-open    580.119.02-0ubuntu0.24.04.1  amd64  NVIDIA DKMS package (open kernel module)
iU  nvidia-driver-580-open  580.119.02-0ubuntu0.24.04.1  amd64  NVIDIA driver (open) metapackage
ii  nvidia-utils-580        580.119.02-0ubuntu0.24.04.1  amd64  NVIDIA driver support binaries
"""


@pytest.mark.parametrize("listing", [pytest.param(DRV_02, id="DRV-02")])
def test_half_configured_packages_are_named_and_the_running_kernel_is_not_called_dead(listing, host, outcome):
    packages = driver.parse_dpkg(listing)
    assert [(entry["name"], entry["state"]) for entry in packages] == [
        ("nvidia-dkms-580-open", "half_configured"),
        ("nvidia-driver-580-open", "unpacked"),
        ("nvidia-utils-580", "installed"),
    ]
    broken = driver_packages.broken_packages(packages, FAMILY)
    dkms = driver.parse_dkms("nvidia/580.119.02, 6.8.0-90-generic, x86_64: installed\nnvidia/580.119.02: added\n")
    problem = driver_packages.half_way(
        broken, dkms, "580.119.02", "/var/lib/dkms/nvidia/580.119.02/build/make.log", ["6.17.0-5-generic", KERNEL]
    )
    assert problem.ident == "driver_packages_not_configured"
    assert "nvidia-dkms-580-open (iF, half_configured)" in problem.what and "nvidia-driver-580-open (iU, unpacked)" in problem.what
    assert "nvidia-utils-580" not in problem.what and "installed" not in problem.what.split(";")[0]
    assert problem.more["kernels"] == ["6.17.0-5-generic"] and "make.log" in problem.hint
    assert "is loaded and goes on working" in problem.what
    # The plan repairs once and installs nothing on top.
    plan = decide(Wanted(["nvidia-driver-580-open", "nvidia-utils-580"], FAMILY, "580.119.02", scope=FAMILY), packages, [], {}, {})
    assert plan.broken == ["nvidia-dkms-580-open", "nvidia-driver-580-open"] and plan.install == {}
    text = "installed nvidia-dkms-580-open package post-installation script subprocess returned error exit status 10\n"
    assert driver_packages.explain_failure(text, {}).ident == "driver_packages_not_configured"
    outcome("driver_packages_not_configured", problem.ident, problem.what)


@pytest.mark.parametrize(
    "spelling, flavour",
    [
        pytest.param(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)", "open", id="DRV-04-open"
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025",
            "proprietary",
            id="DRV-04-proprietary",
        ),
    ],
)
def test_both_spellings_of_the_loaded_version(spelling, flavour):
    assert driver.parse_nvrm(spelling + "\nGCC version: x\n") == {"version": "580.95.05", "flavour": flavour}


@pytest.mark.parametrize("installed", [pytest.param("580.126.09", id="DRV-04")])
def test_a_newer_module_on_disk_is_a_reboot_and_no_reinstallation(installed, host, outcome):
    healthy(host).modinfo(installed)
    host.answer("systemctl is-active", "active\nactive\nactive\ninactive\n", code=3)
    state = driver.state(host, question(units=["sglang-dsv4-router", "sglang-dsv4-decode", "sglang-dsv4-prefill", "sglang-dsv4"]))
    assert state["reboot_required"] and state["reboot_reasons"] == ["module 580.126.09 is installed, 580.95.05 is loaded"]
    assert state["active_units"] == ["sglang-dsv4-router", "sglang-dsv4-decode", "sglang-dsv4-prefill"]
    assert (
        driver.verdict(state, ["Failed to initialize NVML: Driver/library version mismatch"], ["nvidia"] * 8, None, 8, [])["state"]
        == "reboot_required"
    )
    outcome("a reboot is due", "a reboot is due" if state["reboot_required"] else "none is", state["reboot_reasons"][0])


@pytest.mark.parametrize("loaded", [pytest.param(True, id="DRV-08")])
def test_nouveau_is_one_reboot_and_none_when_it_is_gone(loaded, host):
    healthy(host).write("proc/modules", "nouveau 1 0 - Live 0x0\n")
    (host.folder / "proc/driver/nvidia/version").unlink()
    assert driver.state(host, question())["reboot_reasons"][0] == "nouveau is loaded"
    host.loaded()
    assert driver.state(host, question())["reboot_reasons"] == []


@pytest.mark.parametrize("held", [pytest.param("nvidia-dkms-580-open", id="DRV-09")])
def test_a_sibling_that_is_not_held_is_drift(held, host, outcome):
    healthy(host).answer("dpkg-query", dpkg(f"hi  {held} 580.95.05-0ubuntu1", "ii  libnvidia-compute-580:amd64 580.95.05-0ubuntu1"))
    state = driver.state(host, question())
    drift = [item for item in state["findings"] if item["id"] == "driver_not_held"]
    assert state["not_held"] == ["libnvidia-compute-580"] and "libnvidia-compute-580" in drift[0]["what"]
    assert "driver_not_held" not in ids(driver.state(healthy(host), question()))
    outcome("warning driver_not_held", drift[0])


SECURE = [
    pytest.param(0, "SecureBoot enabled\n", False, "on", True, id="DRV-14"),
    pytest.param(0, "SecureBoot enabled\n", True, "on", False, id="DRV-14-enrolled"),
    pytest.param(0, "SecureBoot disabled\n", False, "off", False, id="DRV-14-off"),
    pytest.param(1, "EFI variables are not supported on this system\n", False, "unsupported", False, id="DRV-14-legacy"),
    pytest.param(127, "", False, "unsupported", False, id="DRV-14-no-mokutil"),
]


@pytest.mark.parametrize("code, said, enrolled, expected, stops", SECURE)
def test_secure_boot_stops_before_the_working_driver_is_touched(code, said, enrolled, expected, stops, host, outcome):
    healthy(host)
    (host.folder / "proc/driver/nvidia/version").unlink()
    if expected != "unsupported" or code == 1:
        (host.folder / "sys/firmware/efi").mkdir(parents=True)
    if code != 127:
        host.answer("mokutil --sb-state", said if code == 0 else "", code, "" if code == 0 else said)
        host.answer("mokutil --test-key", "/k.der is already enrolled\n" if enrolled else "/k.der is not enrolled\n", 1 if enrolled else 0)
    host.write("k.der", "x")
    state = driver.state(host, question(mok_certificate="/k.der"))
    assert state["secure_boot"] == expected
    found = [item for item in state["findings"] if item["id"] == "secure_boot_key"]
    assert bool(found) == stops
    if stops:
        assert (
            "enrol at console or disable" in found[0]["what"]
            and "mokutil --import /k.der" in found[0]["hint"]
            and found[0]["severity"] == "error"
        )
    outcome("error secure_boot_key" if stops else "accepted", found[0] if found else "accepted")


@pytest.mark.parametrize("last, expected", [("\x01", "on"), ("\x00", "off"), (None, "unknown")])
def test_secure_boot_is_read_without_mokutil(last, expected, host):
    (host.folder / "sys/firmware/efi").mkdir(parents=True)
    if last is not None:
        host.write("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", "\x06\x00\x00\x00" + last)
    assert driver.secure_boot(host) == expected
    assert ("secure_boot_unknown" in ids(driver.state(healthy(host), question()))) is (expected == "unknown")


def test_without_a_key_the_steps_say_how_to_make_one():
    assert "openssl req" in driver.mok_steps("") and "console" in driver.mok_steps("")


@pytest.mark.parametrize(
    "grub, running, mode, due",
    [
        pytest.param('GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=pt"\n', "quiet", ("pt", "default"), True, id="FAB-14"),
        pytest.param('GRUB_CMDLINE_LINUX_DEFAULT="quiet xiommu=pt"\n', "quiet", ("default", "default"), True, id="FAB-14-inside-a-word"),
        pytest.param(
            'GRUB_CMDLINE_LINUX_DEFAULT="quiet amd_iommu=off"\n', "quiet amd_iommu=off", ("off", "off"), True, id="FAB-14-amd-off"
        ),
        pytest.param('GRUB_CMDLINE_LINUX="intel_iommu=off"\n', "intel_iommu=off", ("off", "off"), True, id="FAB-14-intel-off"),
        pytest.param('GRUB_CMDLINE_LINUX_DEFAULT="iommu=pt"\n', "iommu=pt", ("pt", "pt"), False, id="FAB-14-done"),
    ],
)
def test_only_the_running_command_line_counts(grub, running, mode, due, host, outcome):
    healthy(host).write("etc/default/grub", grub).write("proc/cmdline", f"BOOT_IMAGE=/vmlinuz-{KERNEL} root=LABEL=ROOT {running}\n")
    for _run in range(2):  # a second look without a reboot says the same
        state = driver.state(host, question(cmdline=["iommu=pt"]))
        assert (state["iommu"]["asked_configured"], state["iommu"]["asked_running"]) == mode
        assert state["reboot_required"] is due
    given = (state["iommu"]["asked_configured"], state["iommu"]["asked_running"], state["reboot_required"])
    outcome("configured {}, running {}, reboot due: {}".format(*mode, due), "configured {}, running {}, reboot due: {}".format(*given))


def test_the_effect_on_the_devices_is_told_from_the_groups(host):
    assert driver.iommu_groups(host) == "unknown"
    (host.folder / "sys/kernel").mkdir(parents=True)
    assert driver.iommu_groups(host) == "off"
    host.write("sys/kernel/iommu_groups/1/type", "identity\n").write("sys/kernel/iommu_groups/2/type", "identity\n")
    assert driver.iommu_groups(host) == "pt"
    host.write("sys/kernel/iommu_groups/3/type", "DMA-FQ\n")
    assert driver.iommu_groups(host) == "translated"


@pytest.mark.parametrize(
    "status, good",
    [
        pytest.param("nvidia/580.95.05: added\n", False, id="ANS-04"),
        pytest.param(f"nvidia/580.95.05, {KERNEL}, x86_64: built\n", False, id="ANS-04-built"),
        pytest.param("nvidia/580.95.05, 6.8.0-40-generic, x86_64: installed\n", False, id="ANS-04-other-kernel"),
        pytest.param(f"nvidia/580.95.05, {KERNEL}, x86_64: installed\n", True, id="ANS-04-installed"),
        pytest.param(f"nvidia, 580.95.05, {KERNEL}, x86_64: installed\n", True, id="ANS-04-old-spelling"),
    ],
)
def test_added_is_not_installed_for_the_kernel_that_boots(status, good, host, outcome):
    healthy(host).answer("dkms status", status)
    if not good:
        host.answer("modinfo", code=1, err="modinfo: ERROR: Module nvidia not found.")
    state = driver.state(host, question())
    assert state["target_kernel"] == KERNEL
    assert ("driver_dkms" in ids(state)) is (not good)
    if not good:
        hint = next(item["hint"] for item in state["findings"] if item["id"] == "driver_dkms")
        assert f"linux-headers-{KERNEL}" in hint and "do not reboot" in hint
    outcome("accepted" if good else "error driver_dkms", next((item for item in state["findings"] if item["id"] == "driver_dkms"), "accepted"))


@pytest.mark.parametrize("log", [pytest.param("var/log/nvidia-installer.log", id="ANS-09")])
def test_the_run_installer_is_recognized(log, host, outcome):
    host.eight_gpus().loaded().write(log, "nvidia-installer log file\n")
    host.answer("dpkg-query", dpkg("ii  bash 5.2-1"))
    state = driver.state(host, question())
    recognized = next(item for item in state["findings"] if item["id"] == "driver_run_installer")
    assert state["run_installer"] and "remove it first" in recognized["what"]
    assert not driver.state(healthy(host), question())["run_installer"]  # a stale log beside real packages accuses nobody
    outcome("error driver_run_installer", recognized)


def test_a_newer_default_kernel_is_a_reason_to_boot(host):
    healthy(host).write("boot/vmlinuz-6.8.0-100-generic", "")
    state = driver.state(host, question())
    assert state["target_kernel"] == "6.8.0-100-generic" and "kernel 6.8.0-100-generic boots by default" in state["reboot_reasons"][-1]


@pytest.mark.parametrize(
    "grub, expected, certain",
    [
        ("GRUB_DEFAULT=0\n", "6.8.0-100-generic", True),
        ("", "6.8.0-100-generic", True),
        ('GRUB_DEFAULT="1>Ubuntu, with Linux 6.8.0-90-generic"\n', KERNEL, True),
        ("GRUB_DEFAULT=2\n", "6.8.0-100-generic", False),
    ],
)
def test_which_kernel_boots_next(grub, expected, certain, host):
    host.write("boot/vmlinuz-6.8.0-100-generic", "").write(f"boot/vmlinuz-{KERNEL}", "").write("boot/vmlinuz-6.8.0-90-generic.old", "")
    host.write("etc/default/grub", grub)
    kernel, reason = driver.target_kernel(host)
    assert kernel == expected and (reason is None) is certain


# -- cases: the packages --------------------------------------------------------------------------------------------

ORIGINS = {"https://vendor /": "NVIDIA", "http://archive noble-updates/restricted": "Ubuntu"}


def offer(*rows):
    policy = {}
    for name, version, source in rows:
        policy.setdefault(name, {"installed": None, "candidate": version, "versions": {}})["versions"].setdefault(version, []).append(
            source
        )
    return policy


VENDOR, UBUNTU = "https://vendor /", "http://archive noble-updates/restricted"
SET = ["nvidia-driver-580-open", "libnvidia-compute-580", "libnvidia-common-580"]


def both_versions():
    return offer(*[(name, f"{version}-0ubuntu1", VENDOR) for name in SET for version in ("580.95.05", "580.126.09")])


def have(version, *names):
    return [{"name": name, "version": f"{version}-0ubuntu1", "state": "installed", "letters": "ii", "wanted": "i"} for name in names]


@pytest.mark.parametrize("newer", [pytest.param("580.126.09", id="DRV-09-bump")])
def test_a_bump_releases_moves_and_holds_the_whole_set(newer, outcome):
    wanted = Wanted(SET[:1], FAMILY, newer, 580, "NVIDIA", hold=FAMILY, scope=FAMILY)
    plan = decide(wanted, have("580.95.05", *SET), list(SET), both_versions(), ORIGINS)
    assert plan.install == {name: "580.126.09-0ubuntu1" for name in SET}
    assert plan.unhold == sorted(SET) and plan.hold == sorted(SET)
    assert not decide(wanted, have(newer, *SET), list(SET), both_versions(), ORIGINS).changed
    outcome("3 released, 3 moved, 3 held", f"{len(plan.unhold)} released, {len(plan.install)} moved, {len(plan.hold)} held")


@pytest.mark.parametrize("pinned", [pytest.param("580.95.05", id="ANS-10"), pytest.param("", id="ANS-10-not-pinned")])
def test_a_newer_version_in_the_repository_moves_nothing(pinned, outcome):
    wanted = Wanted(SET[:1], FAMILY, pinned, 580, "NVIDIA", hold=FAMILY, scope=FAMILY)
    plan = decide(wanted, have("580.95.05", *SET), list(SET), both_versions(), ORIGINS)
    assert not plan.changed and plan.version == "580.95.05"
    outcome("580.95.05 stays", f"{plan.version} {'moves' if plan.changed else 'stays'}")


@pytest.mark.parametrize(
    "name, version",
    [pytest.param("nvidia-open-590", "", id="DRV-12"), pytest.param("nvidia-driver-580-open", "580.999", id="DRV-12-version")],
)
def test_what_is_not_offered_is_said_with_what_is(name, version, outcome):
    wanted = Wanted([name], FAMILY, version, None, "NVIDIA", scope=FAMILY)
    with pytest.raises(Problem) as caught:
        decide(wanted, [], [], both_versions(), ORIGINS, names=lambda: ["nvidia-open-570", "nvidia-open-575", "nvidia-settings"])
    assert caught.value.ident == "package_not_offered" and name in caught.value.what
    expected = ["nvidia-open-570", "nvidia-open-575"] if not version else ["580.126.09-0ubuntu1", "580.95.05-0ubuntu1"]
    assert caught.value.more["offered"] == expected and ", ".join(expected) in caught.value.what
    outcome("package_not_offered", caught.value.ident, caught.value.what)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "Some packages could not be installed.\nThe following packages have unmet dependencies:\n"
            " cuda-drivers : Depends: nvidia-driver-580-open (>= 580.95.05) but it is not going to be installed\n"
            "E: Unable to correct problems, you have held broken packages.\n",
            id="DRV-11",
        )
    ],
)
def test_held_broken_packages_become_the_two_origins(text, outcome):
    policy = driver.parse_policy(
        "nvidia-driver-580-open:\n  Installed: (none)\n  Candidate: 580.126.09-0ubuntu0.24.04.1\n  Version table:\n"
        "     580.126.09-0ubuntu0.24.04.1 500\n        500 http://archive noble-updates/restricted amd64 Packages\n"
        "     580.95.05-0ubuntu1 600\n        600 https://vendor / Packages\n"
    )
    problem = driver_packages.explain_failure(text, policy)
    assert problem.ident == "packages_conflict"
    assert (
        "580.126.09-0ubuntu0.24.04.1 from http://archive noble-updates/restricted" in problem.what
        and "580.95.05-0ubuntu1 from https://vendor /" in problem.what
    )
    assert len(problem.what) < 400 and "one origin" in problem.hint
    outcome("packages_conflict", problem.ident, problem.what)


def test_only_the_wanted_origin_provides_the_family():
    policy = offer(
        ("nvidia-driver-580-open", "580.95.05-0ubuntu0.24.04.2", UBUNTU), ("nvidia-driver-580-open", "580.95.05-0ubuntu1", VENDOR)
    )
    wanted = Wanted(["nvidia-driver-580-open"], FAMILY, "580.95.05", 580, "NVIDIA", scope=FAMILY)
    assert decide(wanted, [], [], policy, ORIGINS).install == {"nvidia-driver-580-open": "580.95.05-0ubuntu1"}


def test_the_proprietary_flavour_and_another_branch_go_in_the_same_run():
    wanted = Wanted(SET, FAMILY, "580.95.05", 580, "NVIDIA", hold=FAMILY, scope=FAMILY)
    present = have("580.95.05", "nvidia-dkms-580", "libnvidia-compute-580") + have("570.86.10", "libnvidia-compute-570")
    plan = decide(wanted, present, ["libnvidia-compute-570"], both_versions(), ORIGINS)
    assert plan.remove == ["libnvidia-compute-570", "nvidia-dkms-580"]
    assert set(plan.install) == {"nvidia-driver-580-open", "libnvidia-common-580"}


def test_a_rollback_restores_packages_and_holds_exactly():
    wanted = Wanted([], FAMILY, exact={name: "580.95.05-0ubuntu1" for name in SET[:2]}, keep_holds=SET[:1], scope=FAMILY)
    plan = decide(wanted, have("580.126.09", *SET), list(SET), both_versions(), ORIGINS)
    assert plan.install == {name: "580.95.05-0ubuntu1" for name in SET[:2]} and plan.remove == ["libnvidia-common-580"]
    assert plan.hold == SET[:1] and set(plan.unhold) == set(SET)
    assert not decide(wanted, have("580.95.05", *SET[:2]), SET[:1], both_versions(), ORIGINS).changed
    with pytest.raises(Problem, match="not offered any more"):
        decide(Wanted([], FAMILY, exact={"nvidia-driver-580-open": "575.1-1"}, scope=FAMILY), [], [], both_versions(), ORIGINS)


def test_nothing_to_do_is_seen_without_opening_apts_index():
    wanted = Wanted(SET[:1], FAMILY, "580.95.05", 580, "NVIDIA", hold=FAMILY, scope=FAMILY)
    assert driver_packages.satisfied(wanted, have("580.95.05", *SET))
    assert driver_packages.satisfied(wanted._replace(version=""), have("580.95.05", *SET))
    assert not driver_packages.satisfied(wanted, have("580.95.05", *SET[1:]))  # a name is missing
    assert not driver_packages.satisfied(wanted, have("580.95.05", *SET[:2]) + have("580.126.09", SET[2]))  # a sibling went ahead
    assert not driver_packages.satisfied(wanted, have("580.95.05", *SET, "nvidia-dkms-580"))  # the other flavour is there
    assert driver_packages.satisfied(wanted, have("580.95.05", *SET) + have("12.2.2", "nvidia-helper-580"))  # no driver's version at all
    assert not driver_packages.satisfied(wanted._replace(exact={SET[0]: "580.126.09-0ubuntu1"}), have("580.95.05", *SET))


@pytest.mark.parametrize(
    "name, closed",
    [("nvidia-dkms-580", True), ("nvidia-dkms-580-open", False), ("nvidia-dkms", True), ("nvidia-dkms-open", False), ("nvidia-kernel-dkms", True),
     ("nvidia-kernel-open-dkms", False), ("nvidia-dkms-580-server", True), ("nvidia-dkms-580-server-open", False), ("nvidia-kernel-common-580", False),
     ("linux-modules-nvidia-580-6.8.0-90-generic", True), ("linux-modules-nvidia-580-open-6.8.0-90-generic", False)])  # fmt: skip
def test_names_of_the_two_flavours(name, closed):
    assert bool(driver.PROPRIETARY.match(name)) is closed


def test_patterns_take_names_out_again():
    patterns = ["nvidia-*", "!nvidia-container-toolkit"]
    assert driver.in_family("nvidia-utils-580", patterns) and not driver.in_family("nvidia-container-toolkit", patterns)
    assert driver.carries_driver("580.95.05-1") and driver.carries_driver("1:580.126.09-0ubuntu1")
    assert (
        not driver.carries_driver("20220217+1") and not driver.carries_driver("12.2.140~12.2.2-2") and not driver.carries_driver("1.17.4-1")
    )


def test_the_policys_parsers_read_origins_by_source():
    releases = driver.parse_policy_releases(
        "Package files:\n 100 /var/lib/dpkg/status\n     release a=now\n 500 file:/srv/apt ./ Packages\n     release o=NVIDIA,l=NVIDIA CUDA,c=\n     origin \n"
        " 500 http://archive noble-updates/restricted amd64 Packages\n     release v=24.04,o=Ubuntu,a=noble-updates\n     origin archive\n"
    )
    assert releases == {"/var/lib/dpkg/status": "", "file:/srv/apt ./": "NVIDIA", "http://archive noble-updates/restricted": "Ubuntu"}


@pytest.mark.parametrize("limit", [pytest.param(0.4, id="ANS-02")])
def test_the_holder_of_a_lock_is_waited_for_and_then_named(limit, host, outcome):
    lock = host.folder / "var/lib/dpkg/lock-frontend"
    lock.parent.mkdir(parents=True)
    lock.touch()
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        assert driver_packages.lock_holder(str(lock)) == child.pid
        with pytest.raises(Problem) as caught:
            Apt(host, lock_timeout=limit).wait_for_locks()
        assert caught.value.ident == "apt_locked" and str(child.pid) in caught.value.what and "python" in caught.value.what
        assert child.poll() is None  # nobody was ended for it
        # One that lets go in time is only waited for.
        waited = iter([0.0, 0.1, 0.2, 0.3])

        def let_go(_seconds):
            child.terminate()
            child.wait()

        assert Apt(host, lock_timeout=90).wait_for_locks(sleep=let_go, clock=lambda: next(waited)) > 0
    finally:
        child.kill()
        child.wait()
    assert driver_packages.lock_holder(str(lock)) is None
    outcome("apt_locked", caught.value.ident, caught.value.what.replace(str(child.pid), "PID").replace(str(host.folder), "").replace(sys.executable, "python"))


def test_our_own_lock_is_nobodys(tmp_path):
    lock = tmp_path / "lock"
    with open(lock, "w", encoding="utf-8") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        assert driver_packages.lock_holder(str(lock)) is None
    assert driver_packages.lock_holder(str(tmp_path / "absent")) is None


# -- return points ----------------------------------------------------------------------------------------------------


def test_return_points_are_numbered_kept_and_not_repeated(tmp_path):
    folder = str(tmp_path / "points")
    with pytest.raises(driver_return_point.ReturnPointError, match="no return point"):
        driver_return_point.load(folder)
    assert driver_return_point.save(folder, {"packages": {"a": "1"}}, 2) == (1, True)
    assert driver_return_point.save(folder, {"packages": {"a": "1"}}, 2) == (1, False)
    assert driver_return_point.save(folder, {"packages": {"a": "2"}}, 2, write=False) == (2, True)
    assert driver_return_point.numbers(folder) == [1]
    for number in (2, 3):
        driver_return_point.save(folder, {"packages": {"a": str(number)}}, 2)
    assert driver_return_point.numbers(folder) == [2, 3]
    assert driver_return_point.load(folder)["packages"] == {"a": "3"} and driver_return_point.load(folder, 2)["number"] == 2
    with pytest.raises(driver_return_point.ReturnPointError, match="has no return point 1"):
        driver_return_point.load(folder, 1)
    assert oct(os.stat(pathlib.Path(folder) / "0003.json").st_mode & 0o777) == "0o600"
