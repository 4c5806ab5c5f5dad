# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make or check the locks of this folder: NAME.in -> NAME.txt, every file of every package by sha256.

One lock serves Linux x86-64 with Python 3.11, 3.12 and 3.13; where versions differ a marker says so. NAME.overrides, for
NAME and NAME-*, says where a requirement of a requirement does not hold. Only metadata is fetched. Needs uv
(python -m pip install uv).

    python3 files/requirements/lock.py                  all locks anew, versions kept where they still fit
    python3 files/requirements/lock.py --upgrade router newest versions for one of them
    python3 files/requirements/lock.py --check          exit 1 when a lock does not hold what its .in asks for
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = "3.11"
HEADER = ("# Made by files/requirements/lock.py from {name}.in; don't edit.\n"
          "# Linux x86-64, Python 3.11 to 3.13; install with pip --require-hashes --no-deps.\n")
PROJECT = """[tool.uv]
environments = ["sys_platform == 'linux' and platform_machine == 'x86_64' and python_version < '3.14'"]
"""
# Locked without their requirements.
ALONE = ("benchmark",)
COMMON = ("python_full_version < '3.14'", "platform_machine == 'x86_64'", "sys_platform == 'linux'")


def compile_lock(name, upgrade):
    """The text of a lock."""
    uv = shutil.which("uv")
    command = [uv] if uv else [sys.executable, "-m", "uv"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
        result = Path(folder) / "lock.txt"
        present = HERE / (name + ".txt")
        if present.exists() and not upgrade:
            result.write_text(present.read_text(encoding="utf-8"), encoding="utf-8")
        argv = command + ["pip", "compile", str(HERE / (name + ".in")), "--universal", "--python-version", PYTHON,
                          "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url",
                          "--quiet", "-o", str(result)]
        overrides = HERE / (name.split("-")[0] + ".overrides")
        if overrides.exists():
            argv += ["--override", str(overrides)]
        if name in ALONE:
            argv.append("--no-deps")
        if upgrade:
            argv.append("--upgrade")
        subprocess.run(argv, check=True, cwd=folder)
        text = re.sub(r"(?m)^#.*\n", "", result.read_text(encoding="utf-8"))
        # What every line says goes into the header once.
        for part in COMMON:
            text = re.sub(r"(?m)^(\S+ ;.*?)(?: and )?%s" % re.escape(part), r"\1", text)
        text = re.sub(r"(?m)^(\S+) ;[ ]+(?:and )?", r"\1 ; ", text)
        return HEADER.format(name=name) + re.sub(r"(?m)^(\S+) ;\s*(\\?)$", r"\1 \2", text)


def pins(text):
    """{name: {versions}} of a lock or of an .in file."""
    found = {}
    for match in re.finditer(r"(?m)^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)", text):
        found.setdefault(re.sub(r"[-_.]+", "-", match.group(1)).lower(), set()).add(match.group(2))
    return found


def main(argv=None):
    """Lock, or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="locks to make, all without")
    parser.add_argument("--upgrade", action="store_true", help="take newest versions where the .in file allows them")
    parser.add_argument("--check", action="store_true", help="compare .in and .txt without the network")
    given = parser.parse_args(argv)
    names = given.names or sorted(path.stem for path in HERE.glob("*.in"))
    wrong = 0
    for name in names:
        lock = HERE / (name + ".txt")
        if given.check:
            wanted = pins((HERE / (name + ".in")).read_text(encoding="utf-8"))
            locked = pins(lock.read_text(encoding="utf-8")) if lock.exists() else {}
            for package, versions in wanted.items():
                if not versions <= locked.get(package, set()):
                    wrong += 1
                    print("%s.txt: %s is not locked to %s" % (name, package, ", ".join(sorted(versions))))
            continue
        text = compile_lock(name, given.upgrade)
        if not lock.exists() or lock.read_text(encoding="utf-8") != text:
            lock.write_text(text, encoding="utf-8")
            print("%s.txt: %d packages" % (name, len(pins(text))))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
