# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One transfer in a process of its own, to be killed: C(stage_once.py REQUEST.json), prints its counters as JSON."""

from __future__ import annotations

import json
import pathlib
import resource
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.blackwell.dsv4.plugins.module_utils import (
    staging_fetch,
    staging_sources,
)


def main():
    request = json.loads(pathlib.Path(sys.argv[1]).read_text())
    if request["source"].startswith("http"):
        source = staging_sources.HttpSource(request["source"], timeout=request.get("timeout", 5.0))
    else:
        source = staging_sources.DirectorySource(request["source"])
    options = dict({"reserve": 0}, **request.get("options", {}))
    run = staging_fetch.Fetcher(request["dest"], request["files"], [source], **options)
    try:
        answer = run.run()
    except staging_fetch.FetchFailed as exc:
        answer = dict(run.counters(), failed=exc.code, msg=str(exc))
    answer["troubles"] = run.events.counts
    answer["peak_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(answer))
    return 1 if "failed" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
