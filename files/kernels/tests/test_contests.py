# SPDX-License-Identifier: Apache-2.0
"""What the kernel folders declare for selftest and select, as far as it can be looked at without a GPU."""

import json

import pytest

from dsv4_sm120 import contests, plugin

torch = pytest.importorskip("torch", reason="needs PyTorch")
DEPLOYMENT = contests.deployment(
    {
        "schema": 1,
        "context_length": 524288,
        "instances": {
            "prefill": {"heads": 16, "max_batch": 64, "kernels": []},
            "decode": {"heads": 16, "max_batch": 64, "rows_per_request": 4, "kernels": ["topk", "sparse_mla"]},
        },
    }
)


@pytest.mark.parametrize("operation", contests.modules())
def test_a_contest_is_whole(operation):
    contest = contests.contest(operation)
    assert set(contest.rivals) == {"sm_120a", "sm_90"} and all(contest.rivals.values())
    names = [name for name, _check in contest.checks()]
    assert len(names) == len(set(names)) >= 8
    cells = contest.cells(DEPLOYMENT)
    assert len({json.dumps(vars(cell)) for cell in cells}) == len(cells)
    assert {cell.rows for cell in cells} == {4, 16, 64, 256}
    # the longest context of the deployment is among the cells of every shape
    assert {(c.variant, c.rows) for c in cells} == {(c.variant, c.rows) for c in cells if c.length == 524288}


def test_every_kernel_has_a_contest():
    with_libraries = {name for name, item in plugin.operations().items() if item.libraries}
    assert with_libraries == set(contests.modules())


def test_mixed_lengths_hold_the_longest_row():
    from dsv4_sm120.topk import contest

    for width in (2048, 16_384, 131_072):
        for batch in (1, 4, 64):
            lengths = contest.lengths_of(batch, None, width)
            assert len(lengths) == batch and max(lengths) == width and min(lengths) >= 1


@pytest.mark.engine
def test_the_engines_own_functions_are_where_they_are_looked_for():
    from dsv4_sm120 import contestants

    assert contestants.topk_v1() is not None, contestants.absent
    assert contestants.attention_engine() is not None, contestants.absent
    if contestants.indexer_tilelang(4) is None:
        assert "No module named 'tilelang'" in contestants.absent["tilelang"]
