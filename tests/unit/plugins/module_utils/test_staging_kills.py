# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two gigabytes, a server that misbehaves and a process that is killed, two hundred times and more.

The long trial runs when C(BLACKWELL_KILLS) says how many kills it is to have; C(BLACKWELL_KILL_BYTES) changes the size.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import bad_mirror
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[4]

# Each fault once in so many requests; corrupt bytes, which cost a whole file, come twice for certain.
ODDS = {
    "cut": 12, "ignore_range": 30, "changed": 30, "html": 30, "slow_down": 30, "stall": 60, "wrong_length": 30,
    "corrupt": 200, "server_error": 30, "drop": 30, "wrong_range": 30, "short": 30,
}


def trial(tmp_path, kills, total, seed):
    """Stage with kills and faults until done; returns what was counted."""
    chance = random.Random(seed)
    names = {"model-%05d-of-00006.safetensors" % n: total // 6 - 7919 * n for n in range(1, 6)}
    names["model-00006-of-00006.safetensors"] = total - sum(names.values()) - 4096
    names["config.json"] = 4096
    files = {name: bad_mirror.Pattern(name, size) for name, size in names.items()}
    manifest = {name: {"size": pattern.size(), "sha256": pattern.sha256()} for name, pattern in files.items()}

    def plan(path, number, request):
        if number == 3 and path in ("model-00002-of-00006.safetensors", "model-00005-of-00006.safetensors"):
            return "corrupt"
        for fault, odds in ODDS.items():
            if chance.random() < 1.0 / odds:
                return fault
        return None

    dest = tmp_path / "model"
    request = tmp_path / "request.json"
    counts = {"kills": 0, "runs": 0, "terms": 0}
    chunk = 16 << 20
    with bad_mirror.Mirror(files, plan=plan, stall=3.0) as mirror:
        request.write_text(
            json.dumps(
                {
                    "source": mirror.url,
                    "dest": str(dest),
                    "files": manifest,
                    "timeout": 1.0,
                    "options": {"chunk": chunk, "parallel": 3, "retries": 60, "backoff": 0.01, "stall_timeout": 1.0},
                }
            )
        )
        while True:
            child = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/support/stage_once.py"), str(request)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            counts["runs"] += 1
            if counts["kills"] < kills:
                # Killed while it starts, plans, reads back or fetches.
                deadline = time.monotonic() + chance.choice((0.05, 0.3, 0.6, 0.9, 1.2)) * chance.uniform(0.6, 1.4)
                try:
                    child.wait(timeout=max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.send_signal(signal.SIGKILL)
                    counts["kills"] += 1
                out, err = child.communicate()
                if child.returncode == 0:
                    # Done too early: break what is there and go on.
                    victim = dest / chance.choice(sorted(names))
                    if chance.random() < 0.5:
                        victim.unlink()
                    else:
                        with open(victim, "r+b") as stream:
                            stream.seek(chance.randrange(victim.stat().st_size))
                            stream.write(b"\0")
                    counts["broken"] = counts.get("broken", 0) + 1
                    counts["broken_bytes"] = counts.get("broken_bytes", 0) + manifest[victim.name]["size"]
                    continue
                assert child.returncode in (-signal.SIGKILL, 1), err.decode()
                for path in dest.glob("*.safetensors"):
                    # Whatever has its name has its size; the content is proved at the end.
                    assert path.stat().st_size == manifest[path.name]["size"]
                continue
            out, err = child.communicate(timeout=600)
            if child.returncode == 0:
                break
            assert json.loads(out)["failed"], err.decode()
        counts["sent"] = sum(mirror.sent.values())
        counts["faults"] = sum(count for fault, count in mirror.log.items() if fault != "good")
        counts["by_fault"] = {k: v for k, v in sorted(mirror.log.items()) if k != "good"}
        counts["requests"] = sum(mirror.log.values())
    return dest, files, manifest, counts, json.loads(out)


def equal(dest, files):
    """Compare every byte with the rule that made it, without either hash or help of what is tested."""
    for name, pattern in files.items():
        with open(dest / name, "rb") as stream:
            for start in range(0, pattern.size(), 1 << 22):
                assert stream.read(1 << 22) == pattern.read(start, start + (1 << 22)), "%s differs near %d" % (name, start)
            assert not stream.read(1)


@pytest.mark.parametrize(
    "kills, total",
    [
        pytest.param(6, 48 << 20, id="short"),
        pytest.param(
            int(os.environ.get("BLACKWELL_KILLS", "200")),
            int(os.environ.get("BLACKWELL_KILL_BYTES", 2 << 30)),
            id="long",
            marks=[pytest.mark.slow, pytest.mark.skipif("BLACKWELL_KILLS" not in os.environ, reason="four minutes of disk: set BLACKWELL_KILLS=200")],
        ),
    ],
)
def test_kills_and_faults_leave_the_model_equal_to_the_byte(tmp_path, kills, total):
    start = time.monotonic()
    dest, files, manifest, counts, last = trial(tmp_path, kills, total, seed=kills)
    equal(dest, files)
    lost = counts["sent"] - total - counts.get("broken_bytes", 0)
    print(
        "\n%d kills, %d faults in %d requests over %d runs, %.0f s: %d bytes sent for %d, %d sent again (%.1f MiB for each kill or fault); faults %s"
        % (
            counts["kills"], counts["faults"], counts["requests"], counts["runs"], time.monotonic() - start,
            counts["sent"], total + counts.get("broken_bytes", 0), lost, lost / 1048576.0 / max(1, counts["kills"] + counts["faults"]), counts["by_fault"],
        )
    )
    assert counts["kills"] >= kills and counts["faults"] > 0
    assert sorted(p.name for p in (dest / ".dsv4-parts").iterdir()) == ["lock", "progress.json", "record.json"]
    shutil.rmtree(dest)


def test_a_kill_costs_less_than_a_chunk_of_each_file(tmp_path):
    """Without faults, bytes sent again are bounded by the kills alone."""
    size, chunk = 24 << 20, 8 << 20
    files = {"a.bin": bad_mirror.Pattern("a", size), "b.bin": bad_mirror.Pattern("b", size)}
    manifest = {name: {"size": size, "sha256": pattern.sha256()} for name, pattern in files.items()}
    request = tmp_path / "request.json"
    kills = 0
    # Slow enough that every kill meets a transfer in the middle.
    with bad_mirror.Mirror(files, delay=0.03) as mirror:
        request.write_text(
            json.dumps({"source": mirror.url, "dest": str(tmp_path / "m"), "files": manifest, "options": {"chunk": chunk, "parallel": 4}})
        )
        while True:
            child = subprocess.Popen([sys.executable, str(ROOT / "tests/support/stage_once.py"), str(request)], stdout=subprocess.PIPE)
            try:
                child.wait(timeout=1.0 if kills < 6 else 120)
            except subprocess.TimeoutExpired:
                child.kill()
                kills += 1
            out = child.communicate()[0]
            if child.returncode == 0:
                break
        sent = sum(mirror.sent.values())
    equal(tmp_path / "m", files)
    # What lies in the sockets when the process dies was sent too: at most a few hundred kilobytes for each connection.
    in_flight = 4 * (1 << 20)
    print("\n%d kills: %d bytes sent for %d" % (kills, sent, 2 * size))
    assert kills and sent - 2 * size <= kills * (2 * chunk + in_flight)
    assert json.loads(out)["refetched_bytes"] == 0
