# SPDX-License-Identifier: Apache-2.0
"""What a kernel folder's hook.py declares, and what its hooks ask at each call."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable

logger = logging.getLogger("dsv4_sm120")


@dataclasses.dataclass(frozen=True)
class Site:
    """A function of the engine and the AROUND hook for it: hook(original, *args, **kwargs).

    Several operations may share a site; its hook then asks which of them is on. needs: a module that the target's own
    module imports and that may be missing; without it the engine cannot take that path, and the site is passed over.
    """

    target: str
    hook: Callable
    needs: str | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
    """One switch of DSV4_SM120_KERNELS: the libraries that it loads and the sites that it needs."""

    name: str
    libraries: tuple[str, ...]
    sites: tuple[Site, ...]


MOST_REASONS = 20
_enabled: set[str] = set()
_rows: dict[str, dict[str, list[list[int]]]] = {}
_said: set[tuple[str, str]] = set()


def strict() -> bool:
    """Says whether DSV4_SM120_STRICT is on."""
    return os.environ.get("DSV4_SM120_STRICT", "").strip().lower() in ("1", "true", "yes", "on")


def enable(names: set[str], rows: dict[str, dict[str, list[list[int]]]] | None = None) -> None:
    """Sets which operations the hooks serve in this process; rows: {operation: {variant: ranges}} of those that serve some
    shapes only."""
    _enabled.clear()
    _enabled.update(names)
    _rows.clear()
    _rows.update(rows or {})
    _said.clear()


def enabled(name: str, rows: int | None = None, variant: str = "all") -> bool:
    """Says whether an operation is on, for calls of so many rows when they are given."""
    if name not in _enabled:
        return False
    if rows is None or name not in _rows:
        return True
    return any(first <= rows <= last for first, last in _rows[name].get(variant, ()))


def fell_back(name: str, reason: str) -> None:
    """Notes, once for each reason and not for ever new ones, that a call went to the engine's own function."""
    if (name, reason) not in _said and len(_said) < MOST_REASONS:
        _said.add((name, reason))
        logger.warning("dsv4_sm120: %s goes to the engine's own kernel: %s", name, reason)


def failed(name: str, error: Exception) -> None:
    """Turns an operation off after a failed launch; in strict mode raises the error instead."""
    if strict():
        raise error
    _enabled.discard(name)
    logger.error("dsv4_sm120: %s is off from here on: %s", name, error)
