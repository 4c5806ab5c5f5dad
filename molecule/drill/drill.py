# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Break a served host in many ways and look at what comes back, within how many seconds, and whether anything is lost.

The host is the rehearsal host, served by site.yml. Each fault is followed by the same look: all units active (or the
state that the fault should leave), the router ready, three probes through it, the release and its files as they were.

    python3 drill.py                      all faults in one go; writes RESULTS.md beside this file, anew after each row
    python3 drill.py --only kill          faults whose name holds a word; their rows are put into RESULTS.md
    python3 drill.py --since rollback     from the first such fault on; likewise
    python3 drill.py --short              the five that molecule's default scenario runs; writes nothing
    python3 drill.py --list
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRIO = ("sglang-dsv4-prefill", "sglang-dsv4-decode", "sglang-dsv4-router")
SINGLE = "sglang-dsv4"
SKIPPED_ROLES = "preflight,nvidia_driver,sglang_runtime,kernel_build,model_staging"
PLAN = "/opt/dsv4/current/plan.json"
# At these tasks of the cutover the play is killed; it is run again afterwards.
KILLED_AT = (
    "Release | Write it",
    "Cutover | Compare the host with what is wanted",
    "Cutover | Save the return point",
    "Cutover | Stop what must not run on",
    "Cutover | Put the release in place",
    "Cutover | Have systemd read the units",
    "Cutover | Start the workers",
    "Cutover | Wait for the workers",
    "Cutover | Start the router",
    "Accept | Close the return point",
)
TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}

# Runs on the host, from standard input: prints where a key is found.
HUNT = """
import os, subprocess
key = b"%s"
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ"):
        try:
            with open("/proc/" + pid + "/" + name, "rb") as stream:
                if key in stream.read():
                    print("/proc/%%s/%%s" %% (pid, name))
        except OSError:
            pass
if key in subprocess.run(["journalctl", "--no-pager", "-a", "-o", "export"], stdout=subprocess.PIPE).stdout:
    print("journal")
for folder, folders, names in os.walk("/"):
    if folder == "/":
        folders[:] = [name for name in folders if name not in ("proc", "sys", "dev", "srv")]
    for name in names:
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
            if status.st_mode & 0o170000 == 0o100000 and status.st_mode & 0o004 and status.st_size < 20000000:
                with open(path, "rb") as stream:
                    if key in stream.read():
                        print(path)
        except OSError:
            pass
"""


class Broken(AssertionError):
    """What a look found wrong."""


