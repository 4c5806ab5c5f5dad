# SPDX-License-Identifier: Apache-2.0
"""Notices when the engine's functions are no longer those that the hooks were written for.

Each kernel folder with a hook.py keeps targets.json: for every target the parameters and a hash of the source text.
Both are read from the source files without importing them, so this works without PyTorch or a GPU, and it freezes no
environment variable that the engine reads at import.

    python3 -m dsv4_sm120.fingerprints [--write] SGLANG_PARENT_FOLDER
"""

from __future__ import annotations

import ast
import hashlib
import json
import pathlib
import sys


class Missing(LookupError):
    """A target is not where it should be."""


def locate(root: pathlib.Path, target: str) -> tuple[pathlib.Path, list[str]]:
    """Returns the source file below root (which holds sglang/) and the names inside it: ['Class', 'method'].

    Raises Missing when no such file exists.
    """
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        base = root.joinpath(*parts[:cut])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path, parts[cut:]
    raise Missing(f"{target}: no such module")


def fingerprint(root: pathlib.Path, target: str) -> dict[str, str]:
    """Returns {'parameters': ..., 'source': 16 hex digits} of a function; raises Missing when it is gone.

    The source hash covers decorators and body, without trailing blanks, so comments count: a changed comment is
    worth a look too.
    """
    path, names = locate(root, target)
    text = path.read_text(encoding="utf-8")
    body = ast.parse(text).body
    node = None
    for name in names:
        found = [
            x for x in body if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and x.name == name
        ]
        if not found:
            raise Missing(f"{target}: {path.name} has no {name}")
        node = found[-1]
        body = node.body
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise Missing(f"{target}: not a function")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = [line.rstrip() for line in text.splitlines()[first - 1 : node.end_lineno]]
    return {
        "parameters": ast.unparse(node.args),
        "source": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
    }


def problem(root: pathlib.Path, target: str, known: dict[str, dict[str, str]]) -> str | None:
    """Returns why a target must not be hooked, None when it is the one that the hook was written for."""
    if target not in known:
        return f"{target}: no fingerprint was ever taken"
    try:
        found = fingerprint(root, target)
    except Missing as error:
        return str(error)
    for what, value in known[target].items():
        if found[what] != value:
            return f"{target}: {what} changed: {value} -> {found[what]}"
    return None


def known_targets(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """Returns a kernel folder's targets.json, empty when it has none."""
    try:
        return json.loads((folder / "targets.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def main(argv: list[str]) -> int:
    """Compares all targets with an unpacked engine, or with --write takes their fingerprints anew."""
    from . import plugin

    write = "--write" in argv
    roots = [argument for argument in argv if not argument.startswith("-")]
    if len(roots) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(roots[0])
    bad = 0
    for folder, operations in plugin.discover().items():
        targets = sorted({site.target for operation in operations for site in operation.sites})
        if write:
            found = {target: fingerprint(root, target) for target in targets}
            (folder / "targets.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            continue
        for target in targets:
            fault = problem(root, target, known_targets(folder))
            print(f"{'MOVED' if fault else 'ok':<6} {fault or target}")
            bad += bool(fault)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
