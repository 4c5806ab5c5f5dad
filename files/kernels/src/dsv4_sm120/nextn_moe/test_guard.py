# SPDX-License-Identifier: Apache-2.0
"""What the guard counts: on a GPU, else under Triton's interpreter; and inside a CUDA graph."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's own functions are declared, at its import
pytest.importorskip("triton", reason="needs Triton")

from dsv4_sm120.nextn_moe import guard  # noqa: E402

VOCABULARY = 20_000  # some blocks and a bit


def rows(count, *bad, dtype=torch.bfloat16):
    values = torch.randn(count, VOCABULARY, device=DEVICE).to(dtype)
    for row, column in bad:
        values[row, column] = float("nan")
    return values


def slots(*places):
    return torch.tensor(places, dtype=torch.int64, device=DEVICE)


def read(counter):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return counter.read()


def test_one_nan_makes_a_row_bad_wherever_it_is():
    counter = guard.Counter(DEVICE)
    counter.count(rows(3, (0, 0), (0, 1), (2, VOCABULARY - 1)), slots(256, 300, 9999))
    assert read(counter) == (3, 2)
    counter.count(rows(2), None)
    assert read(counter) == (5, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_infinities_are_no_nan(dtype):
    values = rows(2, dtype=dtype)
    values[0, 3], values[1, 4] = float("inf"), float("-inf")
    counter = guard.Counter(DEVICE)
    counter.count(values, None)
    assert read(counter) == (2, 0)


def test_padding_is_not_counted():
    counter = guard.Counter(DEVICE)
    counter.count(rows(4, (1, 5), (2, 5), (3, 5)), slots(256, 0, 255, 256))
    assert read(counter) == (2, 1)


def test_rows_apart_and_columns_apart():
    wide = rows(3, (1, 99), (2, 0))[:, :100]
    counter = guard.Counter(DEVICE)
    counter.count(wide[:, :99], None)
    assert read(counter) == (3, 1)
    counter.count(wide.t(), None)
    assert read(counter) == (3 + 100, 1 + 2)


def test_states_of_several_streams_count_as_a_row():
    states = torch.zeros(2, 4, 64, device=DEVICE)
    states[1, 3, 63] = float("nan")
    counter = guard.Counter(DEVICE)
    counter.count(states, None)
    assert read(counter) == (2, 1)


@pytest.fixture
def observed(monkeypatch):
    monkeypatch.setattr(guard, "_counters", {})
    monkeypatch.setattr(guard, "watch", lambda read, finish: None)
    return guard._counters


def test_a_prefill_has_a_row_for_each_request_and_no_padding(observed):
    guard.observe(rows(2, (0, 0)), slots(300, 301, 302, 400, 401))
    assert read(next(iter(observed.values()))) == (2, 1)


def test_a_padded_request_is_left_out_with_all_its_tokens(observed):
    """The captured draft-extend: a row for each request, some tokens each."""
    guard.observe(rows(3, (0, 0), (2, 0)), slots(*[300] * 4, *[512] * 4, *[0] * 4))
    assert read(next(iter(observed.values()))) == (2, 1)


def test_nothing_to_see(observed):
    guard.observe(None, None)
    guard.observe(rows(0), slots())
    assert not observed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_counts_at_every_replay_and_nothing_waits(observed):
    values, places = rows(64), slots(*[0] * 32, *[512] * 32)
    guard.observe(values, places)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        guard.observe(values, places)
    counter = observed[values.device]
    values[40, 7] = float("nan")
    for dummy in range(10):
        graph.replay()
    assert read(counter) == (32 + 10 * 32, 10)
    assert counter.host.is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_first_call_inside_a_capture_is_refused(observed):
    values = rows(4)
    with pytest.raises(RuntimeError, match="should have run before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            guard.observe(values, None)


# A server that counts SIGQUIT, and a scheduler of its whose draft computes what the first argument says: the share of rows with a NaN.
SERVER = """
import logging, multiprocessing, signal, sys, time

def scheduler(share):
    import torch
    from dsv4_sm120.nextn_moe import guard

    logging.basicConfig(format="%(message)s")
    guard.SECONDS = 0.1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.zeros(64, 1000, device=device)
    values[: int(64 * share), 7] = float("nan")
    slots = torch.full((64,), 512, device=device)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        guard.observe(values, slots)
        time.sleep(0.05)

if __name__ == "__main__":
    told = []
    signal.signal(signal.SIGQUIT, lambda *dummy: told.append(1))
    child = multiprocessing.get_context("spawn").Process(target=scheduler, args=(float(sys.argv[1]),))
    child.start()
    child.join()
    print("status", child.exitcode, "server told", len(told))
"""


@pytest.mark.parametrize(
    ("share", "said", "ended"),
    [
        pytest.param(0, "", "status 0 server told 0", id="sound"),
        pytest.param(1 / 8, "NaN in ", "status 0 server told 0", id="one-in-eight"),
        pytest.param(1, "rows; ending", "status 70 server told 1", id="useless"),
    ],
)
def test_a_useless_draft_ends_its_scheduler_and_its_server(tmp_path, share, said, ended):
    (tmp_path / "server.py").write_text(SERVER)
    source = str(pathlib.Path(guard.__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-B", tmp_path / "server.py", str(share)], env={**os.environ, "PYTHONPATH": source},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    print(done.stderr)
    assert done.stdout.strip() == ended
    lines = [line for line in done.stderr.splitlines() if line.startswith("dsv4_sm120: nextn_moe: ")]
    assert all(said in line for line in lines) and bool(lines) == bool(said)
