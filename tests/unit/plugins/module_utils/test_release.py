# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases: names, writing, damage, links, pruning."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.blackwell.dsv4.plugins.module_utils import host_files
from ansible_collections.blackwell.dsv4.plugins.module_utils import release as logic

FILES = [{"path": "units/a.service", "content": "WorkingDirectory=@RELEASE@/run\n", "mode": "0644"},
         {"path": "libexec/x.py", "content": "print(1)\n", "mode": "0755"}]


def write(root, files=None, links=None, inputs=None):
    files = files or FILES
    links = {} if links is None else links
    inputs = {} if inputs is None else inputs
    identifier = logic.release_id(files, links, inputs)
    return identifier, logic.build(str(root), identifier, files, links, inputs)


def test_a_release_holds_its_own_path_and_is_complete(tmp_path):
    venv = tmp_path / "venvs" / "engine-0123456789ab"
    venv.mkdir(parents=True)
    identifier, path = write(tmp_path, links={"engine": str(venv)})
    assert (tmp_path / "releases" / identifier / "units/a.service").read_text() == "WorkingDirectory=%s/run\n" % path
    assert logic.problems(path) == []
    assert os.stat(os.path.join(path, "libexec/x.py")).st_mode & 0o777 == 0o755
    assert os.listdir(os.path.join(path, "run")) == []
    assert [name for name in os.listdir(tmp_path / "releases") if name.startswith(".")] == []


def test_the_name_says_what_is_inside():
    base = logic.release_id(FILES, {}, {})
    assert logic.ID.match(base)
    assert base == logic.release_id(list(reversed(FILES)), {}, {})
    others = {
        logic.release_id([dict(FILES[0], content="x"), FILES[1]], {}, {}),
        logic.release_id([dict(FILES[0], mode="0600"), FILES[1]], {}, {}),
        logic.release_id(FILES, {"engine": "/a"}, {}),
        logic.release_id(FILES, {}, {"model": "m"}),
    }
    assert len(others | {base}) == 5


@pytest.mark.parametrize("harm,word", [
    (lambda path: os.unlink(os.path.join(path, "units/a.service")), "is missing"),
    (lambda path: open(os.path.join(path, "units/a.service"), "a").write("#"), "was changed"),
    (lambda path: os.unlink(os.path.join(path, "engine")), "does not point to"),
    (lambda path: os.rmdir(os.readlink(os.path.join(path, "engine"))), "which is gone"),
    (lambda path: os.unlink(os.path.join(path, "manifest.json")), "no readable manifest"),
    (lambda path: open(os.path.join(path, "manifest.json"), "w").write("{"), "no readable manifest"),
], ids=["file gone", "file changed", "link gone", "environment gone", "manifest gone", "manifest torn"])
def test_damage_is_seen_and_mended(tmp_path, harm, word):
    venv = tmp_path / "engine"
    venv.mkdir()
    identifier, path = write(tmp_path, links={"engine": str(venv)})
    harm(path)
    assert word in " ".join(logic.problems(path))
    venv.mkdir(exist_ok=True)
    write(tmp_path, links={"engine": str(venv)})
    assert logic.problems(path) == []


def test_a_full_disk_leaves_nothing_half(tmp_path, monkeypatch):
    def full(*unused):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logic, "_write", full)
    with pytest.raises(logic.ReleaseError, match="No space left"):
        write(tmp_path)
    assert os.listdir(tmp_path / "releases") == []


def test_the_service_user_may_read_it_whatever_the_umask_is(tmp_path, umask_077):
    unused, path = write(tmp_path / "root")
    for folder, unused, names in os.walk(tmp_path / "root"):
        assert os.stat(folder).st_mode & 0o777 == 0o755, folder
        assert all(os.stat(os.path.join(folder, name)).st_mode & 0o044 == 0o044 for name in names)
    assert os.path.isdir(os.path.join(path, "units"))


def test_what_a_killed_write_left_goes_away(tmp_path):
    (tmp_path / "releases" / ".0123456789ab.new" / "units").mkdir(parents=True)
    write(tmp_path)
    assert not (tmp_path / "releases" / ".0123456789ab.new").exists()


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a//b", "manifest.json"])
def test_paths_stay_inside(tmp_path, path):
    with pytest.raises(logic.ReleaseError, match="no path inside"):
        logic.check_path(path)


