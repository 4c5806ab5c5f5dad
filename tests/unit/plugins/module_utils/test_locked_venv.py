# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Environments from locks: what is fit, what names them, what a torn build leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_probe_cases import run_module  # noqa: E402

from ansible_collections.blackwell.dsv4.plugins.module_utils import locked_venv as logic  # noqa: E402

REQUIREMENTS = Path(__file__).resolve().parents[4] / "files/requirements"
HASH = "--hash=sha256:" + "0" * 64
LOCK = "# made by\na==1.0 ; python_full_version < '3.12' \\\n    %s \\\n    %s\nB_c[x]==2 %s\n" % (HASH, HASH, HASH)


@pytest.mark.parametrize("name", sorted(path.name for path in REQUIREMENTS.glob("*.txt")))
def test_committed_locks_are_fit(name):
    assert logic.problems_of_lock((REQUIREMENTS / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("lock,versions", [
    ("engine.txt", {"sglang": "0.5.23", "torch": "2.14.1", "mooncake-transfer-engine-cuda13": "0.3.14",
                    "deepseek-recipe": "0.2.0", "flashinfer-python": "0.7.2"}),
    ("engine-nixl.txt", {"sglang": "0.5.23", "nixl-cu13": "1.5.1"}),
    ("router.txt", {"sglang-router": "0.3.2"}),
    ("router-smg.txt", {"smg": "1.13.0"}),
])
def test_locks_hold_what_the_design_fixes(lock, versions):
    lines = logic.logical_lines((REQUIREMENTS / lock).read_text(encoding="utf-8"))
    pins = dict(filter(None, map(logic.pin_of, lines)))
    assert {name: pins.get(name) for name in versions} == versions
    if lock.startswith("router"):
        assert "sglang" not in pins and "torch" not in pins


def test_lines_are_joined_and_split():
    assert logic.logical_lines(LOCK) == ["a==1.0 ; python_full_version < '3.12' %s %s" % (HASH, HASH), "B_c[x]==2 " + HASH]
    assert logic.split_lock("--index-url x\na==1\nb==2 %s\n" % HASH) == (["--index-url x"], ["b==2 " + HASH], ["a==1"])
    assert logic.pin_of("B_c[x]==2 " + HASH) == ("b-c", "2")


@pytest.mark.parametrize("lock,word", [
    ("", "names no package"), ("a\n", "not pinned"), ("a>=1 %s\n" % HASH, "not pinned"), ("a==1\n", "has no hash"),
    ("--index-url x\na==1 %s\n" % HASH, "not for a lock"), ("a @ file:///x\n", "not pinned"),
])
def test_unfit_locks_are_named(lock, word):
    assert word in "; ".join(logic.problems_of_lock(lock))


def test_hashes_may_be_waived():
    assert logic.problems_of_lock("a==1\n", require_hashes=False) == []


def test_the_name_follows_what_is_inside(tmp_path):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    wheel.write_bytes(b"one")
    base = logic.venv_key(LOCK, "3.13.5 CPython", [str(wheel)], "probe")
    assert base == logic.venv_key("\n".join(reversed(logic.logical_lines(LOCK))), "3.13.5 CPython", [str(wheel)], "probe")
    keys = {base, logic.venv_key(LOCK + "c==1 %s\n" % HASH, "3.13.5 CPython", [str(wheel)], "probe"),
            logic.venv_key(LOCK, "3.12.1 CPython", [str(wheel)], "probe"), logic.venv_key(LOCK, "3.13.5 CPython"),
            logic.venv_key(LOCK, "3.13.5 CPython", [str(wheel)], "other")}
    wheel.write_bytes(b"two")
    keys.add(logic.venv_key(LOCK, "3.13.5 CPython", [str(wheel)], "probe"))
    assert len(keys) == 6


def test_wheels_of_unhashed_pins_are_found(tmp_path):
    for name in ("sglang-0.5.23+rehearsal-py3-none-any.whl", "sglang_router-0.3.2-py3-none-any.whl", "sglang-1-py3-none-any.whl"):
        (tmp_path / name).write_bytes(b"")
    found = logic.wheels_of(["sglang==0.5.23+rehearsal"], str(tmp_path))
    assert [os.path.basename(path) for path in found] == ["sglang-0.5.23+rehearsal-py3-none-any.whl"]
    assert logic.wheels_of(["sglang==0.5.23"], "") == []


def test_pip_gets_no_address_as_an_argument(tmp_path):
    environment = logic.pip_environment("https://user:pw@index", "/ca.crt", "http://proxy", {"PIP_X": "1", "PATH": "/bin",
                                                                                             "PYTHONPATH": "/x"})
    assert environment["PIP_INDEX_URL"] == "https://user:pw@index" and environment["PIP_CERT"] == "/ca.crt"
    assert "PIP_X" not in environment and "PYTHONPATH" not in environment and environment["PATH"] == "/bin"
    steps = logic.pip_steps("p", ["a==1 " + HASH], ["b==2"], ["/w.whl"], "/wheels", str(tmp_path))
    assert all("--no-index" in step for step in steps)
    assert "--require-hashes" in steps[0] and "--require-hashes" not in steps[1] and steps[2][-1] == "/w.whl"
    assert not any("pw@" in word for step in steps for word in step)


class Runner:
    """Stands for subprocesses: makes the venv's folder, fails at the n-th call."""

    def __init__(self, path, fail_at=None, output="boom"):
        self.path, self.fail_at, self.output, self.calls = path, fail_at, output, []

    def __call__(self, argv, environment, log=None):
        self.calls.append(argv)
        if "install" in argv:
            assert environment["TMPDIR"].startswith(self.path) and os.path.isdir(environment["TMPDIR"])
        if self.fail_at == len(self.calls):
            return 1, self.output
        if "venv" in argv:
            os.makedirs(os.path.join(self.path, "bin"))
            Path(self.path, "bin", "python").write_text("")
        if "-c" in argv:
            return 0, "noise\n{\"torch\": \"2\"}\n"
        if "list" in argv:
            return 0, json.dumps([{"name": "a", "version": "1.0"}])
        return 0, ""


def test_the_marker_comes_last_and_a_torn_build_is_made_anew(tmp_path):
    path = str(tmp_path / "engine-1")
    for fail_at in (1, 2, 3, 4):
        with pytest.raises(logic.VenvError):
            logic.build(path, "k", LOCK, "python3", "3.13", probe="x", run=Runner(path, fail_at))
        assert not logic.is_complete(path, "k") and not os.path.exists(os.path.join(path, logic.MARKER))
        Path(path).mkdir(exist_ok=True)
        (Path(path) / "leftover").write_text("")
    marker = logic.build(path, "k", LOCK, "python3", "3.13", probe="x", run=Runner(path))
    assert marker["facts"] == {"torch": "2"} and marker["packages"] == {"a": "1.0"}
    assert logic.is_complete(path, "k") and not logic.is_complete(path, "other")
    assert not (Path(path) / "leftover").exists() and not (Path(path) / ".build").exists()
    os.unlink(os.path.join(path, "bin", "python"))
    assert not logic.is_complete(path, "k")


def test_something_else_at_the_place_is_not_removed(tmp_path):
    path = tmp_path / "engine-1"
    path.symlink_to(tmp_path)
    with pytest.raises(logic.VenvError, match="in the way"):
        logic.build(str(path), "k", LOCK, "python3", "3.13", run=Runner(str(path)))


@pytest.mark.parametrize("output,word", [
    ("OSError: [Errno 28] No space left on device", "no space"),
    ("ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)", "wheel folder"),
    ("ERROR: No matching distribution found for sglang-router==0.3.2", "(sglang-router==0.3.2)"),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "not the one that the lock names"),
    ("ssl.SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED", "CA bundle"),
    ("Failed to establish a new connection: NewConnectionError", "can't be reached"),
    ("anything", "pip install failed"),
])
def test_pips_failures_in_one_sentence(output, word):
    assert word in logic.explain(output)


def test_pip_check_and_what_is_left_out_on_purpose(tmp_path):
    output = "sglang 0.5.23 requires outlines, which is not installed.\nx 1 has requirement y==2, but you have y 3.\n"
    assert logic.check_problems(output, ["Outlines"]) == ["x 1 has requirement y==2, but you have y 3."]
    assert len(logic.check_problems(output)) == 2
    assert logic.check_problems(output, ["*"]) == ["x 1 has requirement y==2, but you have y 3."]
    path = str(tmp_path / "engine-1")

    class Incomplete(Runner):
        def __call__(self, argv, environment, log=None):
            answer = super().__call__(argv, environment, log)
            return (1, output.splitlines()[0]) if argv[-1] == "check" else answer

    with pytest.raises(logic.VenvError, match="requires outlines"):
        logic.build(path, "k", LOCK, "python3", "3.13", run=Incomplete(path))
    assert logic.build(path, "k", LOCK, "python3", "3.13", missing_ok=["outlines"], run=Incomplete(path))


def test_an_interpreter_that_is_not_there():
    with pytest.raises(logic.VenvError, match="does not run"):
        logic.python_version("/nonexistent/python")
    assert logic.python_version(sys.executable).startswith("3.")


def test_a_python_that_the_lock_does_not_serve_is_refused_before_anything_is_made(tmp_path):
    lock = "dsv4-small==1.0 --hash=sha256:%s\n" % ("0" * 64)
    answer = run_module("locked_venv", {"root": str(tmp_path / "venvs"), "name": "x", "lock": lock, "python": sys.executable,
                                        "python_versions": ["3.1"]})
    assert answer["failed"] is True and "the lock serves 3.1." in answer["msg"] and sys.executable in answer["msg"]
    assert list(tmp_path.iterdir()) == []


def test_others_may_enter_the_folders_whatever_the_umask_is(tmp_path, umask_077):
    logic.build(str(tmp_path / "root/venvs/x"), "k", LOCK, "python3", "3.13", run=Runner(str(tmp_path / "root/venvs/x")))
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("root", "root/venvs")] == [0o755, 0o755]


