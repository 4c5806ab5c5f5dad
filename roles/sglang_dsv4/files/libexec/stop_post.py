# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""After a unit ended: why, and whether another try makes sense (ExecStopPost, as root).

Reads the journal of the start that just failed, writes the classified cause where the play and the operator find it,
and, when the cause is the same at every try, keeps systemd from trying again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import journal_classifier  # noqa: E402
import serving_state  # noqa: E402


def write(folder, unit, answer):
    """The cause of a unit's last failure, whole or not at all; by the unit's umask for root only, as the journal is."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "%s.json" % unit)
    with open(path + ".new", "w", encoding="utf-8") as stream:
        json.dump(answer, stream, indent=1, sort_keys=True)
        stream.write("\n")
    os.replace(path + ".new", path)


def memory_at_start(environment):
    """What readiness.py noted of the GPUs' memory while the unit loaded, if the start failed."""
    path = os.path.join(environment.get("CACHE_DIRECTORY", "").split(":")[0], ".start-memory.json")
    try:
        with open(path, encoding="utf-8") as stream:
            used = json.load(stream)
        os.unlink(path)
    except (OSError, ValueError):
        return []
    return used if isinstance(used, list) and all(isinstance(value, int) for value in used) else []


def main(argv=None, environment=None, journal=serving_state.journal, run=subprocess.call):
    """Classify, write, decide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit", required=True)
    parser.add_argument("--folder", default="/run/dsv4/failures")
    parser.add_argument("--engine-version", default="")
    given = parser.parse_args(argv)
    environment = os.environ if environment is None else environment
    result = environment.get("SERVICE_RESULT", "success")
    if result == "success":
        try:
            os.unlink(os.path.join(given.folder, "%s.json" % given.unit))
        except OSError:
            pass
        return 0
    lines = journal(given.unit, 200, environment.get("INVOCATION_ID", ""))
    answer = journal_classifier.classify(lines, engine_version=given.engine_version, result=result,
                                         used_mib=memory_at_start(environment))
    answer.update({"unit": given.unit, "result": result, "exit_code": environment.get("EXIT_CODE", ""),
                   "exit_status": environment.get("EXIT_STATUS", ""), "tail": lines[-25:]})
    write(given.folder, given.unit, answer)
    print("cause: %s: %s. %s" % (answer["class"], answer["what"], answer["advice"]), flush=True)
    if answer["permanent"] and result in ("exit-code", "signal", "core-dump"):
        print("another try would end the same way: no restart", flush=True)
        run(["systemctl", "stop", "--no-block", "%s.service" % given.unit])
    return 0


if __name__ == "__main__":
    sys.exit(main())
