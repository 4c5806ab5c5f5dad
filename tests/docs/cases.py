# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write roles/nvidia_driver/CASES.md: each reported case of driver and host, what is expected, what is given, and where it is tested.

usage: cases.py [--host] [--check]

The rows are what the tests note through the fixture ``outcome``. The unit tests run each time. The rows of the booted host stay as they
are unless --host runs those tests too (as root, a quarter of an hour). With --check nothing is written and the exit status is 1 when the page is
behind, a case is missing, or a row of the booted host names a test that is not there.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "roles/nvidia_driver/CASES.md"
UNIT = [f"tests/unit/plugins/module_utils/test_{name}.py" for name in ("boot_wait", "driver", "gpu_info", "preflight")]
UNIT.append("tests/unit/roles/test_nvidia_driver.py")
HOST = "tests/host/test_rehearsal_host.py"
CASES = [
    *(f"DRV-{number:02d}" for number in (1, 2, 4, 6, 8, 9, 11, 12, 13, 14, 15)),
    *(f"FAB-{number:02d}" for number in (1, 2, 4, 9, 14, 15)),
    "KRN-05",
    *(f"ANS-{number:02d}" for number in (1, 2, 4, 5, 6, 9, 10)),
]
HEAD = """# Reported failures, and what driver and preflight make of them

Each case is a test by its id, with the layer behind it where several try it (`-guard`: the role before it changes anything). Recorded outputs are
tried in the unit tests, real apt, SSH, systemd and reboots on a host that is booted for it (`-booted`, `make host-cases`). Written by
`tests/docs/cases.py`, which runs the tests and takes down what they were given.

| case | expected | given | in its own words | test |
|---|---|---|---|---|
"""


def noted(files: list[str]) -> list[dict[str, str]]:
    """What the tests of these files note; the run has to pass."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as notes:
        environment = {**os.environ, "CASES_NOTED": notes.name, "PYTHONPATH": ".collections"}
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *files], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        return [json.loads(line) for line in open(notes.name, encoding="utf-8")]


def cell(text: str, length: int = 200) -> str:
    text = " ".join(text.replace("`", "").split()).replace("|", "\\|")
    return text if len(text) <= length else text[: length - 2].rsplit(" ", 1)[0] + " …"


def rows(notes: list[dict[str, str]]) -> list[str]:
    """A row for each case that a test stands for; one test of a booted host can stand for several."""
    lines = []
    for note in notes:
        path, _colons, name = note["test"].partition("::")
        where = f"`{path.rsplit('/', 1)[1]}` {name.split('[')[0]}"
        for case in re.findall(r"[A-Z]{3}-\d\d(?:-[a-z][a-z0-9-]*?)?(?=-and-|-open$|-proprietary$|$)", note["case"]):
            if case[:6] in CASES:
                lines.append(f"| {case} | {cell(note['expected'])} | {cell(note['given'])} | {cell(note['says'])} | {where} |")
    return sorted(set(lines), key=lambda line: (CASES.index(line[2:8]), line))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", action="store_true", help="run the tests of the booted host too")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when the page is behind")
    wanted = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    kept = [line for line in before.splitlines() if line.startswith("| ") and f"`{HOST.rsplit('/', 1)[1]}`" in line]
    lines = rows(noted(UNIT)) + (rows(noted([HOST])) if wanted.host else kept)
    lines.sort(key=lambda line: (CASES.index(line[2:8]), line[2:].split(" ", 1)[0]))
    after = HEAD + "\n".join(lines) + "\n"
    problems = [f"{case} has no row" for case in CASES if not any(line.startswith(f"| {case}") for line in lines)]
    tests = (ROOT / HOST).read_text(encoding="utf-8")
    problems += [f"no such test: {line}" for line in kept if f"def {line.rsplit(' ', 2)[1]}(" not in tests]
    if wanted.check:
        problems += list(difflib.unified_diff(before.splitlines(), after.splitlines(), "committed", "now", lineterm=""))
    else:
        PAGE.write_text(after, encoding="utf-8")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
