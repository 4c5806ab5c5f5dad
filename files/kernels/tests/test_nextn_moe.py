# SPDX-License-Identifier: Apache-2.0
"""What the operation nextn_moe decides, without PyTorch: which runner, and what the counts of the guard mean."""

import logging
import types

import pytest

from dsv4_sm120 import operation
from dsv4_sm120.nextn_moe import choice, guard, hook


@pytest.mark.parametrize(
    ("runner", "flashinfer", "hidden", "intermediate", "expected"),
    [
        ("flashinfer_mxfp4", True, 4096, 512, None),
        ("marlin", True, 4096, 512, None),
        ("humming", True, 4096, 512, None),
        ("deep_gemm", True, 4096, 512, None),
        ("auto", True, 4096, 512, "flashinfer_mxfp4"),
        ("triton", True, 4096, 512, "flashinfer_mxfp4"),
        ("flashinfer_cutlass", True, 4096, 512, "flashinfer_mxfp4"),
        ("flashinfer_mxfp4", False, 4096, 512, "marlin"),
        ("flashinfer_mxfp4", True, 4096, 288, "marlin"),
        ("flashinfer_mxfp4", True, 4032, 512, "marlin"),
        ("auto", False, 4096, 512, "marlin"),
        ("auto", True, 4096, 288, "marlin"),
    ],
)
def test_the_runner_for_packed_fp4(runner, flashinfer, hidden, intermediate, expected):
    assert choice.better(runner, flashinfer, hidden, intermediate) == expected


def verdicts(*counts):
    judge = guard.Judge()
    return [judge.look(*pair) for pair in counts]


def test_a_sound_draft_is_silent():
    assert verdicts((0, 0), (100, 0), (10_000, 0)) == [(None, False)] * 3


def test_a_first_nan_is_said_and_tenfold_again():
    said = verdicts((1000, 1), (2000, 2), (3000, 9), (4000, 10), (5000, 11), (6000, 99), (7000, 100))
    assert [line for line, _over in said] == [
        "NaN in 1 of 1000 rows of the draft so far", None, None, "NaN in 10 of 4000 rows of the draft so far", None, None,
        "NaN in 100 of 7000 rows of the draft so far",
    ]  # fmt: skip
    assert not any(over for _line, over in said)


def test_a_draft_of_nan_ends_the_process():
    assert verdicts((guard.WINDOW, guard.WINDOW))[-1] == ("the draft computes NaN in 32 of its last 32 rows", True)


def test_half_of_the_rows_is_not_enough_and_more_is():
    assert verdicts((100, 50))[-1][1] is False
    assert verdicts((100, 51))[-1][1] is True


def test_too_few_rows_judge_nothing_until_there_are_enough():
    said = verdicts((10, 10), (20, 20), (40, 40))
    assert [over for _line, over in said] == [False, False, True]


def test_a_draft_that_goes_bad_late_is_judged_by_its_last_rows():
    said = verdicts((1_000_000, 0), (1_000_040, 40))
    assert said[-1] == ("the draft computes NaN in 40 of its last 40 rows", True)


def test_the_watch_reads_until_it_is_over(caplog):
    counts = iter([(0, 0), (5, 1), (50, 50)])
    ended = []
    with caplog.at_level(logging.ERROR, logger="dsv4_sm120"):
        guard.watch(lambda: next(counts), lambda: ended.append(1), pause=lambda seconds: None)
    assert ended == [1] and next(counts, None) is None
    assert [(entry.levelname, entry.getMessage()) for entry in caplog.records] == [
        ("ERROR", "dsv4_sm120: nextn_moe: NaN in 1 of 5 rows of the draft so far"),
        ("CRITICAL", "dsv4_sm120: nextn_moe: the draft computes NaN in 50 of its last 50 rows; ending"),
    ]


@pytest.mark.parametrize("parent", [None, object()])
def test_the_end_is_told_to_the_server_in_a_child_alone(monkeypatch, parent):
    done = []
    monkeypatch.setattr(guard.multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(guard.os, "kill", lambda pid, number: done.append(number))
    monkeypatch.setattr(guard.os, "_exit", done.append)
    guard.end()
    assert done == ([guard.signal.SIGQUIT] if parent else []) + [guard.EXIT_STATUS]


@pytest.mark.parametrize(("around", "looked_at"), [(hook.nextn_around, "logits"), (hook.dspark_around, "states")])
def test_the_hooks_hand_over_what_the_draft_computed(monkeypatch, around, looked_at):
    seen = []
    monkeypatch.setattr(guard, "observe", lambda values, slots: seen.append((values, slots)))
    result = types.SimpleNamespace(next_token_logits="logits", hidden_states="states")
    batch = types.SimpleNamespace(out_cache_loc="slots")
    for names in (set(), {hook.NAME}):
        operation.enable(names)
        assert around(lambda *arguments: result, None, "ids", "positions", batch) is result
    operation.enable(set())
    assert seen == [(looked_at, "slots")]