def small_wheel(folder, name="dsv4_small", version="1.0"):
    """A real wheel with one module; returns (path, sha256)."""
    path = folder / ("%s-%s-py3-none-any.whl" % (name, version))
    files = {"%s.py" % name: "VALUE = 7\n",
             "%s-%s.dist-info/METADATA" % (name, version): "Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (name, version),
             "%s-%s.dist-info/WHEEL" % (name, version): "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    record = "".join("%s,sha256=%s,%d\n" % (file, base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(
        b"=").decode(), len(text)) for file, text in files.items())
    files["%s-%s.dist-info/RECORD" % (name, version)] = record + "%s-%s.dist-info/RECORD,,\n" % (name, version)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_real_environment_from_a_wheel_folder(tmp_path, monkeypatch):
    # A host's own settings that would refuse or misplace what the lock names.
    (tmp_path / "constraints.txt").write_text("dsv4-small<1\n")
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text("[global]\nconstraint = %s/constraints.txt\nuser = true\n" % tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    unused, digest = small_wheel(wheels)
    lock = "dsv4-small==1.0 --hash=sha256:%s\n" % digest
    version = logic.python_version(sys.executable)
    key = logic.venv_key(lock, version)
    path = str(tmp_path / ("x-" + key))
    marker = logic.build(path, key, lock, sys.executable, version, wheel_dir=str(wheels), log=str(tmp_path / "log"),
                         probe="import dsv4_small, json; print(json.dumps({'value': dsv4_small.VALUE}))")
    assert marker["facts"] == {"value": 7} and marker["packages"]["dsv4-small".replace("-", "_")] == "1.0"
    assert logic.is_complete(path, key)
    wrong = "dsv4-small==1.0 --hash=sha256:%s\n" % ("0" * 64)
    with pytest.raises(logic.VenvError, match="not the one that the lock names"):
        logic.build(path + "b", "k", wrong, sys.executable, version, wheel_dir=str(wheels))
