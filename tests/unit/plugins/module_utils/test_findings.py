# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils import findings


def add(text, key, date="2026-01-01 00:00 UTC"):
    return findings.appended(text, "# Findings", date, "release", "body", key)


def test_a_new_record_starts_with_the_preamble():
    text = add("", "a:pd:pass")
    assert text.startswith("# Findings\n")
    assert findings.last_key(text) == "a:pd:pass"


def test_the_same_key_adds_nothing_even_on_another_day():
    text = add("", "a:pd:pass")
    assert add(text, "a:pd:pass", date="2027-05-05 05:05 UTC") is None


def test_history_is_kept_and_a_return_to_an_old_key_is_a_new_entry():
    text = add(add(add("", "a"), "b"), "a")
    assert findings.KEY_LINE.findall(text) == [("record", "a"), ("record", "b"), ("record", "a")]


def test_an_entry_of_another_series_does_not_hide_the_last_one():
    text = findings.appended(add("", "a"), "# F", "d", "benchmark", "body", "x", "benchmark")
    assert (findings.last_key(text), findings.last_key(text, "benchmark")) == ("a", "x")
    assert add(text, "a") is None and findings.appended(text, "# F", "d", "benchmark", "body", "x", "benchmark") is None
    with pytest.raises(findings.FindingsError, match="lower-case"):
        findings.appended("", "# F", "d", "t", "body", "a", "b: c -->")


@pytest.mark.parametrize("series", ["record", "benchmark"])
def test_a_body_cannot_forge_the_key(series):
    with pytest.raises(findings.FindingsError, match="key line of its own"):
        findings.appended("", "# F", "d", "t", f"x\n<!-- dsv4-{series}: z -->\n", "a")


def test_a_key_that_breaks_the_line_is_refused():
    with pytest.raises(findings.FindingsError, match="characters"):
        add("", "a -->")
