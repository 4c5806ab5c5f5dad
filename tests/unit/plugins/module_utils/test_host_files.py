# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders and files that are made in one step and with the mode that was asked for."""

from __future__ import annotations

import os
import stat

import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils import host_files


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_open_to_others_whatever_the_umask_is(tmp_path, umask_077):
    host_files.make_folder(str(tmp_path / "a/b/c"))
    host_files.make_parents(str(tmp_path / "d/e/file"))
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/c", "d", "d/e")] == [0o755] * 5
    assert not (tmp_path / "d/e/file").exists()


def test_only_the_folder_itself_is_closed_and_one_that_is_there_stays_as_it_is(tmp_path, umask_077):
    host_files.make_folder(str(tmp_path / "a/keys"), 0o700)
    assert (mode(tmp_path / "a"), mode(tmp_path / "a/keys")) == (0o755, 0o700)
    host_files.make_folder(str(tmp_path / "a/keys"))
    assert mode(tmp_path / "a/keys") == 0o700


@pytest.mark.parametrize("what", ["file", "link to nowhere"])
def test_what_is_in_the_way_of_a_folder_is_named(tmp_path, what):
    place = tmp_path / "x"
    if what == "file":
        place.write_text("")
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError) as caught:
        host_files.make_folder(str(place / "y"))
    assert caught.value.filename == str(place)


def test_a_file_is_replaced_in_one_step(tmp_path, umask_077):
    path = tmp_path / "x"
    host_files.write_atomic(str(path), "one")
    first = path.stat().st_ino
    assert mode(path) == 0o644
    host_files.write_atomic(str(path), b"two", 0o600)
    assert path.read_text() == "two" and path.stat().st_ino != first and mode(path) == 0o600
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "target").write_text("not to be written through")
    (tmp_path / "x").symlink_to("target")
    host_files.write_atomic(str(tmp_path / "x"), "new")
    assert not (tmp_path / "x").is_symlink() and (tmp_path / "target").read_text() == "not to be written through"


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "FINDINGS.md"
    path.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        host_files.write_atomic(str(path), "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["FINDINGS.md"]
