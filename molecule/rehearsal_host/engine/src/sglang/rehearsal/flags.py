# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line of SGLang 0.5.23, rebuilt from the table that tests/engine_args/dump_flags.py wrote.

Unknown flags, ambiguous prefixes and refused values end with exit code 2, as in
the real parser, because it is argparse here and there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from decimal import Decimal
from importlib import resources
from pathlib import Path

SI = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
IEC = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def table() -> dict:
    """{flag: {aliases, dest, action, type, nargs, default, choices, ...}}"""
    text = resources.files(__package__).joinpath("flags.json").read_text(encoding="utf-8")
    return json.loads(text)["flags"]


# ---- types that are not Python's own


def human_readable_int(text: str) -> int:
    """1000, 1k = 1000, 1Ki = 1024, 25.6k = 25600; the suffix is case-sensitive."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    if not match:
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError("invalid integer or suffix: %r" % text) from None
    number, suffix = match.groups()
    if suffix in IEC:
        if "." in number:
            raise argparse.ArgumentTypeError("%r: no decimals with the suffix %s" % (text, suffix))
        return int(number) * IEC[suffix]
    return int(Decimal(number) * SI[suffix])


def json_value(text: str):
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError("invalid JSON: %s (%s)" % (text, error)) from None


def json_object(text: str) -> dict:
    value = json_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object: %s" % text)
    return value


def graph_backend(text: str) -> str:
    if text == "tc_piecewise":
        raise argparse.ArgumentTypeError("tc_piecewise is gone; choose breakable, full or disabled")
    return text


TYPES = {
    None: None,
    "str": str,
    "int": int,
    "float": float,
    "loads": json_value,
    "json_list_type": json_value,
    "human_readable_int": human_readable_int,
    "nullable_str": lambda text: None if text in ("", "None") else text,
    "parse_cuda_graph_backend_arg": graph_backend,
    "parse_cuda_graph_config_arg": json_object,
}


class Retired(argparse.Action):
    """A flag that still works: warns on stderr, then stores its constant."""

    def __init__(self, option_strings, dest, *, new_flag=None, value=True, nargs=0, default=False, **kwargs):
        self.new_flag = new_flag
        self.value = value
        super().__init__(option_strings, dest, nargs=nargs, default=default, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        hint = " Use '%s' instead." % self.new_flag if self.new_flag else ""
        print("'%s' is deprecated and will be removed in a future release.%s" % (option_string, hint), file=sys.stderr)
        setattr(namespace, self.dest, self.value)


def parser(flags: dict | None = None) -> argparse.ArgumentParser:
    built = argparse.ArgumentParser(prog="sglang serve")
    for flag, entry in (table() if flags is None else flags).items():
        names = [flag] + entry["aliases"]
        common = {"dest": entry["dest"], "default": entry["default"]}
        kind = entry["action"]
        if kind == "StoreTrueAction":
            built.add_argument(*names, action="store_true", **common)
        elif kind == "BooleanOptionalAction":
            names = [name for name in names if not name.startswith("--no-")]
            built.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        elif kind.startswith("Deprecated"):
            built.add_argument(
                *names,
                action=Retired,
                nargs=entry["nargs"],
                choices=entry["choices"],
                new_flag=entry.get("new_flag"),
                value=entry.get("const_value", entry.get("const", True)),
                **common,
            )
        elif kind in ("StoreAction", "LoRAPathAction"):
            extra = {"const": entry["const"]} if "const" in entry else {}
            built.add_argument(
                *names,
                type=TYPES[entry["type"]],
                nargs=entry["nargs"],
                choices=entry["choices"],
                required=entry.get("required", False),
                **common,
                **extra,
            )
        else:
            raise ValueError("%s: an action that this engine does not know: %s" % (flag, kind))
    return built


# ---- --config FILE


def keys_of(entry: dict, flag: str) -> set[str]:
    names = [flag] + entry["aliases"]
    return {entry["dest"]} | {name[2:].replace("-", "_") for name in names if name.startswith("--")}


def merge_config(argv: list[str], flags: dict) -> list[str]:
    """Replace `--config FILE` by the file's settings, put first: the command line wins over the file."""
    places = [index for index, word in enumerate(argv) if word == "--config"]
    if not places:
        return argv
    if len(places) > 1:
        raise ValueError("Multiple config files specified! Only one allowed.")
    place = places[0]
    if place + 1 == len(argv):
        raise ValueError("No config file specified after --config flag!")
    path = Path(argv[place + 1])
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError("Config file must be YAML format, got: %s" % path.suffix)
    if not path.exists():
        raise ValueError("Config file not found: %s" % path)
    import yaml

    settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(settings, dict):
        raise ValueError("Config file must contain a dictionary at root level")

    switches, usable, refused = set(), set(), {}
    for flag, entry in flags.items():
        keys = keys_of(entry, flag)
        if entry["action"] == "StoreTrueAction":
            switches |= keys
            usable |= keys
        elif entry["action"] in ("StoreAction", "LoRAPathAction") or entry["nargs"] is None:
            usable |= keys
        else:
            refused.update(dict.fromkeys(keys, entry["action"]))
    words: list[str] = []
    for key, value in settings.items():
        plain = str(key).replace("-", "_")
        if plain in refused and plain not in usable:
            raise ValueError("Unsupported config option '%s' with action '%s'" % (plain, refused[plain]))
        flag = "--%s" % key
        if isinstance(value, bool):
            if plain not in switches:
                words += [flag, str(value).lower()]
            elif value:
                words.append(flag)
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words + argv[:place] + argv[place + 2 :]


def parse(argv: list[str]) -> argparse.Namespace:
    flags = table()
    words = merge_config(list(argv), flags)
    namespace = parser(flags).parse_args(words)
    namespace.launch_command = " ".join(words)  # keys included, as in SGLang
    return namespace
