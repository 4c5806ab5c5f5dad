# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Is this another boot, and has it started everything? An answer from a host that is still going down does not count."""

from __future__ import annotations

import time
import typing as t

from .host_system import System

STARTED = ("running", "degraded")


class NotBooted(Exception):
    """The limit passed; the message says what was still missing."""


def boot_id(system: System) -> str | None:
    return (system.read(system.proc("sys/kernel/random/boot_id")) or "").strip() or None


def system_state(system: System) -> str:
    """Word of ``systemctl is-system-running``; a host that is going down says stopping."""
    return (system.run(["systemctl", "is-system-running"]).out.strip().splitlines() or ["unknown"])[0]


def wait(
    system: System, old: str, limit: float, sleep: t.Callable[[float], None] = time.sleep, clock: t.Callable[[], float] = time.monotonic
) -> dict[str, t.Any]:
    """Wait until the boot id is another than ``old`` and systemd has started everything (degraded is accepted)."""
    began, looks = clock(), 0
    while True:
        looks += 1
        now = boot_id(system)
        state = system_state(system) if now is not None and now != old else "unknown"
        if state in STARTED:
            return {"boot_id": now, "system": state, "looks": looks, "seconds": round(clock() - began, 1)}
        if clock() - began >= limit:
            if now is None or now == old:
                raise NotBooted(f"the host answers, but still from the boot before (boot id {old})")
            raise NotBooted(f"the host has booted, but systemd is {state}")
        sleep(2.0)
