# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""host_files as Ansible runs it: what check mode foresees is what is done, and a second call does nothing."""

from __future__ import annotations

import pathlib
import stat
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "module_utils"))

from test_probe_cases import run_module  # noqa: E402


def mode(path):
    return "%04o" % stat.S_IMODE(path.stat().st_mode)


def call(files, **extra):
    return run_module("host_files", dict({"files": files}, **extra))


def entries(folder):
    """One of each kind, on a folder that tree() made."""
    return [
        {"path": str(folder / "keys"), "state": "directory", "mode": "0700"},
        {"path": str(folder / "deep/er/new.conf"), "content": "a\n"},
        {"path": str(folder / "old.conf"), "content": "after\n"},
        {"path": str(folder / "right.conf"), "content": "right\n"},
        {"path": str(folder / "open.conf"), "content": "secret\n", "mode": "0600"},
        {"path": str(folder / "link.conf"), "content": "no link\n"},
        {"path": str(folder / "gone.conf"), "state": "absent"},
        {"path": str(folder / "gone"), "state": "absent"},
        {"path": str(folder / "never"), "state": "absent"},
    ]


def tree(folder):
    for name, text in (("old.conf", "before\n"), ("right.conf", "right\n"), ("open.conf", "secret\n"), ("gone.conf", "x\n"),
                       ("target", "not to be written through\n")):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o644)
    (folder / "link.conf").symlink_to(folder / "target")
    (folder / "gone/in").mkdir(parents=True)
    (folder / "gone/in/file").write_text("x", encoding="utf-8")


CHANGED = ["keys", "deep/er/new.conf", "old.conf", "open.conf", "link.conf", "gone.conf", "gone"]


def test_check_mode_says_what_is_then_done_and_the_second_call_does_nothing(tmp_path):
    tree(tmp_path)
    before = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    foreseen = call(entries(tmp_path), _ansible_check_mode=True, _ansible_diff=True)
    assert {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "deep").exists() and mode(tmp_path / "open.conf") == "0644"
    done = call(entries(tmp_path), _ansible_diff=True)
    for answer in (foreseen, done):
        assert answer["changed"] is True and answer["paths"] == [str(tmp_path / name) for name in CHANGED]
    assert done["diff"] == foreseen["diff"]
    assert (tmp_path / "deep/er/new.conf").read_text(encoding="utf-8") == "a\n"
    assert (tmp_path / "old.conf").read_text(encoding="utf-8") == "after\n"
    assert not (tmp_path / "link.conf").is_symlink() and (tmp_path / "target").read_text(encoding="utf-8").startswith("not to be")
    assert not (tmp_path / "gone").exists() and not (tmp_path / "gone.conf").exists()
    assert [mode(tmp_path / name) for name in ("keys", "deep", "deep/er", "deep/er/new.conf", "open.conf")] == [
        "0700", "0755", "0755", "0644", "0600"]
    again = call(entries(tmp_path), _ansible_diff=True)
    assert again["changed"] is False and again["paths"] == [] and again["diff"] == []


def test_the_diff_shows_contents_and_modes(tmp_path):
    tree(tmp_path)
    shown = {item["before_header"]: item for item in call(entries(tmp_path), _ansible_check_mode=True)["diff"]}
    assert (shown[str(tmp_path / "old.conf")]["before"], shown[str(tmp_path / "old.conf")]["after"]) == ("before\n", "after\n")
    assert (shown[str(tmp_path / "deep/er/new.conf")]["before"], shown[str(tmp_path / "deep/er/new.conf")]["after"]) == ("", "a\n")
    assert '"0644"' in shown[str(tmp_path / "open.conf")]["before"] and '"0600"' in shown[str(tmp_path / "open.conf")]["after"]


@pytest.mark.parametrize("entry, word", [
    ({"path": "gone", "content": "x"}, "is a folder, where a file belongs"),
    ({"path": "old.conf", "state": "directory"}, "in the way of a folder"),
    ({"path": "x"}, "content"),
], ids=["file", "folder", "content"])
def test_what_is_in_the_way_is_named_and_left_alone(tmp_path, entry, word):
    tree(tmp_path)
    answer = call([dict(entry, path=str(tmp_path / entry["path"]))])
    assert answer["failed"] is True and word in answer["msg"]
    assert (tmp_path / "gone/in/file").exists() and (tmp_path / "old.conf").read_text(encoding="utf-8") == "before\n"


def test_a_folder_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "room").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "room")
    folder = [{"path": str(tmp_path / "link"), "state": "directory", "mode": "0755"}]
    assert call(folder)["changed"] is True and call(folder)["changed"] is False
    assert (tmp_path / "link").is_symlink() and mode(tmp_path / "room") == "0755"


def test_a_root_for_paths_that_do_not_begin_with_a_slash(tmp_path):
    answer = call([{"path": "units/a", "content": "a"}, {"path": str(tmp_path / "b"), "content": "b"}], root=str(tmp_path / "in"))
    assert answer["paths"] == [str(tmp_path / "in/units/a"), str(tmp_path / "b")]
    assert (tmp_path / "in/units/a").read_text(encoding="utf-8") == "a" and (tmp_path / "b").exists()


def test_an_owner_for_all_and_one_for_a_path(tmp_path):
    path = tmp_path / "x"
    answer = call([{"path": str(path), "content": ""}], owner=str(path.parent.stat().st_uid), group=str(path.parent.stat().st_gid))
    assert answer["changed"] is True and path.stat().st_uid == path.parent.stat().st_uid
    unknown = call([{"path": str(path), "content": "", "owner": "no-such-user"}])
    assert unknown["failed"] is True and "no-such-user" in unknown["msg"]
