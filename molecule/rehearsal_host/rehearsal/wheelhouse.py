# SPDX-License-Identifier: GPL-3.0-or-later
"""The wheelhouse: every wheel that the requirement files name, for the Python of the rehearsal host.

files/requirements/*.txt is what a real host gets, and this one too, but for the engine: engine*.txt is 10 GB of CUDA libraries.
requirements/*.txt beside this package names the rehearsal engine instead; a file of the same name there takes the other's place.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from .common import CLONE, HERE, Problem, cache_root, cached_folder, digest, file_digest, run, say, tree_digest

PYTHON = "3.13"  # of the suite in base.py
GLIBC = range(41, 4, -1)  # manylinux_2_41 and all before it
ENGINE = HERE / "engine"
APART = ("benchmark",)  # in a folder of its own: pip would take the rehearsal engine for the sglang that this lock names
LOCAL = "+rehearsal"  # a version of our own: built here, not downloaded; whoever installs it compares the hash


def files() -> list[Path]:
    found = {path.name: path for path in (CLONE / "files/requirements").glob("*.txt") if not path.name.startswith("engine")}
    found.update({path.name: path for path in (HERE / "requirements").glob("*.txt")})
    return [found[name] for name in sorted(found)]


def ensure() -> Path:
    store = cache_root() / "wheels"
    parts = []
    if (ENGINE / "build_backend.py").is_file():
        parts.append(cached_folder(store / "engine", tree_digest(ENGINE), "wheel of the rehearsal engine", _build_engine))
    for path in files():
        parts.append(wheels_of(path, store / path.stem))
    return cached_folder(store / "all", digest(APART, [str(part) for part in parts]), "wheelhouse", lambda work: _join(parts, work))


def for_target(text: str) -> list[str]:
    """The requirements that hold for the host's Python, without their markers: pip would judge markers by the Python it runs on."""
    from pip._vendor.packaging.markers import Marker

    target = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.5", "sys_platform": "linux", "platform_machine": "x86_64",
              "platform_system": "Linux", "implementation_name": "cpython", "platform_python_implementation": "CPython", "os_name": "posix"}
    lines = []
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line or LOCAL in line:
            continue
        requirement, *hashes = re.split(r"\s+(?=--hash=)", line)
        name, unused, marker = (part.strip() for part in requirement.partition(";"))
        if not marker or Marker(marker).evaluate(target):
            lines.append(" ".join([name, *hashes]))
    return lines


def engine_lock(wheelhouse: Path) -> str:
    """requirements/engine.txt with the hash of the engine's wheel as it lies in the wheelhouse: whoever changes the engine need not lock it anew."""
    wheel = next(wheelhouse.glob(f"sglang-*{LOCAL}-*.whl"))
    requirement = f"sglang=={wheel.name.split('-')[1]} --hash=sha256:{file_digest(wheel)}"
    return "".join(f"{line}\n" for line in [*for_target((HERE / "requirements/engine.txt").read_text()), requirement])


def wheels_of(path: Path, store: Path) -> Path:
    what = f"wheels of {path.relative_to(CLONE)}"
    return cached_folder(store, digest(PYTHON, path.read_text()), what, lambda work: _download(path, work))


def _build_engine(work: Path) -> None:
    """By the package's own backend, which needs nothing but the standard library."""
    spec = importlib.util.spec_from_file_location("rehearsal_engine_backend", ENGINE / "build_backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    backend.build_wheel(str(work))


def _download(path: Path, work: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise Problem(f"{sys.executable} has no pip: use `make rehearse`, which has a virtual environment, or install python3-pip")
    wanted = work / "requirements.txt"
    wanted.write_text("".join(f"{line}\n" for line in for_target(path.read_text())))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    argv = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--dest", str(work), "--only-binary=:all:",
            "--implementation=cp", f"--python-version={PYTHON}", *(f"--platform={platform}" for platform in platforms),
            "--requirement", str(wanted)]
    if "--hash=" in path.read_text():
        argv.append("--no-deps")  # a lock is complete
    run(argv, name=f"pip download of {path.relative_to(CLONE)}")
    wanted.unlink()
    say(f"  {path.name}: {len(list(work.iterdir()))} wheels, {sum(wheel.stat().st_size for wheel in work.iterdir()) / 1e6:.0f} MB")


def _join(parts: list[Path], work: Path) -> None:
    for part in parts:
        place = work / part.parent.name if part.parent.name in APART else work
        place.mkdir(exist_ok=True)
        for wheel in part.iterdir():
            if not (place / wheel.name).exists():
                try:
                    os.link(wheel, place / wheel.name)
                except OSError:
                    shutil.copy2(wheel, place / wheel.name)
