# SPDX-License-Identifier: Apache-2.0
"""From times to a choice. Pure arithmetic: no GPU, no file.

Contestants of a cell take turns, so times of one turn belong together and their differences are what is judged. A lead
counts when it exceeds three standard errors of the median difference and a fiftieth of the slower time; anything less is a
tie, and a tie leaves the engine's own kernel.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

SIGMAS = 3.0
LEAST = 0.02
# standard error of a median, with the deviation taken from the median absolute deviation
_SCALE = 1.2533 * 1.4826
OURS, STOCK, TIE = "ours", "stock", "tie"


@dataclasses.dataclass(frozen=True)
class Lead:
    """By how many microseconds ours is ahead of a rival (negative: behind), the rival's time, and the error of the lead."""

    microseconds: float
    rival: float
    error: float

    @property
    def noise(self) -> float:
        """What a lead has to exceed."""
        return max(SIGMAS * self.error, LEAST * max(self.rival, self.rival - self.microseconds))

    @property
    def winner(self) -> str:
        """Who is ahead by more than the noise."""
        if abs(self.microseconds) <= self.noise:
            return TIE
        return OURS if self.microseconds > 0 else STOCK


def spread(times: list[float]) -> float:
    """Returns the standard error of the median of times."""
    middle = statistics.median(times)
    return _SCALE * statistics.median(abs(value - middle) for value in times) / math.sqrt(len(times))


def lead(ours: list[float], rival: list[float]) -> Lead:
    """Returns ours' lead over a rival from times taken in turns."""
    ahead = [b - a for a, b in zip(ours, rival)]
    return Lead(statistics.median(ahead), statistics.median(rival), spread(ahead))


def total(leads: list[Lead]) -> Lead:
    """Returns the lead over several cells together: each of them once."""
    return Lead(
        sum(item.microseconds for item in leads),
        sum(item.rival for item in leads),
        math.sqrt(sum(item.error**2 for item in leads)),
    )


@dataclasses.dataclass
class Timed:
    """One cell as it was measured: times by contestant in order of the turns, what was wrong with contestants, what to beat.

    rivals: names of contestants that may serve in ours' place, the engine's own first.
    """

    variant: str
    rows: int
    label: str
    rivals: tuple[str, ...]
    times: dict[str, list[float]]
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)

    def lead(self) -> Lead | str:
        """Returns ours' lead over the fastest rival, or why there is none to speak of."""
        for name in ("ours", self.rivals[0]):
            if name in self.wrong:
                return f"{name}: {self.wrong[name]}"
            if not self.times.get(name):
                return f"{name} did not run"
        able = [name for name in self.rivals if self.times.get(name) and name not in self.wrong]
        fastest = min(able, key=lambda name: statistics.median(self.times[name]))
        return lead(self.times["ours"], self.times[fastest])

    def summary(self) -> dict:
        """Returns the cell for the record: medians, standard errors, who won, and by how much against which noise."""
        found = self.lead()
        document: dict = {
            "variant": self.variant,
            "rows": self.rows,
            "cell": self.label,
            "median_us": {name: round(statistics.median(values), 2) for name, values in self.times.items()},
            "error_us": {name: round(spread(values), 3) for name, values in self.times.items()},
        }
        if self.wrong:
            document["wrong"] = self.wrong
        if isinstance(found, str):
            return document | {"winner": "none", "reason": found}
        return document | {
            "winner": found.winner,
            "lead_us": round(found.microseconds, 3),
            "noise_us": round(found.noise, 3),
        }


def ranges(measured: list[int], won: set[int]) -> list[list[int]]:
    """Returns inclusive ranges of rows: a measured number stands for those above the measured number before it."""
    found: list[list[int]] = []
    below = 0
    for rows in sorted(measured):
        if rows in won:
            if found and found[-1][1] == below:
                found[-1][1] = rows
            else:
                found.append([below + 1, rows])
        below = rows
    return found


def choose(expected: list[tuple[str, int]], timed: list[Timed]) -> dict:
    """Returns {'choice', 'rows', 'reason'} of one operation.

    expected: the bucket (variant, rows) of every cell that was to be measured, so that a bucket with a cell missing is not
    decided in ours' favour. rows: {variant: ranges of rows that ours serves}.
    """
    buckets: dict[tuple[str, int], int] = {}
    for bucket in expected:
        buckets[bucket] = buckets.get(bucket, 0) + 1
    won, lost, open_reasons = set(), set(), []
    for bucket, number in buckets.items():
        cells = [cell for cell in timed if (cell.variant, cell.rows) == bucket]
        leads = [cell.lead() for cell in cells]
        reasons = [item for item in leads if isinstance(item, str)]
        if reasons:
            open_reasons.append(reasons[0])
        elif len(cells) < number:
            open_reasons.append("there was no time to measure it")
        else:
            (won if total(leads).winner == OURS else lost).add(bucket)
    rows = {}
    for variant in dict.fromkeys(name for name, _rows in buckets):
        measured = [number for name, number in buckets if name == variant]
        if found := ranges(measured, {number for name, number in won if name == variant}):
            rows[variant] = found
    number = f"{len(won)} of {len(buckets)} shapes"
    if won:
        reason = f"faster than the engine's own in {number}"
    elif lost:
        reason = f"faster than the engine's own in none of {len(buckets)} shapes"
    else:
        reason = open_reasons[0] if open_reasons else "there is nothing to measure"
    if open_reasons and (won or lost):
        reason += f"; {len(buckets) - len(won) - len(lost)} not decided: {open_reasons[0]}"
    return {"choice": "ours" if won else "stock", "rows": rows, "reason": reason}
