# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Read and judge the header of a safetensors file without torch and without its data.

A safetensors file is an 8 byte little-endian length, that many bytes of JSON and then the data
of the tensors, back to back. Everything that can be known about a shard short of its content is
in those few kilobytes plus the size of the file: a truncated copy shows here, a corrupt byte does
not.
"""

from __future__ import annotations

import json
import math
import os
import stat

# The reference implementation refuses longer headers too.
MAX_HEADER_BYTES = 100000000

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def whole(value):
    """Whether this is an integer; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


class HeaderError(Exception):
    """The header cannot be used at all. C(code) is stable, C(details) goes into the finding."""

    def __init__(self, code, message, **details):
        super().__init__(message)
        self.code = code
        self.details = details


class Header:
    """What one shard says about itself."""

    __slots__ = ("path", "size", "data_start", "tensors", "metadata", "problems")

    def __init__(self, path, size, data_start, tensors, metadata, problems):
        self.path = path
        self.size = size
        self.data_start = data_start
        #: name -> (dtype, tuple of dimensions, begin, end), offsets relative to data_start
        self.tensors = tensors
        self.metadata = metadata
        #: list of (code, message, details) that do not stop the other checks
        self.problems = problems


def _no_duplicates(pairs):
    seen = {}
    for key, value in pairs:
        if key in seen:
            raise HeaderError("header_duplicate_tensor", "the header names %r twice" % key[:120], tensor=key[:120])
        seen[key] = value
    return seen


def parse_header(raw):
    """JSON text of a header to its mapping; every way in which it can be wrong raises HeaderError."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise HeaderError("header_not_json", "the header is not UTF-8: %s" % exc) from exc
    try:
        mapping = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise HeaderError("header_not_json", "the header is not JSON: %s" % str(exc)[:200]) from exc
    if not isinstance(mapping, dict):
        raise HeaderError("header_not_json", "the header is JSON but no object")
    tensors = len(mapping) - ("__metadata__" in mapping)
    if raw.count(b'"data_offsets"') != tensors:
        # Either a name is there twice (the last one would win silently) or a tensor is odd: look again, slowly.
        json.loads(text, object_pairs_hook=_no_duplicates)
    return mapping


def _check_entry(name, info):
    """Validate one entry that did not fit the fast path; returns (entry or None, problem or None)."""
    if not isinstance(info, dict):
        return None, ("header_bad_tensor", "%s: the entry is no object" % name[:120], {"tensor": name[:120]})
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    where = {"tensor": name[:120]}
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return None, ("header_unknown_dtype", "%s: dtype %r is not one of safetensors" % (name[:120], str(dtype)[:40]), where)
    if not isinstance(shape, list) or not all(whole(n) and n >= 0 for n in shape):
        return None, ("header_bad_tensor", "%s: shape %s" % (name[:120], str(shape)[:80]), where)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(whole(n) and n >= 0 for n in offsets)
        or offsets[0] > offsets[1]
    ):
        return None, ("header_bad_tensor", "%s: data_offsets %s" % (name[:120], str(offsets)[:80]), where)
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        return None, (
            "header_size_mismatch",
            "%s: %s %s needs %d bytes, the offsets give it %d"
            % (name[:120], dtype, shape, (bits + 7) // 8, offsets[1] - offsets[0]),
            where,
        )
    return (dtype, tuple(shape), offsets[0], offsets[1]), None


def _entries(mapping):
    """Split the mapping into good entries and problems."""
    tensors, problems = {}, []
    bits_of, prod = DTYPE_BITS, math.prod
    for name, info in mapping.items():
        if name == "__metadata__":
            continue
        try:
            dtype = info["dtype"]
            shape = info["shape"]
            begin, end = info["data_offsets"]
            if (
                0 <= begin <= end
                and prod(shape) * bits_of[dtype] == (end - begin) * 8
                and begin.__class__ is int
                and end.__class__ is int
                and (not shape or (min(shape) >= 0 and shape[0].__class__ is int))
            ):
                tensors[name] = (dtype, tuple(shape), begin, end)
                continue
        except (KeyError, TypeError, ValueError):
            pass
        entry, problem = _check_entry(name, info)
        if problem:
            problems.append(problem)
        else:
            tensors[name] = entry
    return tensors, problems


def _spans(tensors, available):
    """Problems of the layout of the data: overlaps, gaps, an end beyond the file, bytes left over."""
    problems = []
    cursor, previous = 0, None
    for begin, end, name in sorted((t[2], t[3], n) for n, t in tensors.items()):
        if begin != cursor and len(problems) < 5:
            code, word = ("header_overlap", "overlaps") if begin < cursor else ("header_gap", "leaves a gap after")
            problems.append(
                (
                    code,
                    "%s at %d..%d %s %s, which ends at %d" % (name[:120], begin, end, word, previous or "the header", cursor),
                    {"tensor": name[:120]},
                )
            )
        cursor, previous = max(cursor, end), name[:120]
    if cursor > available:
        problems.append(
            (
                "truncated_shard",
                "the tensors need %d bytes of data, the file has %d" % (cursor, available),
                {"missing_bytes": cursor - available},
            )
        )
    elif cursor < available:
        problems.append(
            (
                "shard_trailing_bytes",
                "%d bytes follow the last tensor" % (available - cursor),
                {"extra_bytes": available - cursor},
            )
        )
    return problems


def read_header(path):
    """Open a shard, read its header only, and return a Header; HeaderError when there is none to judge."""
    try:
        # Without waiting: a pipe without a writer would hold us for ever.
        with open(path, "rb", buffering=0, opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise HeaderError("shard_not_a_file", "not a regular file")
            size = status.st_size
            if size == 0:
                raise HeaderError("zero_byte_shards", "the file is empty", actual=0)
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise HeaderError("truncated_shard", "the file has %d bytes, a header length needs 8" % size, expected=8, actual=size)
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise HeaderError(
                    "header_length_invalid",
                    "the header would be %d bytes long, the format ends at %d" % (length, MAX_HEADER_BYTES),
                    header_length=length,
                )
            if 8 + length > size:
                raise HeaderError(
                    "truncated_shard",
                    "the header alone needs %d bytes, the file has %d" % (8 + length, size),
                    expected=8 + length,
                    actual=size,
                )
            raw = b""
            while len(raw) < length:
                piece = stream.read(length - len(raw))
                if not piece:
                    raise HeaderError("truncated_shard", "the file ended while its header was read", expected=8 + length, actual=size)
                raw += piece
    except FileNotFoundError as exc:
        raise HeaderError("missing_shards", "the file does not exist") from exc
    except OSError as exc:
        raise HeaderError("unreadable_file", exc.strerror or str(exc)) from exc
    mapping = parse_header(raw)
    metadata = mapping.get("__metadata__") or {}
    tensors, problems = _entries(mapping)
    data_start = 8 + length
    if not problems:
        problems = _spans(tensors, size - data_start)
    for dummy, dummy_message, details in problems:
        if "missing_bytes" in details:
            details["expected"] = size + details.pop("missing_bytes")
            details["actual"] = size
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append(("header_bad_metadata", "__metadata__ is not a mapping of strings", {}))
        metadata = {}
    return Header(path, size, data_start, tensors, metadata, problems)
