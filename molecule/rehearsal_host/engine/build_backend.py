# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A PEP 517 backend for exactly this package, standard library only.

The wheel is a function of the sources: entries are sorted, stored without
compression and carry a fixed date, so every machine gets the same SHA-256 and
a hash-locked requirements file can name it.
"""
from __future__ import annotations

import base64
import hashlib
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATE = (2026, 1, 1, 0, 0, 0)


def _project() -> dict:
    return tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _metadata(project: dict) -> str:
    lines = [
        "Metadata-Version: 2.4",
        "Name: " + project["name"],
        "Version: " + project["version"],
        "Summary: " + project["description"],
        "Requires-Python: " + project["requires-python"],
        "License-Expression: " + project["license"],
    ]
    lines += ["Requires-Dist: " + item for item in project["dependencies"]]
    return "\n".join(lines) + "\n"


def _contents(project: dict) -> dict[str, bytes]:
    info = "{name}-{version}.dist-info".format(**project)
    source = HERE / "src"
    files = {
        path.relative_to(source).as_posix(): path.read_bytes()  # a link is followed: the flag table lies elsewhere
        for path in source.rglob("*")
        if path.is_file() and path.suffix in (".py", ".json")
    }
    files[info + "/METADATA"] = _metadata(project).encode()
    files[info + "/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: rehearsal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append("%s,sha256=%s,%d" % (name, digest, len(data)))
    record = info + "/RECORD"
    files[record] = ("\n".join(rows) + "\n%s,,\n" % record).encode()
    return files


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    project = _project()
    name = "{name}-{version}-py3-none-any.whl".format(**project)
    with zipfile.ZipFile(Path(wheel_directory) / name, "w", zipfile.ZIP_STORED) as wheel:
        for path, data in sorted(_contents(project).items()):
            entry = zipfile.ZipInfo(path, DATE)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            wheel.writestr(entry, data)
    return name


def build_sdist(sdist_directory, config_settings=None) -> str:
    raise NotImplementedError("this package is only ever built as a wheel")
