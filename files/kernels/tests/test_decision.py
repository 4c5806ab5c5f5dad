# SPDX-License-Identifier: Apache-2.0
"""From fed times to choices: noise, ties, missing and wrong contestants, flips."""

import random

import pytest

from dsv4_sm120 import decision
from dsv4_sm120.decision import OURS, STOCK, TIE, Timed, choose, lead, ranges

RIVALS = ("engine", "mixed")


def times(middle, noise=0.05, drift=0.0, seed=0, number=40):
    """Times of a contestant around a middle; drift is what each turn adds to all contestants alike."""
    rng = random.Random(seed)
    return [middle + rng.gauss(0, noise) + drift * turn for turn in range(number)]


def cell(ours, engine, variant="all", rows=1, wrong=None, **more):
    taken = {"ours": times(ours, seed=1), "engine": times(engine, seed=2)}
    taken |= {name: times(value, seed=3) for name, value in more.items()}
    return Timed(variant, rows, f"{variant} {rows}", RIVALS, taken, wrong or {})


@pytest.mark.parametrize(
    ("ours", "engine", "noise", "winner"),
    [
        (8.0, 10.0, 0.05, OURS),
        (10.0, 8.0, 0.05, STOCK),
        (10.0, 10.0, 0.05, TIE),
        # ahead by less than a fiftieth, however little noise there is
        (9.85, 10.0, 0.001, TIE),
        (9.7, 10.0, 0.001, OURS),
        # ahead by a tenth, within noise
        (9.0, 10.0, 8.0, TIE),
    ],
)
def test_a_lead_must_exceed_the_noise(ours, engine, noise, winner):
    assert lead(times(ours, noise, seed=1), times(engine, noise, seed=2)).winner == winner


def test_equal_kernels_seldom_differ():
    """Two contestants of the same speed in ordinary noise: a false win is rare."""
    wins = sum(
        lead(times(10, 0.4, seed=seed), times(10, 0.4, seed=seed + 5000)).winner != TIE for seed in range(1000)
    )
    assert wins <= 10


def test_drift_that_meets_both_alike_hides_nothing():
    ours, engine = times(10.0, drift=0.5, seed=1), times(10.6, drift=0.5, seed=2)
    assert decision.spread(ours) > 0.6 and lead(ours, engine).winner == OURS


def test_outliers_do_not_decide():
    ours = times(10.0, seed=1)
    ours[5] = ours[17] = 4000.0
    assert lead(ours, times(10.6, seed=2)).winner == OURS


def test_an_operation_serves_where_it_won():
    timed = [cell(6, 10, rows=1), cell(8, 10, rows=4), cell(12, 10, rows=16), cell(9, 10, rows=64)]
    assert choose([("all", item.rows) for item in timed], timed) == {
        "choice": "ours",
        "rows": {"all": [[1, 4], [17, 64]]},
        "reason": "faster than the engine's own in 3 of 4 shapes",
    }


def test_a_slowed_kernel_flips_the_choice():
    expected = [("all", 1), ("all", 1), ("all", 4)]
    fast = [cell(6, 10), cell(20, 30), cell(6, 10, rows=4)]
    slow = [cell(6 + 90, 10), cell(20 + 90, 30), cell(6 + 90, 10, rows=4)]
    assert choose(expected, fast)["choice"] == "ours"
    assert choose(expected, slow) == {
        "choice": "stock",
        "rows": {},
        "reason": "faster than the engine's own in none of 2 shapes",
    }


def test_cells_of_a_shape_count_together():
    """The hook cannot see lengths: a shape's cells are decided by the time that all of them take."""
    expected = [("all", 1), ("all", 1)]
    assert choose(expected, [cell(9, 8), cell(50, 60)])["choice"] == "ours"
    assert choose(expected, [cell(7, 8), cell(66, 60)])["choice"] == "stock"


def test_all_rivals_must_be_beaten():
    """When half of the pair is ours already, the fused one has to beat that."""
    assert choose([("all", 1)], [cell(6, 10, mixed=7)])["choice"] == "ours"
    assert choose([("all", 1)], [cell(6, 10, mixed=5)])["choice"] == "stock"
    # a rival that is wrong is none
    assert choose([("all", 1)], [cell(6, 10, mixed=5, wrong={"mixed": "other values"})])["choice"] == "ours"


@pytest.mark.parametrize(
    ("timed", "reason"),
    [
        ([], "there was no time to measure it"),
        ([cell(6, 10, wrong={"ours": "output off by 1"})], "ours: output off by 1"),
        ([cell(6, 10, wrong={"engine": "ImportError: x"})], "engine: ImportError: x"),
        ([Timed("all", 1, "", RIVALS, {"ours": times(6)})], "engine did not run"),
        ([Timed("all", 1, "", RIVALS, {"engine": times(6)})], "ours did not run"),
    ],
)
def test_what_was_not_compared_is_not_chosen(timed, reason):
    assert choose([("all", 1)], timed) == {"choice": "stock", "rows": {}, "reason": reason}


def test_a_shape_with_a_cell_missing_is_not_decided():
    found = choose([("all", 1), ("all", 1), ("all", 4)], [cell(6, 10), cell(6, 10, rows=4)])
    assert found["rows"] == {"all": [[2, 4]]}
    assert found["reason"] == "faster than the engine's own in 1 of 2 shapes; 1 not decided: there was no time to measure it"


def test_variants_are_decided_apart():
    timed = [cell(6, 10, "swa", 1), cell(12, 10, "c4", 1)]
    assert choose([("swa", 1), ("c4", 1)], timed)["rows"] == {"swa": [[1, 1]]}


@pytest.mark.parametrize(
    ("won", "found"),
    [(set(), []), ({1, 4, 16, 64}, [[1, 64]]), ({16}, [[5, 16]]), ({1, 16, 64}, [[1, 1], [5, 64]])],
)
def test_ranges(won, found):
    assert ranges([1, 4, 16, 64], won) == found


def test_the_record_says_who_won_each_cell():
    document = cell(6, 10, wrong={"mixed": "x"}).summary()
    assert document["winner"] == OURS and document["lead_us"] == pytest.approx(4, abs=0.1)
    assert document["median_us"]["engine"] == pytest.approx(10, abs=0.1) and document["wrong"] == {"mixed": "x"}
    assert Timed("all", 1, "", RIVALS, {}).summary()["winner"] == "none"
