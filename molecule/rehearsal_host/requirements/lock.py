# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the hash-locked requirements of the rehearsal engine, or bring its own wheel up to date.

    python lock.py             resolve anew with pip (needs an index) and write engine.txt
    python lock.py --wheel     only the line of the local wheel, no network
    python lock.py --check     exit 1 when that line does not fit the sources
    python lock.py --wheelhouse DIR   put the local wheel into DIR (for `pip install --find-links DIR`)

The wheel of the engine is built here and nowhere else; its build is
reproducible, so its hash stands in the lock like any other.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINE = HERE.parent / "engine"
LOCK = HERE / "engine.txt"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ["manylinux_2_%d_x86_64" % minor for minor in (28, 27, 24, 17, 12, 5)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
]
HEAD = """\
# The rehearsal engine and all that it needs, for x86-64 Linux and Python 3.11 to 3.13.
# Written by lock.py beside this file. The wheel of sglang {version} is built from ../engine.
"""


def build(folder: Path) -> Path:
    spec = importlib.util.spec_from_file_location("build_backend", ENGINE / "build_backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    return folder / backend.build_wheel(str(folder))


def wheel_entry() -> str:
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        name, version = wheel.name.split("-")[:2]
        return entry(name, version, {hashlib.sha256(wheel.read_bytes()).hexdigest()})


def entry(name: str, version: str, hashes: set[str]) -> str:
    return "%s==%s%s" % (name, version, "".join(" \\\n    --hash=sha256:" + item for item in sorted(hashes)))


def resolve() -> list[str]:
    wanted = re.findall(r'^    "([^"]+==[^"]+)",$', (ENGINE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    found: dict[str, tuple[str, set[str]]] = {}
    for python in PYTHONS:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            "-",
            "--only-binary",
            ":all:",
            "--target",
            "unused",
            "--python-version",
            python,
        ]
        for platform in PLATFORMS:
            command += ["--platform", platform]
        report = json.loads(subprocess.run(command + wanted, check=True, stdout=subprocess.PIPE).stdout)
        for item in report["install"]:
            name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
            known = found.setdefault(name, (version, set()))
            if known[0] != version:
                raise SystemExit("%s: %s for one Python, %s for another" % (name, known[0], version))
            known[1].add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    return [entry(name, version, hashes) for name, (version, hashes) in sorted(found.items())]


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = cli.add_mutually_exclusive_group()
    what.add_argument("--wheel", action="store_true", help="only the line of the local wheel, no network")
    what.add_argument("--check", action="store_true", help="exit status 1 when that line does not fit the sources")
    what.add_argument("--wheelhouse", type=Path, metavar="DIR", help="put the local wheel into DIR")
    options = cli.parse_args()
    if options.wheelhouse:
        print(build(options.wheelhouse))
        return 0
    own = wheel_entry()
    if options.check:
        fits = own in LOCK.read_text(encoding="utf-8")
        print("%s %s the sources in %s" % (LOCK, "fits" if fits else "does not fit", ENGINE))
        return 0 if fits else 1
    if options.wheel:
        entries = [item for item in re.split(r"\n(?=\S)", LOCK.read_text(encoding="utf-8").strip()) if not item.startswith(("#", "sglang=="))]
    else:
        entries = resolve()
    LOCK.write_text(HEAD.format(version=own.split("==")[1].split()[0]) + "\n".join(entries + [own]) + "\n", encoding="utf-8")
    print("%s: %d packages" % (LOCK, len(entries) + 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
