# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils import progress_view as view


@pytest.mark.parametrize("count, text", [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (159628683809, "159.6 GB"), (5 * 10**15, "5000.0 TB")])
def test_amounts(count, text):
    assert view.amount(count) == text


@pytest.mark.parametrize("seconds, text", [(0, "0 s"), (59.9, "59 s"), (61, "1 min 01 s"), (3725, "1 h 02 min")])
def test_durations(seconds, text):
    assert view.duration(seconds) == text


def test_a_transfer_says_percent_rate_time_and_file():
    status = {
        "phase": "fetch", "percent": 42.25, "total_bytes": 159628683809, "rate": 812000000, "seconds_left": 113,
        "current": ["a.safetensors", "b.safetensors"], "troubles": {"download_stalled": 2},
    }
    assert view.transfer_line(status) == (
        "fetched 42.2 % of 159.6 GB, 812.0 MB/s, 1 min 53 s left, a.safetensors and 1 more, troubles: download_stalled x2"
    )


@pytest.mark.parametrize("phase", ["plan", "sizes", "check", "done", "fetch", "verify", None, "other"])
def test_each_phase_has_words(phase):
    assert view.transfer_line({"phase": phase})


def test_a_log_stays_short():
    now = [0.0]
    pace = view.Pace(5, lambda: now[0])
    said = []
    for second in range(21):
        now[0] = float(second)
        if pace.due("step %d" % second):
            said.append(second)
    assert said == [0, 5, 10, 15, 20]
    now[0] = 100.0
    assert not pace.due("step 20")
