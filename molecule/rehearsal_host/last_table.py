# SPDX-License-Identifier: GPL-3.0-or-later
"""Print the table of the newest verification report below a folder, and say how old it is when it is not of this minute."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ansible_collections.blackwell.dsv4.plugins.plugin_utils import verification_report

reports = sorted(Path(sys.argv[1]).glob("*/verification.json"), key=lambda path: path.stat().st_mtime)
if not reports:
    sys.exit(f"no verification report below {sys.argv[1]} yet")
found = json.loads(reports[-1].read_text())
age = time.time() - reports[-1].stat().st_mtime
when = "" if age < 60 else f" ({age / 60:.0f} minutes ago)"
print(verification_report.table(found["checks"], f"Verification in mode {found['mode']}: {found['status']}{when}"))
print(f"report: {reports[-1].parent}")
