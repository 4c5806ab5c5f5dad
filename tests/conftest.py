# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests have in common: ids of reported cases, and what a test notes of one for the pages that tests/docs/cases.py writes."""

from __future__ import annotations

import json
import os
import re

import pytest


def pytest_collection_modifyitems(items):
    """The id of a reported case is one test; a test of it on another layer adds the layer (API-01-engine, DRV-01-booted)."""
    known = {}
    for item in items:
        for case in getattr(item, "callspec", None) and item.callspec.id.split("-and-") or []:
            if re.match(r"[A-Z]{2,3}-\d\d", case) and known.setdefault(case, item.nodeid) != item.nodeid:
                raise pytest.UsageError(f"two tests have the id {case}: {known[case]} and {item.nodeid}")


@pytest.fixture
def outcome(request):
    """Compare what a case expects with what the product gives, and note both where CASES_NOTED names a file.

    ``given`` is a word, or a finding (a dict with severity, id and what); ``says`` are the product's own words.
    """

    def compare(expected, given, says=""):
        if isinstance(given, dict):
            given, says = f"{given['severity']} {given['id']}", given["what"]
        noted = os.environ.get("CASES_NOTED")
        if noted:
            line = {"case": request.node.callspec.id, "test": request.node.nodeid, "expected": expected, "given": given, "says": says}
            with open(noted, "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        assert given == expected

    return compare
