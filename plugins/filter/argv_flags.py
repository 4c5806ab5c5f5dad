# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``argv_flags``: the flags of a command line, each with its values."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError


def argv_flags(argv: list) -> list:
    """``["python", "--port", "30000", "--enable-metrics"]`` -> ``[{"flag": "--port", "value": "30000"}, ...]``.

    Words before the first flag (the program) are left out; several values are joined by blanks;
    ``--flag=value`` is split. Raises AnsibleFilterError when argv is no list of strings.
    """
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        raise AnsibleFilterError("argv_flags needs a list of strings, as serving_plan gives it under 'argv'")
    flags: list[dict] = []
    for word in argv:
        if word.startswith("--"):
            flag, _separator, value = word.partition("=")
            flags.append({"flag": flag, "value": value})
        elif flags:
            flags[-1]["value"] = f"{flags[-1]['value']} {word}".strip()
    return flags


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict:
        """Name to function."""
        return {"argv_flags": argv_flags}
