# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A pair of rehearsal engines behind each real router, and the table of what was seen."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import rehearsal_engine as support

ROUTERS = ("sglang_router", "smg")
# Without these a half waits 300 s for the other, and sglang_router lets the client wait with it.
LIMITS = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "5", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "5"}
SEEN: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return support.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session", params=ROUTERS)
def name(request):
    return request.param


@pytest.fixture(scope="session")
def setup(name, model, tmp_path_factory):
    """(router, prefill, decode), all up."""
    folder = tmp_path_factory.mktemp(name)
    processes = []
    try:
        for mode in ("prefill", "decode"):
            processes.append(support.EngineProcess(folder, model, mode, wait=False, environment=LIMITS))
        for engine in processes:
            engine.wait_ready()
        processes.append(support.RouterProcess(folder, name, *processes))
        processes[2].wait_ready()
        yield processes[2], processes[0], processes[1]
    finally:
        for process in reversed(processes):
            process.stop()


@pytest.fixture
def seen(name, request):
    """Note a row of the table: seen("kept")."""
    def note(text):
        SEEN.setdefault(request.node.originalname.removeprefix("test_"), {})[name] = text

    return note


def pytest_terminal_summary(terminalreporter):
    if SEEN:
        terminalreporter.section("routers")
        width = max(len(row) for row in SEEN)
        terminalreporter.line("%-*s  %-34s %s" % (width, "", *ROUTERS))
        for row, cells in SEEN.items():
            terminalreporter.line("%-*s  %-34s %s" % (width, row, *(cells.get(router, "-") for router in ROUTERS)))
