# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast staging is on this machine, as ratios within one run.

    python3 tests/perf/staging.py [--folder DIR] [--only stage|verify] [--verify-bytes N] [--stage-bytes N] [--rounds N] [--json FILE]

Each figure is the median of theirs over the median of the rounds of ours, measured in turn so that a busy
machine slows both. Where others want the processors too, the kernel gives each session the same share and two
threads gain nothing over one; then give this session the right of way for the minute that it takes:

    setsid sh -c 'echo -20 > /proc/self/autogroup; exec python3 tests/perf/staging.py --folder /dev/shm'

* verify: deep verification of several files against one C(openssl dgst -sha256) that reads the same files
* stage: staging from a server on the loopback, writing to disk, against C(curl) piped into C(openssl dgst -sha256), which writes nothing
* memory: peak of the staging process for a small and for a large file
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = """
import http.server, os, socketserver, sys
class H(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def do_GET(self):
        with open(self.translate_path(self.path), "rb") as f:
            size = os.fstat(f.fileno()).st_size
            start, end, code = 0, size, 200
            asked = self.headers.get("Range")
            if asked:
                first, _, last = asked[6:].partition("-")
                start, end, code = int(first), int(last) + 1 if last else size, 206
            self.send_response(code)
            self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", '"1"')
            if code == 206:
                self.send_header("Content-Range", "bytes %d-%d/%d" % (start, end - 1, size))
            self.end_headers()
            self.wfile.flush()
            while start < end:
                start += os.sendfile(self.connection.fileno(), f.fileno(), start, min(end - start, 1 << 22))
class S(http.server.ThreadingHTTPServer):
    daemon_threads = True
    def handle_error(self, *a): pass
os.chdir(sys.argv[1])
s = S(("127.0.0.1", 0), H)
print(s.server_port, flush=True)
s.serve_forever()
"""
VERIFY = """
import sys, time
sys.path.insert(0, sys.argv[1])
from ansible_collections.blackwell.dsv4.plugins.module_utils.staging_hash import hash_many
for path, (status, digest, git) in sorted(hash_many(sys.argv[2:]).items()):
    print(digest, path)
"""


PROCESSOR = {}


def timed(argv, tag=None, **options):
    """Wall time and output of a command that must succeed; its processor time goes to C(PROCESSOR)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, **options)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if tag:
        PROCESSOR.setdefault(tag, []).append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return seconds, done.stdout.decode()


def figure(size, ours, theirs, tag, limit):
    """What goes into the answer for one comparison."""
    processor = {who: round(statistics.median(PROCESSOR[tag + who]), 2) for who in ("-ours", "-theirs")}
    return {
        "gib": size / (1 << 30),
        "ours_s": [round(s, 2) for s in ours],
        "theirs_s": [round(s, 2) for s in theirs],
        "ratio": round(statistics.median(theirs) / statistics.median(ours), 2),
        "bar": limit,
        "processor_s": {"ours": processor["-ours"], "theirs": processor["-theirs"]},
        "load": round(os.getloadavg()[0], 1),
    }


def make(folder, count, total):
    """Files of noise, in the page cache afterwards."""
    paths = []
    block = os.urandom(1 << 24)
    for number in range(count):
        path = folder / ("file-%02d.bin" % number)
        with open(path, "wb") as stream:
            left = total // count
            index = 0
            while left > 0:
                shift = (index * 4099 + number * 257) % len(block)
                piece = (block[shift:] + block[:shift])[: min(left, len(block))]
                stream.write(piece)
                left -= len(piece)
                index += 1
        paths.append(path)
    return paths


def verify(folder, total, rounds):
    """Deep verification against openssl."""
    paths = [str(p) for p in make(folder, 8, total)]
    ours, theirs = [], []
    for dummy in range(rounds):
        seconds, out = timed(["openssl", "dgst", "-sha256", "-r", *paths], "verify-theirs")
        theirs.append(seconds)
        reference = sorted(line.split()[0] for line in out.splitlines())
        seconds, out = timed([sys.executable, "-c", VERIFY, str(ROOT / ".collections"), *paths], "verify-ours")
        ours.append(seconds)
        if sorted(line.split()[0] for line in out.splitlines()) != reference:
            raise SystemExit("the sums differ")
    for path in paths:
        os.unlink(path)
    return ours, theirs


def stage(folder, total, rounds, count=4):
    """Staging from the loopback against curl into openssl."""
    source, dest = folder / "source", folder / "dest"
    source.mkdir()
    paths = make(source, count, total)
    manifest = {}
    dummy, out = timed(["openssl", "dgst", "-sha256", "-r", *map(str, paths)])
    for line in out.splitlines():
        digest, name = line.split(" *")
        manifest[os.path.basename(name)] = {"size": os.path.getsize(name), "sha256": digest}
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(source)], stdout=subprocess.PIPE)
    ours, theirs, peaks = [], [], []
    try:
        url = "http://127.0.0.1:%d" % int(server.stdout.readline())
        request = folder / "request.json"
        request.write_text(json.dumps({"source": url, "dest": str(dest), "files": manifest, "timeout": 30.0}))
        addresses = " ".join("%s/%s" % (url, name) for name in sorted(manifest))
        for dummy in range(rounds):
            seconds, out = timed(["sh", "-c", "curl -sS %s | openssl dgst -sha256" % addresses], "stage-theirs")
            theirs.append(seconds)
            shutil.rmtree(dest, ignore_errors=True)
            seconds, out = timed([sys.executable, str(ROOT / "tests/support/stage_once.py"), str(request)], "stage-ours")
            answer = json.loads(out)
            if answer["refetched_bytes"] or answer["fetched_bytes"] != sum(e["size"] for e in manifest.values()):
                raise SystemExit("staging was not clean: %s" % answer)
            ours.append(seconds)
            peaks.append(answer["peak_kib"])
    finally:
        server.kill()
        server.wait()
    shutil.rmtree(source)
    shutil.rmtree(dest, ignore_errors=True)
    return ours, theirs, max(peaks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder")
    parser.add_argument("--verify-bytes", type=int, default=8 << 30)
    parser.add_argument("--stage-bytes", type=int, default=4 << 30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("stage", "verify"))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    figures = {"cores": len(os.sched_getaffinity(0)), "rounds": arguments.rounds}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="staging-perf-") as name:
        folder = pathlib.Path(name)
        if arguments.only != "verify":
            small = stage(folder, 64 << 20, 1, count=1)[2]
            large = stage(folder, 2 << 30, 1, count=1)[2]
            PROCESSOR.clear()
            ours, theirs, peak = stage(folder, arguments.stage_bytes, arguments.rounds)
            figures["stage"] = figure(arguments.stage_bytes, ours, theirs, "stage", 0.8)
            figures["memory_mib"] = {
                "64 MiB file": round(small / 1024, 1), "2 GiB file": round(large / 1024, 1), "several files": round(peak / 1024, 1),
            }
        if arguments.only != "stage":
            ours, theirs = verify(folder, arguments.verify_bytes, arguments.rounds)
            figures["verify"] = figure(arguments.verify_bytes, ours, theirs, "verify", 1.8)
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(text + "\n")
    met = all(figures[name]["ratio"] >= figures[name]["bar"] for name in ("stage", "verify") if name in figures)
    met = met and max(figures.get("memory_mib", {"": 0}).values()) < 150
    print("bars %s" % ("met" if met else "NOT met"))
    return 0 if met else 1


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
