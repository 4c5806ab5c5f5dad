# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of the rehearsal host that need no root: keys, caches, wheels for another Python, who holds the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[3] / "molecule/rehearsal_host"
sys.path.insert(0, str(HERE))

from rehearsal import base, common, machine, repository, wheelhouse  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "RUN", tmp_path / "run")
    for name in ("REHEARSAL_NAME", "REHEARSAL_SSH_PORT", "REHEARSAL_MIRROR"):
        monkeypatch.delenv(name, raising=False)


def test_cached_folder_is_built_once(tmp_path):
    built = []

    def build(work):
        built.append(work)
        (work / "file").write_text("x")

    for unused in range(2):
        assert (common.cached_folder(tmp_path / "c", "key", "test", build) / "file").read_text() == "x"
    assert len(built) == 1


def test_interrupted_build_is_not_used(tmp_path):
    def fail(work):
        (work / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        common.cached_folder(tmp_path / "c", "key", "test", fail)
    leftover = tmp_path / "c/.building-1"  # as a killed process leaves it
    leftover.mkdir()
    final = common.cached_folder(tmp_path / "c", "key", "test", lambda work: (work / "whole").write_text("x"))
    assert [path.name for path in final.iterdir()] == ["whole"]
    assert not leftover.exists()


def test_old_folders_go_but_not_those_in_use(tmp_path):
    for number in range(5):
        final = common.cached_folder(tmp_path / "c", f"k{number}", "test", lambda work: None, keep=2, in_use={"k0"})
        os.utime(final, (number, number))
    assert sorted(path.name for path in (tmp_path / "c").iterdir() if path.is_dir()) == ["k0", "k3", "k4"]


def test_same_tree_follows_its_source_and_keeps_the_folder(tmp_path):
    source, target = tmp_path / "s", tmp_path / "t"
    (source / "sub").mkdir(parents=True)
    (source / "sub/a").write_text("1")
    (target / "old").mkdir(parents=True)
    (target / "old/b").write_text("2")
    before = target.stat().st_ino
    assert common.same_tree(source, target)
    assert [str(path.relative_to(target)) for path in sorted(target.rglob("*"))] == ["sub", "sub/a"]
    assert target.stat().st_ino == before
    assert not common.same_tree(source, target)
    common.write(source / "sub/a", "changed")
    assert common.same_tree(source, target)
    assert (target / "sub/a").read_text() == "changed"


def test_tree_digest_sees_content_name_and_mode_but_no_leftovers(tmp_path):
    (tmp_path / "a").write_text("1")
    seen = {common.tree_digest(tmp_path)}
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.pyc").write_text("x")
    assert common.tree_digest(tmp_path) in seen
    (tmp_path / "a").write_text("2")
    seen.add(common.tree_digest(tmp_path))
    (tmp_path / "a").chmod(0o755)
    seen.add(common.tree_digest(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.add(common.tree_digest(tmp_path))
    assert len(seen) == 4


def test_markers_are_judged_for_the_host(monkeypatch):
    lock = (
        "# a comment\n"
        "both==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "old==2 ; python_full_version < '3.12' \\\n    --hash=sha256:cc\n"
        "new==3 ; python_version >= '3.13' and sys_platform == 'linux'\n"
        "other==4 ; sys_platform == 'win32'\n"
        "sglang==0.5.23+rehearsal \\\n    --hash=sha256:dd\n"
    )
    assert wheelhouse.for_target(lock) == ["both==1 --hash=sha256:aa --hash=sha256:bb", "new==3"]


def test_no_lock_of_the_real_engine_is_downloaded():
    names = [path.name for path in wheelhouse.files()]
    assert "engine.txt" in names
    assert next(path for path in wheelhouse.files() if path.name == "engine.txt").parent.name == "requirements"
    assert all(path.parent == HERE / "requirements" for path in wheelhouse.files() if path.name.startswith("engine"))


@pytest.mark.parametrize(
    "line, found",
    [
        ("deb http://mirror.example/debian bookworm main", "http://mirror.example/debian"),
        ("deb [signed-by=/k.gpg arch=amd64] https://mirror.example/x/debian/ bookworm main", "https://mirror.example/x/debian"),
        ("URIs: https://mirror.example/debian", "https://mirror.example/debian"),
        ("deb http://mirror.example/debian-security bookworm-security main", None),
        ("# deb http://mirror.example/debian bookworm main", None),
    ],
)
def test_mirror_comes_from_the_machines_sources(monkeypatch, tmp_path, line, found):
    (tmp_path / "sources.list").write_text(line + "\n")
    (tmp_path / "d").mkdir()
    real = Path
    monkeypatch.setattr(
        base, "Path", lambda name: real({"/etc/apt/sources.list": tmp_path / "sources.list", "/etc/apt/sources.list.d": tmp_path / "d"}.get(name, name))
    )
    assert base.mirror() == found


def test_packages_of_a_set_depend_only_on_each_other_and_debian():
    table = json.loads((repository.APT / "packages.json").read_text())
    debian = {"kmod", "libc6", "python3"}
    for name, packages in table["sets"].items():
        every = packages["packages"] + table["every_set"]
        known = {package["name"] for package in every} | {item for package in every for item in package.get("provides", [])}
        wanted = {item.split(" ")[0] for package in every for item in package.get("depends", [])}
        assert wanted <= known | debian, name


def test_maintainer_scripts_belong_to_packages():
    table = json.loads((repository.APT / "packages.json").read_text())
    names = {package["name"] for packages in [table["every_set"], *(one["packages"] for one in table["sets"].values())] for package in packages}
    for path in (repository.APT / "scripts").iterdir():
        assert path.stem in names and path.suffix in (".postinst", ".prerm"), path
    for path in (repository.APT / "files").iterdir():
        assert path.name in names, path


def test_process_knows_itself_and_not_another_with_its_pid():
    child = subprocess.Popen(["sleep", "60"])
    try:
        known = machine.Process(child.pid)
        assert known.alive()
        assert not machine.Process(child.pid, known.start + 1).alive()
    finally:
        child.kill()
        child.wait()
    assert not known.alive()


class TestHolder:
    @pytest.fixture
    def host(self):
        return machine.Machine()

    def hold(self, host, clone, **more):
        held = {
            "name": host.name,
            "clone": str(clone),
            "cache": str(common.cache_root()),
            "port": host.port,
            "base": base.key(),
            "guest": common.tree_digest(*machine.GUEST_FILES),
            "since": "2026-01-01T00:00:00+00:00",
            "supervisor": vars(machine.Process(os.getpid())),
            "nspawn": None,
            **more,
        }
        common.write(host.holder_file, json.dumps(held))
        return held

    def test_nobody(self, host):
        assert host.holder() is None
        common.write(host.holder_file, "{half")
        assert host.holder() is None

    def test_dead_holder_does_not_count(self, host):
        self.hold(host, common.CLONE, supervisor={"pid": os.getpid(), "start": 1})
        assert host.holder() is None

    def test_own_host_is_gone_on_with(self, host):
        self.hold(host, common.CLONE)
        assert host._keep(host.holder(), take_over=False, fresh=False)
        assert not host._keep(host.holder(), take_over=False, fresh=True)

    def test_own_host_on_another_base_is_not(self, host):
        self.hold(host, common.CLONE, base="other")
        assert not host._keep(host.holder(), take_over=False, fresh=False)

    def test_deleted_clone_is_taken_over(self, host, tmp_path):
        self.hold(host, tmp_path / "gone")
        assert not host._keep(host.holder(), take_over=False, fresh=False)

    def test_existing_clone_keeps_its_host_and_is_named(self, host, tmp_path):
        self.hold(host, tmp_path)
        with pytest.raises(common.Problem, match=f"{tmp_path}.*pid {os.getpid()}.*take-over"):
            host._keep(host.holder(), take_over=False, fresh=False)
        with pytest.raises(common.Problem, match="another clone"):
            host.down()
        assert not host._keep(host.holder(), take_over=True, fresh=False)


def test_without_root_one_line_says_what_to_run(monkeypatch, capsys):
    import host

    monkeypatch.setattr(host.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["host.py", "check"])
    assert host.main() == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "sudo make rehearse" in error


def test_missing_programs_are_named_with_their_packages(monkeypatch, capsys):
    import host

    monkeypatch.setattr(host.os, "geteuid", lambda: 0)
    monkeypatch.setattr(host.shutil, "which", lambda name, path=None: None if name in ("debootstrap", "systemd-nspawn") else name)
    monkeypatch.setattr(host, "FILES", {})
    monkeypatch.setattr(sys, "argv", ["host.py", "check"])
    assert host.main() == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "apt-get install --no-install-recommends debootstrap systemd-container" in error
