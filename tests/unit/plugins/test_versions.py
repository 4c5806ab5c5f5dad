# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No documentation names a version of the collection that is yet to come."""

from __future__ import annotations

import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]


def number(version):
    return tuple(int(part) for part in version.split("."))


def test_nothing_was_added_in_a_later_version_than_this():
    now = number(yaml.safe_load((ROOT / "galaxy.yml").read_text(encoding="utf-8"))["version"])
    said = {}
    for path in sorted((ROOT / "plugins").rglob("*")):
        if path.suffix in (".py", ".yml"):
            said.update({path.name: version for version in re.findall(r'^\s*version_added: "([0-9.]+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)})
    assert said, "no plugin says when it was added"
    assert {name: version for name, version in said.items() if number(version) > now} == {}
