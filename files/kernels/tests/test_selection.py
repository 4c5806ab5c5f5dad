# SPDX-License-Identifier: Apache-2.0
"""Which operations are chosen, by whom, and what a record must look like."""

import json

import pytest

from dsv4_sm120 import selection

KNOWN = ("indexer", "indexer_topk", "topk")
BUILD = "0123456789abcdef"


def record(path, source_hash=BUILD, **operations):
    path.write_text(json.dumps({"schema": 1, "source_hash": source_hash, "operations": operations}))
    return str(path)


def choose(**environment):
    return selection.select(KNOWN, BUILD, {f"DSV4_SM120_{name.upper()}": value for name, value in environment.items()})


def test_nothing_said_nothing_applied():
    assert choose().wanted == () and choose().source == "no selection"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("topk", ("topk",)),
        (" topk , indexer ", ("topk", "indexer")),
        ("all", KNOWN),
        ("none", ()),
        ("topk,topk", ("topk",)),
    ],
)
def test_the_operators_word(given, wanted):
    assert choose(kernels=given).wanted == wanted


def test_an_unknown_operation_is_an_error():
    with pytest.raises(selection.SelectionError, match="unknown tpok; known: indexer"):
        choose(kernels="tpok")


def test_the_record_chooses(tmp_path):
    path = record(tmp_path / "r.json", topk={"choice": "ours", "selftest": "pass"}, indexer={"choice": "stock"})
    found = choose(selection=path)
    assert found.wanted == ("topk",) and found.source == path and not found.left_out


def test_the_operators_word_goes_before_the_record(tmp_path):
    path = record(tmp_path / "r.json", topk={"choice": "ours"}, indexer={"choice": "stock"})
    assert choose(selection=path, kernels="indexer").wanted == ("indexer",)
    assert choose(selection=path, kernels="none").wanted == ()


def test_a_failed_selftest_is_never_enabled(tmp_path):
    path = record(tmp_path / "r.json", topk={"choice": "ours", "selftest": "fail"})
    for found in (choose(selection=path), choose(selection=path, kernels="topk")):
        assert found.wanted == () and "self-test" in found.left_out["topk"]


def test_a_record_of_another_build_chooses_nothing(tmp_path):
    path = record(tmp_path / "r.json", source_hash="f" * 16, topk={"choice": "ours"})
    found = choose(selection=path)
    assert found.wanted == () and "f" * 16 in found.left_out["topk"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "source_hash": "x", "operations": {}}',
        '{"schema": 1, "operations": {}}',
        '{"schema": 1, "source_hash": "x", "operations": {"topk": {}}}',
        '{"schema": 1, "source_hash": "x", "operations": {"topk": {"choice": "fast"}}}',
        '{"schema": 1, "source_hash": "x", "operations": {"topk": {"choice": "ours", "selftest": "maybe"}}}',
        '{"schema": 1, "source_hash": "x", "operations": {"topk": {"choice": "ours", "rows": [[1, 4]]}}}',
        '{"schema": 1, "source_hash": "x", "operations": {"topk": {"choice": "ours", "rows": {"all": [[1, true]]}}}}',
    ],
)
def test_a_malformed_record_is_an_error(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(selection.SelectionError):
        choose(selection=str(path))


def test_a_missing_record_is_an_error(tmp_path):
    with pytest.raises(selection.SelectionError, match="none.json"):
        choose(selection=str(tmp_path / "none.json"))


def test_rows_count_where_the_record_chose_ours(tmp_path):
    rows = {"all": [[1, 4]]}
    path = record(
        tmp_path / "r.json", topk={"choice": "ours", "rows": rows}, indexer={"choice": "stock", "rows": {}}
    )
    assert choose(selection=path).rows == {"topk": rows}
    # the operator's word goes before the record's choice, not before what the record knows of its own choice
    both = choose(selection=path, kernels="topk,indexer")
    assert both.wanted == ("topk", "indexer") and both.rows == {"topk": rows}


def test_a_record_is_replaced_at_once(tmp_path):
    path = tmp_path / "r.json"
    selection.write_record(path, {"schema": 1, "source_hash": BUILD, "operations": {}})
    before = path.read_text()
    with pytest.raises(TypeError):
        selection.write_record(path, {"schema": 1, "source_hash": {1}})
    assert path.read_text() == before and [item.name for item in tmp_path.iterdir()] == ["r.json"]
    assert path.stat().st_mode & 0o777 == 0o644
