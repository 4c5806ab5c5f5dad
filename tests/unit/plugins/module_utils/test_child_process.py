# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a child started ends with it, also when it does not want to."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from ansible_collections.blackwell.dsv4.plugins.module_utils import child_process


def alive(pid):
    """Runs, and is not only waiting to be collected."""
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii") as stream:
            return stream.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def started(script):
    """A shell that starts a child, and that child's pid."""
    child = child_process.start(["sh", "-c", script], stdout=subprocess.PIPE)
    return child, int(child.stdout.readline())


def test_the_whole_session_ends():
    child, grandchild = started("sleep 60 & echo $!; wait")
    child_process.end(child)
    child.stdout.close()
    assert child.returncode == -signal.SIGTERM
    time.sleep(0.1)
    assert not alive(grandchild)


def test_a_deaf_child_is_killed_after_the_patience():
    child, grandchild = started("trap '' TERM; (trap '' TERM; sleep 60) & echo $!; sleep 60")
    before = time.monotonic()
    child_process.end(child, patience=0.3)
    child.stdout.close()
    assert 0.3 <= time.monotonic() - before < 3 and child.returncode == -signal.SIGKILL
    time.sleep(0.1)
    assert not alive(grandchild)


def test_a_child_that_ended_is_no_error():
    child = child_process.start(["true"])
    child.wait()
    child_process.end(child)
    assert child.returncode == 0


def test_there_is_no_input_and_a_session_of_its_own():
    child = child_process.start(["sh", "-c", "cat; ps -o sid= -p $$"], stdout=subprocess.PIPE)
    out = child.communicate()[0]
    assert int(out) == child.pid != os.getsid(0)
