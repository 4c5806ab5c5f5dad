# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An append-only record in Markdown: an entry is added only when its key differs from the last one's of its series.

The date is part of the entry, never of the key, so a run that changed nothing writes nothing.
"""

from __future__ import annotations

import re

RECORD = "record"
KEY_LINE = re.compile(r"^<!-- dsv4-([a-z]+): (\S+) -->$", re.MULTILINE)
SERIES = re.compile(r"^[a-z]+$")
KEY = re.compile(r"^[0-9a-zA-Z._:-]+$")


class FindingsError(ValueError):
    """The record or the entry cannot be used as it is; the message says why and what to do."""


def last_key(text: str, series: str = RECORD) -> str | None:
    """Key of the newest entry of ``series`` in ``text``, or None when there is none."""
    keys = [key for name, key in KEY_LINE.findall(text) if name == series]
    return keys[-1] if keys else None


def entry(date: str, title: str, body: str, key: str, series: str = RECORD) -> str:
    """One entry: heading, body, and the key line that the next run compares."""
    if not SERIES.match(series):
        raise FindingsError(f"series {series!r} is not a word of lower-case letters")
    if not KEY.match(key):
        raise FindingsError(f"key {key!r} has characters that a key line cannot carry; use letters, digits and ._:-")
    if KEY_LINE.search(body):
        raise FindingsError("the body holds a key line of its own; remove it")
    return f"\n## {date} {title}\n\n{body.strip()}\n\n<!-- dsv4-{series}: {key} -->\n"


def appended(text: str, preamble: str, date: str, title: str, body: str, key: str, series: str = RECORD) -> str | None:
    """``text`` with a new entry, or None when the last entry of ``series`` already has ``key``.

    An empty record starts with ``preamble``.
    """
    if last_key(text, series) == key:
        return None
    base = text if text.strip() else preamble.strip() + "\n"
    return base.rstrip("\n") + "\n" + entry(date, title, body, key, series)