class Host:
    """The rehearsal host: commands by SSH, requests by HTTP, playbooks by ansible."""

    def __init__(self, extra):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blackwell-dsv4"
        self.ssh = ["ssh", "-i", str(cache / "ssh/id_ed25519"), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
                    "-o", "UserKnownHostsFile=%s" % (cache / "ssh/known_hosts"), "-o", "GlobalKnownHostsFile=/dev/null",
                    "-o", "ConnectTimeout=5", "-p", os.environ.get("REHEARSAL_SSH_PORT") or "2222", "root@127.0.0.1"]
        self.extra = [word for value in extra for word in ("-e", value)]
        plan = json.loads(self.run("cat " + PLAN))
        self.url = plan["endpoint"]["url"]
        self.model = plan["served_model_name"]
        self.port = plan["endpoint"]["port"]
        self.key = None

    def run(self, command, check=True, timeout=120, text=""):
        """The output of a shell command on the host; text goes to its standard input, where no process list shows it."""
        result = subprocess.run(self.ssh + [command], input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                timeout=timeout, check=False)
        if check and result.returncode != 0:
            raise Broken("%s: %s" % (command, result.stdout.strip()[-300:]))
        return result.stdout

    def playbook_argv(self, book, *words):
        return ["ansible-playbook", book, "-i", "inventory/rehearsal"] + self.extra + list(words)

    def playbook(self, book, *words, expect=0, timeout=900):
        """Run a shipped playbook as an operator would; returns its output."""
        result = subprocess.run(self.playbook_argv(book, *words), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
        if expect is not None and (result.returncode == 0) is not (expect == 0):
            raise Broken("%s ended with %d:\n%s" % (book, result.returncode, result.stdout[-1500:]))
        return result.stdout

    def states(self, *names):
        """{unit: (active state, enabled, result)}"""
        text = self.run("systemctl show --property=Id,ActiveState,UnitFileState,NRestarts %s" % " ".join(
            "%s.service" % name for name in names or TRIO + (SINGLE,)))
        found = {}
        for block in text.strip().split("\n\n"):
            pairs = dict(line.split("=", 1) for line in block.splitlines())
            found[pairs["Id"][:-len(".service")]] = (pairs["ActiveState"], pairs["UnitFileState"])
        return found

    def chat(self, text, timeout=60, **fields):
        """One question through the public port; returns the message and how it finished."""
        body = dict({"model": self.model, "temperature": 0, "max_tokens": 1024,
                     "messages": [{"role": "user", "content": text}]}, **fields)
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(), dict(
            {"content-type": "application/json"}, **({"authorization": "Bearer " + self.key} if self.key else {})))
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["message"], choice["finish_reason"]

    def stream(self, text="Count to 400", timeout=120):
        """A long answer as it comes; returns how it ended: complete, error or cut."""
        body = {"model": self.model, "max_tokens": 4096, "stream": True, "messages": [{"role": "user", "content": text}]}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        seen = 0
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                for line in answer:
                    seen += 1
                    if line.startswith(b"data: [DONE]"):
                        return "complete"
                    if b'"error"' in line:
                        return "error after %d lines" % seen
        except (OSError, urllib.error.URLError) as error:
            return "cut after %d lines (%s)" % (seen, type(error).__name__)
        return "cut after %d lines" % seen

    def probes(self):
        """{probe: None or what is wrong} of the three basic probes."""
        found = {}

        def arithmetic():
            message, finish = self.chat("What is 17*23? Answer with the number.")
            return None if "391" in (message["content"] or "") and not message.get("reasoning_content") and finish == "stop" \
                else "%r, %s" % (message, finish)

        def thinking():
            message, finish = self.chat("What is 17*23?", chat_template_kwargs={"thinking": True})
            return None if (message.get("reasoning_content") or "").strip() and "391" in message["content"] \
                and "think>" not in message["content"] else "%r, %s" % (message, finish)

        def tools():
            message, finish = self.chat("What is the weather in Paris and in Tokyo?", tools=[TOOL])
            cities = sorted(json.loads(call["function"]["arguments"]).get("city") for call in message.get("tool_calls") or [])
            return None if cities == ["Paris", "Tokyo"] and finish == "tool_calls" else "%r, %s" % (message, finish)

        for probe in (arithmetic, thinking, tools):
            try:
                found[probe.__name__] = probe()
            except (OSError, ValueError, KeyError, TypeError) as error:
                found[probe.__name__] = "%s: %s" % (type(error).__name__, error)
        return found

    def belongings(self):
        """What must not be lost: the release and its files, the links, the model, the unit files, the journal's start."""
        return self.run("readlink /opt/dsv4/current; cd /opt/dsv4/current/ && sha256sum manifest.json units/* libexec/* && "
                        "sha256sum /etc/systemd/system/sglang-dsv4*.service && ls -ld /opt/dsv4/current/model/ && "
                        "find -L /opt/dsv4/current/model -type f | sort | xargs ls -l --time-style=+%s")


