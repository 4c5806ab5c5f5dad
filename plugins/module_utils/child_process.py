# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A child process in a session of its own, so that whatever it started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess


def start(argv, **options):
    """Start it, without an input unless one is asked for; raises OSError when it cannot be started."""
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen(argv, start_new_session=True, **options)


def end(child, signals=(signal.SIGTERM, signal.SIGKILL), patience=3.0):
    """Send each signal to the whole session until the child has ended.

    One that is stuck in the kernel survives the last signal; it is not ours to wait for.
    """
    for number in signals:
        try:
            os.killpg(child.pid, number)
        except OSError:
            pass
        try:
            child.wait(timeout=patience)
            return
        except subprocess.TimeoutExpired:
            continue
