# SPDX-License-Identifier: Apache-2.0
"""Entry point of SGLang's plugin group sglang.srt.plugins.

SGLang calls register() in every process, logs what it raises and goes on unpatched, so this checks for itself: engine
version, fingerprint of every target, library of every operation, and after applying that each hook is really the
function that the engine's modules hold. What cannot be applied is left out with a warning; with DSV4_SM120_STRICT=1 it
ends the process by SystemExit, the one thing that the engine does not swallow.

Hooks are applied in scheduler processes alone. Applying imports the target's module, and several of the engine's
modules read environment variables at import that the main process sets only later, while it resolves its arguments;
schedulers are started after that and inherit them. Other processes check what can be checked without importing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import pathlib
import pkgutil
import sys

from . import _lib, build_info, fingerprints, operation, selection
from .operation import Operation

ENGINE_VERSION = "0.5.23"
SCHEDULER_ENTRY = "run_scheduler_process"
logger = logging.getLogger("dsv4_sm120")


@functools.cache
def discover() -> dict[pathlib.Path, tuple[Operation, ...]]:
    """Returns {kernel folder: its operations}, from every sub-package that has a hook.py."""
    here = pathlib.Path(__file__).parent
    found = {}
    for path in sorted(here.glob("*/hook.py")):
        module = importlib.import_module(f"{__package__}.{path.parent.name}.hook")
        found[path.parent] = tuple(module.OPERATIONS)
    return found


def operations() -> dict[str, Operation]:
    """Returns all operations by name."""
    return {item.name: item for items in discover().values() for item in items}


def known_targets() -> dict[str, dict[str, str]]:
    """Returns the fingerprints of all folders' targets."""
    merged: dict[str, dict[str, str]] = {}
    for folder in discover():
        merged.update(fingerprints.known_targets(folder))
    return merged


def in_scheduler() -> bool:
    """Says whether this is a scheduler process: the engine's scheduler entry is on the stack.

    DSV4_SM120_ROLE=scheduler says so for programs that build the model in their own process.
    """
    if os.environ.get("DSV4_SM120_ROLE"):
        return os.environ["DSV4_SM120_ROLE"] == "scheduler"
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == SCHEDULER_ENTRY:
            return True
        frame = frame.f_back
    return False


def engine_version() -> str:
    """Returns the version of the SGLang that is running; 'unknown' when it does not say."""
    module = sys.modules.get("sglang")
    version = getattr(module, "__version__", None)
    if not version:
        try:
            version = importlib.import_module("sglang.version").__version__
        except Exception:  # noqa: BLE001 - any failure means the same
            version = None
    return version or "unknown"


def engine_root() -> pathlib.Path:
    """Returns the folder that holds sglang/."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise fingerprints.Missing("sglang is not installed")
    return pathlib.Path(next(iter(spec.submodule_search_locations))).parent


def static_problem(item: Operation, root: pathlib.Path, known: dict[str, dict[str, str]]) -> str | None:
    """Returns why an operation cannot be applied, as far as can be told without importing the engine's modules."""
    for library in item.libraries:
        try:
            _lib.load(library)
        except _lib.KernelError as error:
            return str(error)
    usable = [site for site in item.sites if site.needs is None or importlib.util.find_spec(site.needs)]
    if not usable:
        return f"nothing to hook: {', '.join(sorted({site.needs or '' for site in item.sites}))} is not installed"
    for site in item.sites:
        if fault := fingerprints.problem(root, site.target, known):
            return fault
    return None


def landed(target: str, hook) -> bool:
    """Says whether the engine's name now holds a wrapper around its own function that calls our hook."""
    parent, name = target.rsplit(".", 1)
    current = getattr(pkgutil.resolve_name(parent), name)
    cells = getattr(current, "__closure__", None) or ()
    return hasattr(current, "__wrapped__") and any(cell.cell_contents is hook for cell in cells)


def apply(items: dict[str, Operation]) -> dict[str, str]:
    """Registers and applies the operations' hooks; returns {operation: why it is not on}."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks, faults = {}, {}
    for item in items.values():
        for site in item.sites:
            if site.needs is None or importlib.util.find_spec(site.needs):
                hooks[site.target] = site.hook
    for target, hook in hooks.items():
        if target in HookRegistry._patched:
            continue  # somebody was here first: landed() will tell
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    for name, item in items.items():
        for site in item.sites:
            if site.target in hooks and (
                site.target not in HookRegistry._patched or not landed(site.target, site.hook)
            ):
                faults[name] = f"the hook on {site.target} did not land"
    return faults


def say(line: str) -> None:
    """Logs the one line of a scheduler; the engine loads plugins before it sets up logging, so it may have to be printed."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(line)
    else:
        print(line, file=sys.stderr, flush=True)


def stop_if_strict(message: str) -> None:
    """Ends the process in strict mode, warns otherwise."""
    if operation.strict():
        print(f"dsv4_sm120: {message}", file=sys.stderr, flush=True)
        raise SystemExit(f"dsv4_sm120: {message}")
    logger.warning("dsv4_sm120: %s", message)


def register() -> None:
    """Applies the selected kernels to the engine; see the module's text. Called by SGLang, and harmless twice."""
    operation.enable(set())
    build = build_info()
    every = operations()
    try:
        chosen = selection.select(tuple(every), build["source_hash"])
    except selection.SelectionError as error:
        stop_if_strict(str(error))
        chosen = selection.Selection((), "nothing that could be read", {})
    left_out = dict(chosen.left_out)
    items = {name: every[name] for name in chosen.wanted}
    version = engine_version()
    if items and version != ENGINE_VERSION:
        left_out.update(dict.fromkeys(items, f"made for SGLang {ENGINE_VERSION}, this is {version}"))
        items = {}
    if items:
        known, root = known_targets(), engine_root()
        for name, item in list(items.items()):
            if fault := static_problem(item, root, known):
                left_out[name] = fault
                del items[name]
    scheduler = in_scheduler()
    if items and scheduler:
        faults = apply(items)
        left_out.update(faults)
        items = {name: item for name, item in items.items() if name not in faults}
        operation.enable(set(items), chosen.rows)
    for name, reason in left_out.items():
        stop_if_strict(f"{name} is left out: {reason}")
    if scheduler:
        say(
            f"dsv4_sm120 {build['version']} build {build['source_hash']} ({' '.join(build['archs']) or 'no architectures'}) "
            f"pid {os.getpid()} applied: {', '.join(items) or 'nothing'}; left out: {', '.join(left_out) or 'nothing'}; "
            f"chosen by {chosen.source}"
        )