def served(host, limit, began):
    """Wait until the trio serves again; returns the seconds since the fault, and the probes that pass."""
    wrong = "nothing seen"
    while time.monotonic() - began < limit:
        try:
            states = host.states()
            wrong = ", ".join("%s %s %s" % (name, *states[name]) for name in TRIO if states[name] != ("active", "enabled"))
            if states[SINGLE] != ("inactive", "disabled"):
                wrong = "%s is %s" % (SINGLE, states[SINGLE])
            if not wrong:
                with urllib.request.urlopen(host.url + "/readiness", timeout=5):
                    pass
                found = host.probes()
                wrong = ", ".join("%s: %s" % item for item in found.items() if item[1])
                if not wrong:
                    return time.monotonic() - began, sorted(found)
        except (OSError, Broken, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        time.sleep(1)
    raise Broken("not served again within %d s: %s" % (limit, wrong))


class Drill:
    """The faults, each a generator of one row of the table."""

    def __init__(self, host):
        self.host = host
        self.rows = []

    def row(self, name, fault, limit=180, note=None):
        """Run a fault, look, write the row."""
        host = self.host
        before = host.belongings()
        # Each fault has the units' whole start limit before it: three faults within the hour are the drill's, not a host's.
        host.run("systemctl reset-failed %s" % " ".join("%s.service" % name for name in TRIO), check=False)
        began = time.monotonic()
        result = {"fault": name, "seconds": None, "probes": "", "lost": "", "note": "", "ok": False}
        try:
            said = fault()
            result["note"] = said or note or ""
            result["seconds"], passed = served(host, limit, began)
            result["probes"] = ", ".join(passed)
            after = host.belongings()
            result["lost"] = "nothing" if after == before or getattr(fault, "changes", False) else "files differ"
            result["ok"] = result["lost"] == "nothing"
        except (Broken, OSError, subprocess.TimeoutExpired) as error:
            result["note"] = str(error).strip().replace("\n", " ")[-300:]
        result["took"] = time.monotonic() - began
        self.rows.append(result)
        seconds = "-" if result["seconds"] is None else "%.0f" % result["seconds"]
        print("%-4s %-58s %6s s  %s" % ("ok" if result["ok"] else "FAIL", name, seconds, result["note"]), flush=True)

    # --- processes

    def kill(self, unit, during_stream):
        host = self.host

        def fault():
            said = None
            with concurrent.futures.ThreadPoolExecutor() as pool:
                if during_stream:
                    streaming = pool.submit(host.stream)
                    time.sleep(2)
                host.run("systemctl kill --signal=KILL --kill-whom=main %s" % unit)
                if during_stream:
                    said = "the stream: %s" % streaming.result(timeout=150)
            return said

        return "kill -9 %s, %s" % (unit.replace("sglang-dsv4-", ""), "during a stream" if during_stream else "idle"), fault

    def kill_rank(self):
        def fault():
            self.host.run("pids=$(cat /sys/fs/cgroup/system.slice/sglang-dsv4-decode.service/cgroup.procs 2>/dev/null || "
                          "systemctl show -P MainPID sglang-dsv4-decode); main=$(systemctl show -P MainPID sglang-dsv4-decode); "
                          "for p in $(pgrep -P $main); do kill -9 $p; break; done")

        return "kill -9 one rank of decode", fault

    def order(self, stop, start):
        host = self.host

        def fault():
            for name in stop:
                host.run("systemctl stop sglang-dsv4-%s" % name)
            for name in start:
                host.run("systemctl start --no-block sglang-dsv4-%s" % name)

        return "stop %s; start %s" % (", ".join(stop), ", ".join(start)), fault

    def stranger(self):
        host = self.host

        def fault():
            host.run("systemctl stop sglang-dsv4-router")
            host.run("systemd-run --unit=drill-stranger --collect python3 -c 'import socket, time; s = socket.socket(); "
                     "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind((\"0.0.0.0\", %d)); s.listen(); "
                     "time.sleep(600)'" % host.port)
            time.sleep(2)
            try:
                host.run("systemctl start --no-block sglang-dsv4-router")
                output = host.playbook("site.yml", "--skip-tags", SKIPPED_ROLES, expect=1)
                if "drill-stranger.service" not in output or "is held on" not in output:
                    raise Broken("the play does not name the stranger: %s" % output[-500:])
            finally:
                host.run("systemctl stop drill-stranger", check=False)
            return "the play names pid and unit of the stranger and changes nothing"

        return "a stranger holds the public port", fault

    # --- releases

    def deploy(self, number, **environment):
        """The words that make another release: a variable that the engine does not know."""
        return ["--skip-tags", SKIPPED_ROLES, "-e", json.dumps({"sglang_dsv4_environment": dict(
            {"DRILL": str(number)}, **environment)})]

    def same(self):
        """The words that make the release that serves now."""
        environment = json.loads(self.host.run("cat " + PLAN))["instances"]["prefill"]["environment"]
        return self.deploy(environment["DRILL"]) if "DRILL" in environment else ["--skip-tags", SKIPPED_ROLES]

    def killed_play(self, number, task, once_more=False):
        """The play is killed within a task and run again; and once more, which must change nothing."""
        host = self.host

        def fault():
            process = subprocess.Popen(host.playbook_argv("site.yml", *self.deploy(number)), cwd=ROOT, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
            reached = False
            for line in process.stdout:
                if line.startswith("TASK [") and task in line:
                    reached = True
                    # In the middle of the task, as far as its length allows.
                    time.sleep(0.4)
                    os.killpg(process.pid, signal.SIGKILL)
                    break
            process.wait()
            if not reached:
                raise Broken("the play never reached %s" % task)
            host.playbook("site.yml", *self.deploy(number))
            if once_more and "changed=0" not in host.playbook("site.yml", *self.deploy(number)):
                raise Broken("a further run changes something")
            point = json.loads(host.run("cat /var/lib/dsv4/return-point.json"))
            if point["open"]:
                raise Broken("the return point is still open")
            return "run again: rc 0, return point closed%s" % ("; once more: changed=0" if once_more else "")

        fault.changes = True
        return "the play is killed at \"%s\", run again" % task.replace(" | ", ": "), fault

    def bad_release(self, name, faults, words, variables=None, moved=False):
        """A release whose decode half is bad: the play ends non-zero and goes back by itself.

        A moved one has decode on another port, where nobody answers once the former release is back.
        """
        host = self.host

        def fault():
            host.run("mkdir -p /etc/rehearsal; printf '%%s' '%s' > /etc/rehearsal/drill.json" % json.dumps(
                {"decode": {"faults": faults}}))
            more = dict(variables or {})
            if moved:
                more["dsv4_topology"] = json.loads(host.run("cat /opt/dsv4/current/manifest.json"))["inputs"]["topology"]
                more["dsv4_topology"]["instances"]["decode"]["port"] += 10
            output = host.playbook("site.yml", *self.deploy(name, REHEARSAL_ENGINE_SETTINGS="/etc/rehearsal/drill.json"),
                                   "-e", json.dumps(more), expect=1)
            host.run("rm -f /etc/rehearsal/drill.json")
            for word in words:
                if word not in output:
                    raise Broken("%r is not in the output: %s" % (word, output[-600:]))
            return "rc non-zero, went back by itself; says %r" % words[0]

        return name, fault

    def damaged_target(self):
        """A rollback whose target is not whole is refused before anything is stopped."""
        host = self.host
        file = "/opt/dsv4/current/libexec/readiness.py"
        pids = "systemctl show -P MainPID %s" % " ".join(TRIO)

        def fault():
            before = host.run(pids)
            host.run("cp -a %s /root/drill.kept && echo '# damaged' >> %s" % (file, file))
            try:
                for words, sentence in ((), "readiness.py was changed"), (("-e", "rollback_to=0123456789ab"), "no such release"):
                    output = " ".join(host.playbook("rollback.yml", *words, expect=1).split())
                    if "Nothing was stopped" not in output or sentence not in output:
                        raise Broken("rollback.yml does not say %r: %s" % (sentence, output[-400:]))
            finally:
                host.run("cp -a /root/drill.kept %s && rm /root/drill.kept" % file)
            if host.run(pids) != before:
                raise Broken("a process was touched")
            return "rollback.yml names the damaged file, and a release that is not there; no process was touched"

        return "the target of a rollback is damaged, or not there", fault

    def inconclusive(self):
        """Checks that say nothing against a release: the play ends non-zero, the release stays until a later run decides."""
        host = self.host

        def fault():
            before = host.run("readlink /opt/dsv4/current")
            output = host.playbook("site.yml", *self.deploy("inconclusive"), "-e", "verification_max_tokens=2", expect=1)
            if "Going back to release" in output or host.run("readlink /opt/dsv4/current") == before:
                raise Broken("the release did not stay: %s" % output[-400:])
            if not json.loads(host.run("cat /var/lib/dsv4/return-point.json"))["open"]:
                raise Broken("the return point was closed without a proof")
            host.playbook("site.yml", *self.deploy("inconclusive"))
            if json.loads(host.run("cat /var/lib/dsv4/return-point.json"))["open"]:
                raise Broken("the return point is still open")
            return "rc non-zero, nothing goes back; the next run proves the release and closes the return point"

        fault.changes = True
        return "the checks are cut short by their own limit", fault

    def disk_full(self):
        host = self.host

        def fault():
            host.run("cp -a /opt/dsv4/releases /opt/dsv4/.drill && size=$(du -sk /opt/dsv4/.drill | cut -f 1) && "
                     "mount -t tmpfs -o size=$((size + 24))k drill /opt/dsv4/releases && cp -a /opt/dsv4/.drill/. /opt/dsv4/releases/")
            try:
                output = host.playbook("site.yml", *self.deploy("full"), expect=1)
                if "No space left" not in output:
                    raise Broken("the play does not say why: %s" % output[-400:])
            finally:
                host.run("umount /opt/dsv4/releases; rm -rf /opt/dsv4/.drill")
            return "rc non-zero, says that no space is left; what serves was not touched"

        return "the disk is full in the release folder", fault

    def interruption(self):
        """How long the public port does not answer while another release takes over."""
        host = self.host

        def fault():
            gaps, going = [], [True]

            def ask():
                last = time.monotonic()
                while going[0]:
                    try:
                        if host.chat("What is 17*23?", timeout=10)[1] == "stop":
                            gaps.append(time.monotonic() - last)
                            last = time.monotonic()
                    except (OSError, ValueError, KeyError):
                        pass
                    time.sleep(0.2)

            with concurrent.futures.ThreadPoolExecutor() as pool:
                asking = pool.submit(ask)
                try:
                    host.playbook("site.yml", *self.deploy("interruption"))
                    time.sleep(2)
                finally:
                    going[0] = False
                asking.result(timeout=30)
            load = host.run("for u in sglang-dsv4-prefill sglang-dsv4-decode; do journalctl -u $u -o cat --no-pager | "
                            "grep -o 'ready after [0-9]* s' | tail -n 1; done")
            seconds = max(int(word) for word in load.split() if word.isdigit())
            return "%.0f s without an answer, %.0f s more than the slower worker's %d s to load" % (max(gaps), max(gaps) - seconds, seconds)

        fault.changes = True
        return "another release takes over, requests all along", fault

    def there_and_back(self):
        """A, then B, then rollback_to=previous: A again, file by file."""
        host = self.host

        def fault():
            before = host.belongings()
            host.playbook("site.yml", *self.deploy("there and back"))
            if host.belongings() == before:
                raise Broken("release B is release A")
            host.playbook("rollback.yml", "-e", "rollback_to=previous")
            if host.belongings() != before:
                raise Broken("A is not as it was")
            return "links, units, programs and manifest are equal to the byte"

        return "release B, then rollback_to=previous", fault

    def fallback(self):
        """The single server and forward again."""
        host = self.host

        def fault():
            same = self.same()
            host.playbook("rollback.yml")
            states = host.states()
            if states[SINGLE] != ("active", "enabled") or any(states[name] != ("inactive", "disabled") for name in TRIO):
                raise Broken("after rollback.yml: %s" % states)
            wrong = {name: text for name, text in host.probes().items() if text}
            if wrong:
                raise Broken("the single server: %s" % wrong)
            host.playbook("site.yml", *same)
            return "the single server passed the probes, and site.yml rolled forward"

        return "rollback to the fallback, and forward", fault

    def planted_key(self):
        """A key is set: 401 without it, and it is in no output, argument, environment, journal or readable file."""
        host = self.host

        def fault():
            key, same = "planted-" + secrets.token_hex(12), self.same()
            with tempfile.NamedTemporaryFile("w", suffix=".key") as file:
                file.write(key + "\n")
                file.flush()
                output = host.playbook("site.yml", "-vvv", "--diff", "--skip-tags", SKIPPED_ROLES,
                                       "-e", "sglang_dsv4_api_key_file=" + file.name)
            try:
                if key in output:
                    raise Broken("the key is in the output of the play")
                hits = host.run("python3 -", text=HUNT % key, timeout=300).split()
                if hits:
                    raise Broken("the key is in %s" % ", ".join(hits))
                try:
                    host.chat("What is 17*23?")
                    raise Broken("answers without a key")
                except urllib.error.HTTPError as error:
                    if error.code != 401:
                        raise Broken("without a key: HTTP %d" % error.code) from error
                host.key = key
                if "391" not in host.chat("What is 17*23?")[0]["content"]:
                    raise Broken("no answer with the key")
            finally:
                host.key = None
                host.playbook("site.yml", *same)
            return "401 without it, an answer with it; no hit in -vvv --diff, arguments, environments, journal, readable files"

        return "a planted key is looked for everywhere", fault

    def reboot(self):
        host = self.host

        def fault():
            boot = host.run("cat /proc/sys/kernel/random/boot_id; systemctl show -P UserspaceTimestampMonotonic; ps -o lstart= -p 1")
            host.run("systemctl reboot", check=False)
            time.sleep(2)
            for unused in range(120):
                try:
                    if host.run("cat /proc/sys/kernel/random/boot_id; systemctl show -P UserspaceTimestampMonotonic; ps -o lstart= -p 1",
                                timeout=10) != boot:
                        return "all units come up without help"
                except (Broken, subprocess.TimeoutExpired):
                    pass
                time.sleep(1)
            raise Broken("the host did not come back")

        return "the host reboots", fault

    def faults(self):
        """Every fault, in the order of the table: (name, function, limit, short)."""
        names = ("prefill", "decode", "router")
        for unit in TRIO:
            for during_stream in (False, True):
                yield self.kill(unit, during_stream) + (120, during_stream)
        yield self.kill_rank() + (120, True)
        for first in range(3):
            for step in (1, 2):
                order = [names[first], names[(first + step) % 3], names[(first + 2 * step) % 3]]
                yield self.order(order, order) + (120, first == 2 and step == 1)
        yield self.order(names, names[::-1]) + (120, False)
        yield self.stranger() + (300, False)
        yield self.damaged_target() + (300, False)
        yield self.inconclusive() + (600, False)
        yield self.bad_release("decode is ready and answers garbage", {"garbage": True}, ["Going back to release"]) + (600, False)
        yield self.bad_release("decode never gets ready", {"never_ready": True}, ["Going back to release", "not ready"],
                               {"sglang_dsv4_start_timeout": 120, "sglang_dsv4_gpu_wait": 5}) + (900, False)
        yield self.bad_release("decode ends with a permanent failure", {"start_error": "no_kernel"},
                               ["Going back to release", "no_kernel_image"], moved=True) + (600, False)
        for number, task in enumerate(KILLED_AT, 1):
            yield self.killed_play(number, task, once_more=number in (4, 8)) + (900, False)
        yield self.interruption() + (600, False)
        yield self.there_and_back() + (900, False)
        yield self.fallback() + (900, False)
        yield self.planted_key() + (900, False)
        yield self.disk_full() + (600, False)
        yield self.reboot() + (300, False)


def line_of(row):
    """A line of the table."""
    return "| %s | %s | %s | %s | %s |" % (
        row["fault"].replace("|", "\\|"), row["probes"] or "**none**", "-" if row["seconds"] is None else "%.0f" % row["seconds"],
        row["lost"] or "**not looked at**", row["note"].replace("|", "\\|"))


def table(names, rows, before, ended=""):
    """RESULTS.md: the rows of this run, and of the run before for faults that this one left out. Ended: how a run of all went."""
    # A blank and a bar end a cell; a bar inside of one is written with a backslash.
    lines = {line.split(" |")[0][2:].replace("\\|", "|"): line for line in before.splitlines() if line.startswith("| ")}
    lines.update({row["fault"]: line_of(row) for row in rows})
    shown = [lines[name] for name in names if name in lines]
    green = sum("**" not in line for line in shown)
    return "\n".join([
        "# The drill", "",
        "Made by `make drill` (molecule/drill/drill.py) on the rehearsal host: real systemd, the real router, the rehearsal engine",
        "(it loads for 3 s; a worker that ended waits 15 s before it starts again). Each fault has the units' whole start limit",
        "before it. Seconds run from the fault until the pair serves and all three probes pass through the router; rows with a",
        "playbook include its runs.", "",
        "| fault | probes that pass afterwards | seconds | lost | what was seen |", "|---|---|---:|---|---|"] + shown + [
        "", " ".join(filter(None, ["%d of %d rows are green." % (green, len(names)), ended])), ""])


def main(argv=None):
    """Drill."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--since", default="", help="the first fault whose name holds this, and those after it")
    parser.add_argument("--short", action="store_true", help="the five of molecule's default scenario; writes nothing")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    parser.add_argument("--results", default=str(HERE / "RESULTS.md"),
                        help="the table; with --only or --since its other rows stay (default: beside this file)")
    parser.add_argument("-e", "--extra", action="append", default=[], metavar="VARIABLES", help="extra variables for the playbooks")
    given = parser.parse_args(argv)
    if given.list:
        for name, *unused in Drill(None).faults():
            print(name)
        return 0
    began = time.monotonic()
    host = Host(given.extra)
    served(host, 300, time.monotonic())
    drill = Drill(host)
    results = Path(given.results)
    whole = not (given.only or given.since or given.short)
    before = results.read_text(encoding="utf-8") if results.exists() and not whole else ""
    names = [name for name, *unused in drill.faults()]
    started = not given.since
    for name, fault, limit, short in drill.faults():
        started = started or given.since in name
        if started and given.only in name and (short or not given.short):
            drill.row(name, fault, limit)
            if not given.short:
                results.write_text(table(names, drill.rows, before), encoding="utf-8")
    seconds = int(time.monotonic() - began)
    if whole:
        results.write_text(table(names, drill.rows, "", "One run, without a stop between them, in %d minutes; load average %.1f at its end." % (
            seconds // 60, os.getloadavg()[2])), encoding="utf-8")
    bad = [row for row in drill.rows if not row["ok"]]
    print("drill: %d min %02d s" % (seconds // 60, seconds % 60))
    print("%d passed, %d failed" % (len(drill.rows) - len(bad), len(bad)))
    return 1 if bad or not drill.rows else 0


if __name__ == "__main__":
    sys.exit(main())
