# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Returns when a URL answers 200; the start-up of a unit waits for it (ExecStartPost).

A worker's own /health generates one token, so it may take a while to answer: each look has its own limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def look(url, timeout):
    """(ready, what was seen)"""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return answer.status == 200, "HTTP %d" % answer.status
    except urllib.error.HTTPError as error:
        return False, "HTTP %d" % error.code
    except (OSError, ValueError) as error:
        return False, str(getattr(error, "reason", error))


class Memory:
    """The fullest moment of the unit's GPUs while it loads: after a failure nothing of it is left to read."""

    NAME = ".start-memory.json"

    def __init__(self, read, folder, every=5.0, clock=time.monotonic):
        self.read, self.path, self.every, self.clock = read, os.path.join(folder, self.NAME), every, clock
        self.most, self.next = [], 0.0

    def look(self):
        """Sample, not too often; keep the fullest."""
        if self.clock() < self.next:
            return
        self.next = self.clock() + self.every
        used = self.read()
        if sum(used) > sum(self.most):
            self.most = used
            with open(self.path, "w", encoding="utf-8") as stream:
                json.dump(used, stream)

    def forget(self):
        """The start went well."""
        try:
            os.unlink(self.path)
        except OSError:
            pass


def gone(pid):
    """Whether the server's process has ended. systemd itself waits for ExecStartPost even then."""
    if not pid:
        return False
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[:1] == ["Z"]
    except OSError:
        return True


def wait(url, limit, interval, timeout, say=print, clock=time.monotonic, sleep=time.sleep, once=look, ended=lambda: False,
         sample=lambda: None):
    """0 when ready, 1 when the limit passed or the server ended."""
    start = clock()
    said = start
    seen = ""
    while True:
        ready, seen = once(url, timeout)
        if ready:
            say("ready after %.0f s: %s" % (clock() - start, url))
            return 0
        sample()
        if ended():
            say("the server ended after %.0f s" % (clock() - start))
            return 1
        if clock() - start >= limit:
            say("not ready after %.0f s: %s (%s)" % (limit, url, seen))
            return 1
        if clock() - said >= 60:
            said = clock()
            say("waiting for %s: %.0f s, last answer: %s" % (url, clock() - start, seen))
        sleep(interval)


def main(argv=None):
    """Wait as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--limit", type=float, default=890.0, help="seconds until it gives up")
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for one look")
    parser.add_argument("--pid", type=int, default=int(os.environ.get("MAINPID") or 0), help="the server's process")
    parser.add_argument("--gpus", default="", help="UUIDs, comma between; their memory is noted while the unit loads")
    parser.add_argument("--nvml-path", action="append", default=[], help="folder (a pattern) with pynvml")
    given = parser.parse_args(argv)
    memory = None
    if given.gpus and os.environ.get("CACHE_DIRECTORY"):
        import prestart

        reader = prestart.Nvml(given.nvml_path)
        memory = Memory(lambda: reader.memory(given.gpus.split(",")), os.environ["CACHE_DIRECTORY"].split(":")[0])
    code = wait(given.url, given.limit, given.interval, given.timeout, ended=lambda: gone(given.pid),
                say=lambda line: print(line, flush=True), sample=memory.look if memory else lambda: None)
    if memory and code == 0:
        memory.forget()
    return code


if __name__ == "__main__":
    sys.exit(main())