def test_links_of_a_to_b_and_back(tmp_path):
    root = str(tmp_path)
    a, unused = write(tmp_path)
    b, unused = write(tmp_path, inputs={"b": 1})

    def activate(identifier):
        served = {name: logic.linked(root, name) for name in ("current", "previous")}
        for name, target in sorted(logic.wanted_links(identifier, served).items(), reverse=True):
            if target:
                logic.switch(root, name, target)
        return logic.linked(root, "current"), logic.linked(root, "previous")

    assert activate(a) == (a, None)
    assert activate(a) == (a, None)
    assert activate(b) == (b, a)
    assert activate(b) == (b, a)
    assert activate(a) == (a, b)


def test_killed_between_the_links_ends_the_same():
    assert logic.wanted_links("b", {"current": "a", "previous": "a"}) == {"current": "b", "previous": "a"}


@pytest.mark.parametrize("then, previous", [("a", "p"), ("c", "a"), ("b", "a"), ("p", "a")])
def test_a_release_that_was_cut_is_never_previous(then, previous):
    """a served, p before it; a run over to b was cut, and the return point stayed open."""
    assert logic.wanted_links(then, {"current": "a", "previous": "p"}) == {"current": then, "previous": previous}


def test_a_link_is_taken_away(tmp_path):
    a, unused = write(tmp_path)
    logic.switch(str(tmp_path), "previous", a)
    logic.switch(str(tmp_path), "previous", None)
    assert logic.linked(str(tmp_path), "previous") is None


def test_a_stranger_at_the_link_is_no_release(tmp_path):
    (tmp_path / "current").symlink_to("/somewhere/else")
    assert logic.linked(str(tmp_path), "current") is None


def test_unit_differences_and_install(tmp_path):
    unused, path = write(tmp_path)
    units = tmp_path / "system"
    units.mkdir()
    assert list(logic.unit_differences(path, str(units), ["a.service"])) == ["a.service"]
    installed, wanted = logic.unit_differences(path, str(units), ["a.service"])["a.service"]
    assert installed is None
    host_files.write_atomic(str(units / "a.service"), wanted)
    assert logic.unit_differences(path, str(units), ["a.service"]) == {}
    assert os.stat(units / "a.service").st_mode & 0o777 == 0o644
    assert logic.releases_of_units(str(units), ["a.service"], str(tmp_path)) == {os.path.basename(path)}
    with pytest.raises(logic.ReleaseError, match="has no unit"):
        logic.unit_differences(path, str(units), ["b.service"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 7), keep=st.integers(1, 5), current=st.integers(0, 6), previous=st.integers(0, 6),
       fallback=st.integers(0, 6))
def test_pruning_never_takes_what_serves(tmp_path_factory, count, keep, current, previous, fallback):
    root = tmp_path_factory.mktemp("root")
    names = []
    for index in range(count):
        venv = root / "venvs" / ("engine-%012x" % index)
        venv.mkdir(parents=True)
        identifier, path = write(root, links={"engine": str(venv)}, inputs={"index": index})
        os.utime(os.path.join(path, "manifest.json"), (1000 + index, 1000 + index))
        names.append(identifier)
    assert logic.known(str(root)) == names
    marks = {"current": current, "previous": previous}
    for name, index in marks.items():
        if index < count:
            logic.switch(str(root), name, names[index])
    guarded = {names[index] for index in (current, previous, fallback) if index < count}
    gone, unused = logic.prunable(str(root), keep, [names[fallback]] if fallback < count else [])
    left = [name for name in names if name not in gone]
    assert not set(gone) & guarded
    assert len(left) == min(count, max(keep, len(guarded)))
    assert {os.path.basename(path) for path in unused} == {"engine-%012x" % names.index(name) for name in gone}
    # The oldest go first.
    free = [name for name in names if name not in guarded]
    assert gone == free[:len(gone)]


@pytest.mark.parametrize("made_with, gone, needed", [
    ([False, True], [], True), ([False, True], [1], False), ([False, False], [], False), ([True, True], [0], True), ([], [], False),
])
def test_keys_stay_as_long_as_a_release_needs_them(tmp_path, made_with, gone, needed):
    names = [write(tmp_path, inputs={"index": index, "api_key": key})[0] for index, key in enumerate(made_with)]
    key = tmp_path / "api-key"
    key.write_text("k", encoding="utf-8")
    found = logic.unneeded_keys(str(tmp_path), [names[index] for index in gone], [str(key), str(tmp_path / "never")])
    assert found == ([] if needed else [str(key)])


def test_manifest_is_plain_and_has_no_date(tmp_path):
    unused, path = write(tmp_path, inputs={"model": "m@1"})
    with open(os.path.join(path, "manifest.json"), encoding="utf-8") as stream:
        manifest = json.load(stream)
    assert set(manifest) == {"format", "id", "files", "links", "inputs"}
    assert manifest["inputs"] == {"model": "m@1"}
