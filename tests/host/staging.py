# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stage onto a running rehearsal host, kill the transfer, reboot the host in the middle of another, and look for the token.

    molecule/rehearsal_host/host.py up && tests/host/staging.py SOURCE

SOURCE is a small checkpoint, see molecule/rehearsal_host/checkpoint/make_checkpoint.py. REHEARSAL_NAME and REHEARSAL_SSH_PORT name the
host. A mirror on the loopback, which host and controller share, asks for a token and is slow enough to be met in the middle.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKEN = "planted-token-51c97f3a"
MODEL = "/opt/dsv4/models/drill@one"
HOST = [sys.executable, str(ROOT / "molecule/rehearsal_host/host.py"), "shell", "--"]


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_host(script):
    """Output of a shell script on the host."""
    done = subprocess.run(HOST + [script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return done.stdout.decode().strip()


class Play(threading.Thread):
    """The role against the host, in the background."""

    def __init__(self, folder, url, *options):
        super().__init__(daemon=True)
        self.folder, self.url, self.options = folder, url, options
        self.code, self.text, self.seconds = None, "", 0.0

    def run(self):
        secret = self.folder / "secret.yml"
        secret.write_text(json.dumps({"model_staging_token": TOKEN}))
        secret.chmod(0o600)
        variables = {
            "dsv4_model": {"name": "drill", "revision": "one"}, "model_staging_user": "nobody", "model_staging_chunk": "1M",
            "model_staging_sources": [{"type": "http", "url": self.url}], "model_staging_progress_interval": 1,
            "dsv4_topology": {"speculation": "none"},
        }
        tasks = [{"name": "Stage", "ansible.builtin.import_role": {"name": "blackwell.dsv4.model_staging"}}]
        playbook = self.folder / "play.yml"
        playbook.write_text(json.dumps([{"hosts": "dsv4", "gather_facts": False, "vars": variables, "tasks": tasks}]))
        start = time.monotonic()
        program = pathlib.Path(sys.executable).with_name("ansible-playbook")
        argv = [str(program) if program.exists() else "ansible-playbook", "-i", str(ROOT / "inventory/rehearsal"), "-e", "@" + str(secret)]
        done = subprocess.run(
            [*argv, *self.options, str(playbook)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, check=False,
        )
        self.seconds, self.code, self.text = time.monotonic() - start, done.returncode, done.stdout.decode()

    def changed(self):
        return int(re.findall(r"changed=(\d+)", self.text)[-1])


def until_half(mirror, total, base=0):
    """Wait until about half of the model was sent."""
    limit = time.monotonic() + 120
    while sum(mirror.sent.values()) - base < total // 2:
        if time.monotonic() > limit:
            raise SystemExit("the transfer does not move")
        time.sleep(0.05)


def main():
    source = pathlib.Path(sys.argv[1])
    files = {p.name: p.read_bytes() for p in source.iterdir() if p.is_file()}
    total = sum(len(data) for name, data in files.items() if name != "SHA256SUMS")
    failures = []

    def check(what, good, shown=""):
        print("%-72s %s %s" % (what, "yes" if good else "NO", shown), flush=True)
        if not good:
            failures.append(what)

    bad_mirror = load("bad_mirror", "tests/support/bad_mirror.py")
    on_host("rm -rf %s /root/.ansible/tmp/*" % MODEL)
    with tempfile.TemporaryDirectory() as name, bad_mirror.Mirror(files, token=TOKEN, delay=0.6) as mirror:
        folder = pathlib.Path(name)

        play = Play(folder, mirror.url, "--check")
        play.start()
        play.join()
        check("check mode says the bytes and fetches none", play.code == 0 and "%d bytes to fetch" % total in " ".join(play.text.split()), "%d bytes" % total)
        base = sum(mirror.sent.values())

        play = Play(folder, mirror.url, "-vvv", "--diff")
        play.start()
        until_half(mirror, total, base)
        pids = on_host("for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q 'AnsiballZ_model_fetc[h]' && basename $p; done")
        leak = on_host("cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c '%s[%s]'" % (TOKEN[:-1], TOKEN[-1]))
        on_host("for p in %s; do kill -9 $p; done" % " ".join(pids.split()))
        play.join()
        check("a transfer that is killed fails the play", play.code != 0)
        check("token in no argument and no environment on the host", leak in ("", "0"), leak)
        check("token not in -vvv --diff of the play", TOKEN not in play.text)
        check("progress was shown while it ran", "fetched " in play.text and "left" in play.text)
        check("no marker after a kill", on_host("test -e %s/.dsv4-staged.json && echo there" % MODEL) == "")
        after_kill = sum(mirror.sent.values()) - base

        base = sum(mirror.sent.values())
        have = 0
        play = Play(folder, mirror.url)
        play.start()
        while have == 0 and play.is_alive():
            shown = on_host("cat %s/.dsv4-parts/progress.json" % MODEL)
            have = json.loads(shown)["done_bytes"] if shown.startswith("{") else 0
        until = time.monotonic() + 60
        while sum(mirror.sent.values()) - base < total // 5 and time.monotonic() < until:
            time.sleep(0.05)
        check("the next run goes on where the kill was", have > total // 3, "%d of %d bytes were there" % (have, total))
        on_host("systemctl reboot")
        play.join()
        check("a reboot in the middle fails the play", play.code != 0)
        limit = time.monotonic() + 90
        while on_host("systemctl is-system-running") not in ("running", "degraded") and time.monotonic() < limit:
            time.sleep(1)
        after_reboot = sum(mirror.sent.values()) - base

        mirror.delay = 0.0
        base = sum(mirror.sent.values())
        play = Play(folder, mirror.url)
        play.start()
        play.join()
        last = sum(mirror.sent.values()) - base
        check("the run after the reboot ends the transfer", play.code == 0, play.text[-400:] if play.code else "")
        again = after_kill + after_reboot + last - total
        # Three connections' worth of sockets and two kills of four lanes of a chunk of one MiB at most.
        check("bytes sent again stay below a chunk for each file and kill", again <= 2 * (9 * (1 << 20) + 4 * (1 << 20)), "%d of %d" % (again, total))
        sums = on_host("cd %s && sha256sum *" % MODEL)
        expected = {line.split()[1]: line.split()[0] for line in files["SHA256SUMS"].decode().splitlines()}
        check("equal to the byte, by sha256sum on the host", {line.split()[1]: line.split()[0] for line in sums.splitlines()} == expected)

        times = []
        for dummy in range(2):
            play = Play(folder, mirror.url)
            base = sum(mirror.sent.values())
            play.start()
            play.join()
            times.append(play.seconds)
        quiet = play.code == 0 and play.changed() == 0 and sum(mirror.sent.values()) == base
        check("second run: changed=0 and no byte sent", quiet, "%.1f s for the whole play" % min(times))
        check("token not in the journal", on_host("journalctl --no-pager -o verbose | grep -c %s" % TOKEN) == "0")
        found = on_host("grep -rlF %s /root /tmp /var/tmp /var/lib /var/log /opt/dsv4 /etc /run 2>/dev/null | head" % TOKEN)
        check("token in no file on the host", found == "", found)
    print("%d of the checks failed" % len(failures) if failures else "all checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
