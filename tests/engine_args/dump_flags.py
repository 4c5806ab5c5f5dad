# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write down the command line of the installed SGLang as a small JSON table.

Run it with the Python of a virtual environment that holds the unmodified
sglang wheel (tests/engine_args/README.md says which packages that needs):

    python tests/engine_args/dump_flags.py files/sglang_flags.json

The table lets everything that must not depend on a 2 GB environment (the
serving plan, the rehearsal engine, unit tests) refuse a flag or a value that
the real parser refuses. `--check` compares instead of writing and exits 1 on
a difference.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from pathlib import Path


def type_name(action: argparse.Action) -> str | None:
    """How argparse converts the value: the callable's name, its arguments behind it."""
    kind = action.type
    if kind is None:
        return None
    if isinstance(kind, functools.partial):
        return "%s(%s)" % (kind.func.__name__, ",".join(map(repr, kind.args)))
    return getattr(kind, "__name__", type(kind).__name__)


def plain(value):
    """The value when JSON can hold it, else its repr in a marked object."""
    try:
        if json.loads(json.dumps(value)) == value:
            return value
    except (TypeError, ValueError):
        pass
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return {"repr": repr(value)}


def describe(action: argparse.Action) -> dict:
    entry = {
        "aliases": list(action.option_strings[1:]),
        "dest": action.dest,
        "action": type(action).__name__.lstrip("_"),
        "type": type_name(action),
        "nargs": action.nargs,
        "default": plain(action.default),
        "choices": None if action.choices is None else sorted(action.choices, key=str),
    }
    if action.const is not None:
        entry["const"] = plain(action.const)
    if action.required:
        entry["required"] = True
    # What SGLang's own actions for retired flags carry.
    for extra in ("new_flag", "const_value", "error_message"):
        value = getattr(action, extra, None)
        if value is not None:
            entry[extra] = plain(value)
    return entry


def dump() -> dict:
    with contextlib.redirect_stdout(sys.stderr):
        import sglang
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser(prog="sglang serve")
        ServerArgs.add_cli_args(parser)
    flags = {
        action.option_strings[0]: describe(action)
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }
    return {"sglang": sglang.__version__, "flags": dict(sorted(flags.items()))}


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("path", type=Path)
    cli.add_argument("--check", action="store_true", help="compare with PATH, write nothing")
    options = cli.parse_args()
    table = dump()
    # One line for each flag: a changed flag is one line of a diff.
    lines = ",\n".join(
        "  %s: %s" % (json.dumps(flag), json.dumps(entry, sort_keys=True))
        for flag, entry in table["flags"].items()
    )
    text = '{"sglang": %s, "flags": {\n%s\n}}\n' % (json.dumps(table["sglang"]), lines)
    if options.check:
        if options.path.read_text(encoding="utf-8") == text:
            print("%s: %d flags of sglang %s, up to date" % (options.path, len(table["flags"]), table["sglang"]))
            return 0
        old = json.loads(options.path.read_text(encoding="utf-8"))["flags"]
        for flag in sorted(set(old) | set(table["flags"])):
            if old.get(flag) != table["flags"].get(flag):
                print("%s: file %s, parser %s" % (flag, old.get(flag), table["flags"].get(flag)))
        return 1
    options.path.write_text(text, encoding="utf-8")
    print("%s: %d flags of sglang %s" % (options.path, len(table["flags"]), table["sglang"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
