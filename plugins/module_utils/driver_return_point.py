# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Return points of the driver: which packages, holds and files a host had before a change, numbered from 1."""

from __future__ import annotations

import json
import os
import re
import typing as t

from . import host_files

NAME = re.compile(r"^(\d{4,})\.json$")


class ReturnPointError(ValueError):
    """There is no such return point, or it cannot be read; the message says which and why."""


def numbers(folder: str) -> list[int]:
    """Numbers of the return points, oldest first."""
    try:
        found = (NAME.match(name) for name in os.listdir(folder))
    except OSError:
        return []
    return sorted(int(match.group(1)) for match in found if match)


def path_of(folder: str, number: int) -> str:
    return os.path.join(folder, f"{number:04d}.json")


def load(folder: str, number: int | None = None) -> dict[str, t.Any]:
    """A return point with its number, the newest when none is named."""
    known = numbers(folder)
    if number is None:
        if not known:
            raise ReturnPointError(f"{folder} has no return point; nothing was changed by the role on this host")
        number = known[-1]
    elif number not in known:
        raise ReturnPointError(f"{folder} has no return point {number}; it has {', '.join(map(str, known)) or 'none'}")
    try:
        with open(path_of(folder, number), encoding="utf-8") as source:
            point = json.load(source)
    except (OSError, ValueError) as error:
        raise ReturnPointError(f"{path_of(folder, number)}: {error}") from error
    point["number"] = number
    return point


def same(one: dict[str, t.Any], other: dict[str, t.Any]) -> bool:
    """Do two points describe one state? The number is no part of it."""
    return {key: value for key, value in one.items() if key != "number"} == {key: value for key, value in other.items() if key != "number"}


def read_files(paths: t.Iterable[str]) -> dict[str, str | None]:
    """Text of each file, None for one that is not there."""
    found: dict[str, str | None] = {}
    for path in paths:
        try:
            with open(path, encoding="utf-8") as source:
                found[path] = source.read()
        except FileNotFoundError:
            found[path] = None
    return found


def save(folder: str, point: dict[str, t.Any], keep: int, write: bool = True) -> tuple[int, bool]:
    """Number of the point that holds this state, and whether it is new. The oldest beyond ``keep`` go."""
    known = numbers(folder)
    if known and same(load(folder, known[-1]), point):
        return known[-1], False
    number = (known[-1] if known else 0) + 1
    if write:
        host_files.make_folder(folder, 0o700)
        host_files.write_atomic(path_of(folder, number), json.dumps(point, indent=1, sort_keys=True) + "\n", 0o600)
        for old in (known + [number])[:-keep] if keep > 0 else []:
            os.unlink(path_of(folder, old))
    return number, True
