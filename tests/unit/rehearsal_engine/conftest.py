# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Engines for the tests of this folder: one alone, one pair without a router (the test then speaks to both halves)."""
from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "support"))
sys.path.insert(0, str(ROOT / "molecule" / "rehearsal_host" / "engine" / "src"))

import rehearsal_engine as support


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return support.model_folder(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def starter(tmp_path_factory, model):
    started = []

    def start(mode="null", *extra, **options):
        engine = support.EngineProcess(tmp_path_factory.mktemp("engine"), model, mode, *extra, **options)
        started.append(engine)
        return engine

    try:
        yield start
    finally:
        for engine in started:
            engine.stop()


@pytest.fixture
def engines(tmp_path_factory, model):
    """Start engines; they are stopped after the test."""
    with starter(tmp_path_factory, model) as start:
        yield start


@pytest.fixture(scope="session")
def shared_engines(tmp_path_factory, model):
    with starter(tmp_path_factory, model) as start:
        yield start


@pytest.fixture(scope="session")
def shared_single(shared_engines):
    return shared_engines()


@pytest.fixture
def single(shared_single):
    """An engine alone, without faults."""
    yield shared_single
    shared_single.fault()


class Pair:
    """Two halves; chat() does what a router does."""

    def __init__(self, prefill, decode):
        self.prefill, self.decode, self.room = prefill, decode, 0

    def chat(self, text, to_prefill=True, bootstrap_port=None, **body):
        self.room += 1
        body = {**body, "bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port or self.prefill.bootstrap_port, "bootstrap_room": self.room}
        answers = {}
        thread = threading.Thread(target=lambda: answers.update(prefill=self.prefill.chat(text, **body)))
        if to_prefill:
            thread.start()
        answers["decode"] = self.decode.chat(text, **body)
        if to_prefill:
            thread.join()
        return answers


@pytest.fixture(scope="session")
def shared_pair(shared_engines):
    limits = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "2", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "2"}
    prefill = shared_engines("prefill", environment=limits, wait=False)
    decode = shared_engines("decode", environment=limits, wait=False)
    prefill.wait_ready()
    decode.wait_ready()
    return Pair(prefill, decode)


@pytest.fixture
def pair(shared_pair):
    yield shared_pair
    shared_pair.prefill.fault()
    shared_pair.decode.fault()
