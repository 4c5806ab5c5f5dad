# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pathlib

import pytest
import yaml

from ansible_collections.blackwell.dsv4.plugins.module_utils import boot_wait
from ansible_collections.blackwell.dsv4.plugins.module_utils.host_system import Result

ROLE = pathlib.Path(__file__).resolve().parents[4] / "roles/nvidia_driver"


class GoingDown:
    """A host that answers from the old boot a few times, then starts up."""

    def __init__(self, ids, states):
        self.ids, self.states, self.now = list(ids), list(states), 0.0

    def proc(self, path):
        return path

    def read(self, _path):
        value = self.ids.pop(0) if len(self.ids) > 1 else self.ids[0]
        return None if value is None else value + "\n"

    def run(self, _argv):
        return Result(0, (self.states.pop(0) if len(self.states) > 1 else self.states[0]) + "\n", "")

    def sleep(self, seconds):
        self.now += seconds

    def clock(self):
        return self.now


def wait(host, limit=60):
    return boot_wait.wait(host, "old", limit, host.sleep, host.clock)


@pytest.mark.parametrize("end", [pytest.param("running", id="ANS-05"), pytest.param("degraded", id="ANS-05-degraded")])
def test_an_answer_from_the_old_boot_is_waited_out(end, outcome):
    host = GoingDown(["old", "old", "new"], ["starting", end])
    result = wait(host)
    assert result["boot_id"] == "new" and result["system"] == end and result["looks"] == 4
    given = "waits for another boot" if result["looks"] > 2 and result["boot_id"] == "new" else "goes on"
    outcome("waits for another boot", given, f"{result['looks']} looks, then {result['system']}")


@pytest.mark.parametrize(
    "ids, states, words",
    [
        pytest.param(["old"], ["running"], "still from the boot before", id="ANS-05-never"),
        pytest.param([None, "old"], ["running"], "still from the boot before", id="ANS-05-unreadable"),
        pytest.param(["new"], ["starting"], "systemd is starting", id="ANS-05-starting"),
    ],
)
def test_the_wait_is_bounded_and_says_what_was_missing(ids, states, words):
    host = GoingDown(ids, states)
    with pytest.raises(boot_wait.NotBooted, match=words):
        wait(host, limit=10)
    assert 10 <= host.now < 14


@pytest.mark.parametrize("least", [pytest.param(1800, id="ANS-06")])
def test_the_reboots_limit_fits_a_server_with_eight_gpus(least, outcome):
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text(encoding="utf-8"))
    assert defaults["nvidia_driver_reboot_timeout"] >= least
    block = next(task for task in yaml.safe_load((ROLE / "tasks/reboot.yml").read_text(encoding="utf-8")) if "rescue" in task)
    reboot = next(task["ansible.builtin.reboot"] for task in block["block"] if "ansible.builtin.reboot" in task)
    assert "nvidia_driver_reboot_timeout" in reboot["reboot_timeout"]
    said = block["rescue"][0]["ansible.builtin.fail"]["msg"]
    assert "It may still" in said and "run this again" in said and "Nothing is installed twice" in said
    limit = defaults["nvidia_driver_reboot_timeout"]
    outcome("1800 s at least", "1800 s at least" if limit >= 1800 else "less", f"nvidia_driver_reboot_timeout: {limit}")
