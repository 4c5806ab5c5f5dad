# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Words for the progress of something long, and the rule when to say them."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def amount(count):
    """A number of bytes as people write it."""
    value = float(count)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return "%d %s" % (value, unit) if unit == "B" else "%.1f %s" % (value, unit)
        value /= 1000


def duration(seconds):
    """Seconds as people write them."""
    seconds = int(seconds)
    if seconds < 60:
        return "%d s" % seconds
    if seconds < 3600:
        return "%d min %02d s" % divmod(seconds, 60)
    return "%d h %02d min" % (seconds // 3600, seconds % 3600 // 60)


def transfer_line(status):
    """One line for the status file of a transfer."""
    phase = status.get("phase")
    if phase == "plan":
        return "looking at what is there"
    if phase == "sizes":
        return "asking the source for sizes"
    if phase == "check":
        return "checking the checkpoint"
    if phase == "done":
        return "all files are there"
    word = "reading again" if phase == "verify" else "fetched"
    parts = ["%s %.1f %% of %s" % (word, float(status.get("percent") or 0), amount(status.get("total_bytes") or 0))]
    if status.get("rate"):
        parts.append("%s/s" % amount(status["rate"]))
    if status.get("seconds_left") is not None:
        parts.append("%s left" % duration(status["seconds_left"]))
    current = status.get("current") or []
    if current:
        parts.append(str(current[0]) + (" and %d more" % (len(current) - 1) if len(current) > 1 else ""))
    troubles = status.get("troubles") or {}
    if troubles:
        parts.append("troubles: %s" % ", ".join("%s x%d" % item for item in sorted(troubles.items())))
    return ", ".join(parts)


class Pace:
    """Says a line when it is new and the last one is old enough; a log stays short."""

    def __init__(self, interval, clock):
        self.interval = interval
        self.clock = clock
        self.last_at = None
        self.last_text = None

    def due(self, text):
        """Whether to say this now."""
        now = self.clock()
        if text == self.last_text:
            return False
        if self.last_at is not None and now - self.last_at < self.interval:
            return False
        self.last_at, self.last_text = now, text
        return True
