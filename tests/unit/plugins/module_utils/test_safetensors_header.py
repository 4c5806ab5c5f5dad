# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.blackwell.dsv4.plugins.module_utils.safetensors_header import HeaderError, read_header


TWICE = b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"I8","shape":[8],"data_offsets":[0,8]}}'


def shard(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return str(path)


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def codes(header):
    return [code for code, dummy, dummy_details in header.problems]


def test_a_good_header_is_read_without_its_data(tmp_path):
    path = shard(
        tmp_path / "x",
        {"__metadata__": {"format": "pt"}, "a": tensor("BF16", [2, 3], 0, 12), "b": tensor("F4", [4, 2], 12, 16), "c": tensor("F32", [], 16, 20)},
        b"\0" * 20,
    )
    header = read_header(path)
    assert header.problems == []
    assert header.tensors == {"a": ("BF16", (2, 3), 0, 12), "b": ("F4", (4, 2), 12, 16), "c": ("F32", (), 16, 20)}
    assert header.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    "header, data, code",
    [
        ({"a": tensor("U8", [8], 0, 8)}, 4, "truncated_shard"),
        ({"a": tensor("U8", [8], 0, 8)}, 9, "shard_trailing_bytes"),
        ({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [8], 4, 12)}, 12, "header_overlap"),
        ({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [8], 9, 17)}, 17, "header_gap"),
        ({"a": tensor("U8", [8], 4, 12)}, 12, "header_gap"),
        ({"a": tensor("U8", [9], 0, 8)}, 8, "header_size_mismatch"),
        ({"a": tensor("F4", [3], 0, 2)}, 2, "header_size_mismatch"),
        ({"a": tensor("Q4_K", [8], 0, 8)}, 8, "header_unknown_dtype"),
        ({"a": tensor("U8", [-8], 0, 8)}, 8, "header_bad_tensor"),
        ({"a": tensor("U8", [8.0], 0, 8)}, 8, "header_bad_tensor"),
        ({"a": tensor("U8", [True], 0, 1)}, 1, "header_bad_tensor"),
        ({"a": tensor("U8", [-2, -4], 0, 8)}, 8, "header_bad_tensor"),
        ({"a": tensor("U8", [8], 8, 0)}, 8, "header_bad_tensor"),
        ({"a": tensor("U8", [8], -8, 0)}, 8, "header_bad_tensor"),
        ({"a": {"dtype": "U8", "shape": [8]}}, 8, "header_bad_tensor"),
        ({"a": {"dtype": ["U8"], "shape": [8], "data_offsets": [0, 8]}}, 8, "header_unknown_dtype"),
        ({"a": "U8"}, 8, "header_bad_tensor"),
        ({"a": None}, 8, "header_bad_tensor"),
        ({"__metadata__": [1], "a": tensor("U8", [8], 0, 8)}, 8, "header_bad_metadata"),
        ({"__metadata__": {"n": 1}, "a": tensor("U8", [8], 0, 8)}, 8, "header_bad_metadata"),
    ],
)
def test_each_fault_has_its_code(tmp_path, header, data, code):
    try:
        assert code in codes(read_header(shard(tmp_path / "x", header, b"\0" * data)))
    except HeaderError as exc:
        pytest.fail("refused as a whole: %s" % exc.code)


@pytest.mark.parametrize(
    "content, code",
    [
        (b"", "zero_byte_shards"),
        (b"\1\2\3", "truncated_shard"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "header_length_invalid"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "header_length_invalid"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated_shard"),
        ((2).to_bytes(8, "little") + b"{]", "header_not_json"),
        ((2).to_bytes(8, "little") + b"[]", "header_not_json"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "header_not_json"),
        ((0).to_bytes(8, "little"), "header_not_json"),
        (b"<html><body>Please log in</body></html>", "header_length_invalid"),
        ((200000).to_bytes(8, "little") + b"[" * 200000, "header_not_json"),
        (
            len(TWICE).to_bytes(8, "little") + TWICE + b"\0" * 8,
            "header_duplicate_tensor",
        ),
    ],
)
def test_what_is_no_header_is_refused_with_a_code(tmp_path, content, code):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(HeaderError) as caught:
        read_header(str(path))
    assert caught.value.code == code


def test_a_directory_and_an_absent_file_are_refused(tmp_path):
    for path, code in ((str(tmp_path), "unreadable_file"), (str(tmp_path / "no"), "missing_shards")):
        with pytest.raises(HeaderError) as caught:
            read_header(path)
        assert caught.value.code == code


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "p")
    with pytest.raises(HeaderError) as caught:
        read_header(str(tmp_path / "p"))
    assert caught.value.code == "shard_not_a_file"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_give_a_traceback(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(content)
    try:
        read_header(str(path))
    except HeaderError as exc:
        assert exc.code


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5) | st.sampled_from(["U8", "F32", "F4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), JSONISH, max_size=3), st.integers(0, 64))
def test_no_header_gives_a_traceback(tmp_path_factory, header, size):
    path = tmp_path_factory.getbasetemp() / "fuzz-header"
    shard(path, header, b"\0" * size)
    try:
        found = read_header(str(path))
    except HeaderError as exc:
        assert exc.code
        return
    for dtype, shape, begin, end in found.tensors.values():
        assert isinstance(dtype, str) and 0 <= begin <= end and all(isinstance(n, int) for n in shape)
