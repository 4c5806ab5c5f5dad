# SPDX-License-Identifier: Apache-2.0
"""What the guard counts, on the CPU and inside a CUDA graph."""

import pytest
import torch

from dsv4_sm120.nextn_moe import guard

VOCABULARY = 1000


def rows(count, *bad, device="cpu"):
    values = torch.randn(count, VOCABULARY, dtype=torch.bfloat16, device=device)
    for row, column in bad:
        values[row, column] = float("nan")
    return values


def slots(*places, device="cpu"):
    return torch.tensor(places, dtype=torch.int64, device=device)


def test_one_nan_makes_a_row_bad_wherever_it_is():
    counter = guard.Counter("cpu")
    counter.count(rows(3, (0, 0), (0, 1), (2, VOCABULARY - 1)), slots(256, 300, 9999))
    assert counter.read() == (3, 2)
    counter.count(rows(2), None)
    assert counter.read() == (5, 2)


def test_infinities_are_no_nan():
    values = rows(2)
    values[0, 3], values[1, 4] = float("inf"), float("-inf")
    counter = guard.Counter("cpu")
    counter.count(values, None)
    assert counter.read() == (2, 0)


def test_padding_is_not_counted():
    counter = guard.Counter("cpu")
    counter.count(rows(4, (1, 5), (2, 5), (3, 5)), slots(256, 0, 255, 256))
    assert counter.read() == (2, 1)


def test_states_of_several_streams_count_as_a_row():
    states = torch.zeros(2, 4, 64)
    states[1, 3, 63] = float("nan")
    counter = guard.Counter("cpu")
    counter.count(states, None)
    assert counter.read() == (2, 1)


@pytest.fixture
def observed(monkeypatch):
    monkeypatch.setattr(guard, "_counters", {})
    monkeypatch.setattr(guard, "watch", lambda read, finish: None)
    return guard._counters


def test_a_prefill_has_a_row_for_each_request_and_no_padding(observed):
    guard.observe(rows(2, (0, 0)), slots(0, 0, 0, 0, 0))
    assert observed[torch.device("cpu")].read() == (2, 1)


def test_nothing_to_see(observed):
    guard.observe(None, None)
    guard.observe(rows(0), slots())
    assert not observed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_counts_at_every_replay_and_nothing_waits(observed):
    values, places = rows(64, device="cuda"), slots(*[0] * 32, *[512] * 32, device="cuda")
    guard.observe(values, places)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        guard.observe(values, places)
    counter = observed[values.device]
    values[40, 7] = float("nan")
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert counter.read() == (32 + 10 * 32, 10)
    assert counter.host.is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_first_call_inside_a_capture_is_refused(observed):
    values = rows(4, device="cuda")
    with pytest.raises(RuntimeError, match="should have run before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            guard.observe(values, None)
