# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The committed table of MoE methods in itself; the engine is asked by make check-engine-args."""
from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TABLE = json.loads((ROOT / "files" / "moe_methods.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def methods():
    folder = ROOT / "tests" / "engine_args"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("moe_methods", folder / "moe_methods.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def test_the_page_is_that_of_the_data(methods):
    assert methods.PAGE.read_text(encoding="utf-8") == methods.page(TABLE)


def test_every_runner_of_the_parser_is_in_it(methods):
    for checkpoint, rows in TABLE["checkpoints"].items():
        assert [tuple(row["settings"]) for row in rows] == methods.cases(checkpoint)


def test_good_means_right_for_target_and_draft_as_the_engine_is(methods):
    for row in (row for rows in TABLE["checkpoints"].values() for row in rows):
        outcomes = [layer["outcome"] for layer in row.get("stock", {}).values()]
        assert row["good"] == (outcomes == [methods.RIGHT] * 2)


def test_ours_leaves_alone_what_is_right(methods):
    for row in (row for rows in TABLE["checkpoints"].values() for row in rows if "stock" in row):
        for layer in ("target", "draft"):
            if row["stock"][layer]["outcome"] == methods.RIGHT:
                assert row["ours"][layer] == row["stock"][layer]


def test_with_ours_no_draft_of_packed_fp4_is_left_under_the_fp8_method(methods):
    """But for the runners that have an fp4 form of their own, and those that the engine refuses by themselves."""
    for row in TABLE["checkpoints"]["fp4-mtp"]:
        fp8 = row.get("ours", {}).get("draft", {})
        if fp8.get("method") == "Fp8MoEMethod" and fp8["weights"] == "int8":
            assert row["draft_runner"] == "deep_gemm" or fp8["outcome"] == methods.RIGHT, row
