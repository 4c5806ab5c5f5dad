# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import hashlib
import json
import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_manifest as manifests

A, B = "a" * 64, "B" * 64


@pytest.mark.parametrize(
    "text, expected",
    [
        pytest.param("%s  model.safetensors\n" % A, {"model.safetensors": A}, id="MDL-12-two-blanks"),
        pytest.param("%s *model.safetensors\n" % A, {"model.safetensors": A}, id="MDL-12-star"),
        pytest.param("%s  sub/dir/x y.json\n%s *z\n" % (A, B), {"sub/dir/x y.json": A, "z": B.lower()}, id="MDL-12-sub-directories"),
        ("# made by hand\n\n%s  ./x\n" % A, {"x": A}),
        ("SHA256 (x) = %s\n" % A, {"x": A}),
        ("SHA256(x)= %s\n" % A, {"x": A}),
        ("%s\tx\n" % A, {"x": A}),
        ("\\%s  a\\\\b\n" % A, {"a\\b": A}),
        ("%s  *star\n" % A, {"*star": A}),
        ("%s  x\r\n" % A, {"x": A}),
    ],
)
def test_sums_are_read_as_they_are_written(text, expected):
    assert {path: entry["sha256"] for path, entry in manifests.parse_manifest(text).items()} == expected


def test_what_sha256sum_writes_is_read(tmp_path):
    names = ["plain", "with blank", "back\\slash", "sub/x"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    text = subprocess.run(["sha256sum", "--", *names], cwd=tmp_path, stdout=subprocess.PIPE, check=True).stdout.decode()
    assert {p: e["sha256"] for p, e in manifests.parse_manifest(text).items()} == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in names
    }


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../../x", "", ".", "a//b", "a/./b", "a/", "a\nb", "x" * 256, "a/" * 600 + "b", ".dsv4-staged.json", ".dsv4-parts/lock"],
)
def test_a_manifest_cannot_write_elsewhere(path):
    with pytest.raises(manifests.ManifestError) as caught:
        manifests.parse_manifest(json.dumps({"files": {path: {"size": 1, "sha256": A}}}))
    assert caught.value.code == "manifest_unsafe_path"


@pytest.mark.parametrize(
    "text, code",
    [
        ("", "manifest_empty"),
        ("{}", "manifest_invalid"),
        ("[]", "manifest_empty"),
        ("[1]", "manifest_invalid"),
        ("{", "manifest_invalid"),
        ('{"files": {}}', "manifest_empty"),
        ('{"files": {"a": 1}}', "manifest_invalid"),
        ('{"files": {"a": {"size": -1}}}', "manifest_invalid"),
        ('{"files": {"a": {"size": "1"}}}', "manifest_invalid"),
        ('{"files": {"a": {"sha256": "zz"}}}', "manifest_invalid"),
        ("<html>log in</html>", "manifest_invalid"),
        ("%s  x\n%s  x\n" % (A, B), "manifest_invalid"),
        ("abc  x\n", "manifest_invalid"),
    ],
)
def test_a_bad_manifest_has_a_code(text, code):
    with pytest.raises(manifests.ManifestError) as caught:
        manifests.parse_manifest(text)
    assert caught.value.code == code


def test_the_hubs_listing_gives_sizes_and_hashes():
    listing = [
        {"type": "directory", "oid": "0" * 40, "path": "encoding"},
        {"type": "file", "oid": "1" * 40, "size": 12, "path": "config.json"},
        {"type": "file", "oid": "2" * 40, "size": 134, "path": "m.safetensors", "lfs": {"oid": A, "size": 5000, "pointerSize": 134}},
    ]
    files = manifests.parse_manifest(json.dumps(listing))
    assert files["config.json"] == {"size": 12, "sha256": None, "git_sha1": "1" * 40}
    assert files["m.safetensors"] == {"size": 5000, "sha256": A}


def test_git_names_a_blob_as_we_do(tmp_path):
    (tmp_path / "x").write_bytes(b"hello\n" * 7)
    digest = manifests.git_blob(42)
    digest.update(b"hello\n" * 7)
    said = subprocess.run(["git", "hash-object", "x"], cwd=tmp_path, stdout=subprocess.PIPE, check=True).stdout.decode().strip()
    assert digest.hexdigest() == said


def test_a_manifest_is_read_back_as_written():
    files = {"b": {"size": 2, "sha256": A}, "a": {"size": 1, "sha256": None, "git_sha1": "1" * 40}}
    text = manifests.dump_manifest(files)
    assert manifests.parse_manifest(text) == files
    assert text == manifests.dump_manifest(dict(reversed(list(files.items()))))


def test_a_record_holds_while_size_time_and_inode_hold(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    entry = manifests.stat_entry(path.stat(), A)
    assert manifests.unchanged(entry, path.stat())
    path.write_bytes(b"12346")
    assert not manifests.unchanged(entry, path.stat())
    os.utime(path, ns=(entry["mtime"], entry["mtime"]))
    assert manifests.unchanged(entry, path.stat())  # this is what only a deep verification finds
    copy = tmp_path / "y"
    copy.write_bytes(b"12346")
    os.utime(copy, ns=(entry["mtime"], entry["mtime"]))
    assert not manifests.unchanged(entry, copy.stat())
    for broken in (None, {}, [], dict(entry, sha256="x"), dict(entry, sha256=None)):
        assert not manifests.unchanged(broken, path.stat())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"null", b'{"format": 99, "files": {"a": {}}}', b'{"format": 1, "files": [1]}', b'{"format": 1}']
)
def test_a_broken_marker_is_no_record(tmp_path, content):
    (tmp_path / manifests.MARKER).write_bytes(content)
    assert manifests.load_record(str(tmp_path)) == {}


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=120) | st.binary(max_size=120).map(lambda b: b.decode("latin-1")))
def test_no_text_gives_a_traceback(text):
    try:
        files = manifests.parse_manifest(text)
    except manifests.ManifestError:
        return
    assert all(not path.startswith("/") and ".." not in path.split("/") for path in files)
