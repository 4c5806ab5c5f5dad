# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the units of the endpoint do right now, and who else is in their way.

Reads systemctl, /proc and one URL a unit; changes nothing. The readers are handed in, so tests need no systemd.
"""

from __future__ import annotations

import os
import re
import subprocess
import urllib.error
import urllib.request

PROPERTIES = (
    "Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "Result", "NRestarts", "MainPID",
    "ExecMainStatus", "ExecMainStartTimestamp", "InvocationID", "NeedDaemonReload",
)
RELEASE = re.compile(r"/releases/([0-9a-f]{12})(?:/|$)")
PROGRESS = re.compile(
    r"Load weight|safetensors checkpoint shards|Memory pool|KV Cache|max_total_num_tokens|[Cc]apture|autotun|"
    r"Compiling|warmup|Uvicorn|fired up|Loading|not there yet|is in use by|is held on", re.I)


def run(argv):
    """(exit code, output) of a command that only reads."""
    environment = dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0", SYSTEMD_PAGER="")
    try:
        result = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return 127, ""
    return result.returncode, result.stdout.decode("utf-8", "replace")


def parse_show(text):
    """systemctl show's blocks: one dictionary a unit, by the unit's name."""
    units = {}
    for block in text.strip().split("\n\n"):
        properties = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        if properties.get("Id"):
            units[properties["Id"]] = properties
    return units


def _whole(text):
    return int(text) if str(text).isdigit() else 0


def unit_of_show(name, properties, release_of_pid):
    """The facts about one unit."""
    load = properties.get("LoadState", "not-found")
    pid = _whole(properties.get("MainPID"))
    return {
        "unit": name,
        "present": load not in ("not-found", "error", ""),
        "active_state": properties.get("ActiveState", "inactive"),
        "sub_state": properties.get("SubState", "dead"),
        "enabled": properties.get("UnitFileState", "") in ("enabled", "enabled-runtime"),
        "unit_file_state": properties.get("UnitFileState", ""),
        "failed": properties.get("ActiveState") == "failed",
        "result": properties.get("Result", ""),
        "restarts": _whole(properties.get("NRestarts")),
        "main_pid": pid,
        "exit_status": _whole(properties.get("ExecMainStatus")),
        "invocation": properties.get("InvocationID", ""),
        "need_reload": properties.get("NeedDaemonReload") == "yes",
        "started_at": _whole(properties.get("ExecMainStartTimestamp", "").lstrip("@")),
        "release": release_of_pid(pid) if pid else None,
    }


def release_of_pid(pid):
    """The release that a process runs from: its working folder lies inside of it."""
    try:
        match = RELEASE.search(os.readlink("/proc/%d/cwd" % pid))
    except OSError:
        return None
    return match.group(1) if match else None


def units(names, runner=run, of_pid=release_of_pid):
    """{name: facts} for units, named without .service."""
    wanted = ["%s.service" % name for name in names]
    if not wanted:
        return {}
    unused, text = runner(["systemctl", "show", "--timestamp=unix", "--property=" + ",".join(PROPERTIES)] + wanted)
    shown = parse_show(text)
    return {name: unit_of_show(name, shown.get("%s.service" % name, {}), of_pid) for name in names}


def http_status(url, timeout=5):
    """The status that a URL answers with, 0 when nothing answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return 0


def journal(unit, count=60, invocation="", runner=run):
    """The last lines of a unit's journal, messages only; of its last start only when its invocation is known."""
    argv = ["journalctl", "--no-pager", "-q", "-o", "cat", "-n", str(count)]
    if re.match(r"^[0-9a-f]{32}$", invocation):
        # What the unit's processes wrote, or what systemd wrote about them.
        argv += ["_SYSTEMD_INVOCATION_ID=" + invocation, "+", "INVOCATION_ID=" + invocation]
    else:
        argv += ["-u", "%s.service" % unit]
    unused, text = runner(argv)
    return [tidy(line) for line in text.splitlines()]


def tidy(line):
    """A line of a journal without colours, in one screen's width, and without the engine's list of arguments."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"server_args=.*", "server_args=(left out)", line)
    return line if len(line) <= 500 else line[:500] + " ..."


def progress_line(lines):
    """The newest line that tells how far a start is, or nothing."""
    for line in reversed(lines):
        if PROGRESS.search(line):
            return line.strip()[:160]
    return ""


# --- ports ----------------------------------------------------------------------------------------------


def listening(proc="/proc"):
    """[(address, port, inode)] of every listening TCP socket."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            with open(os.path.join(proc, "net", name), encoding="ascii") as stream:
                lines = stream.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                address, port = fields[1].rsplit(":", 1)
                found.append((decode_address(address), int(port, 16), fields[9]))
    return found


def decode_address(text):
    """0100007F -> 127.0.0.1; the words of an address lie in host order there."""
    words = [text[index:index + 8] for index in range(0, len(text), 8)]
    data = b"".join(bytes.fromhex(word)[::-1] for word in words)
    if len(data) == 4:
        return ".".join(str(byte) for byte in data)
    if data[:12] == b"\0" * 10 + b"\xff\xff":
        return ".".join(str(byte) for byte in data[12:])
    if data == b"\0" * 16:
        return "::"
    if data == b"\0" * 15 + b"\x01":
        return "::1"
    return ":".join("%x" % (data[index] << 8 | data[index + 1]) for index in range(0, 16, 2))


def owners(inodes, proc="/proc"):
    """{inode: pid} for sockets; needs root to see other users' processes."""
    wanted = {"socket:[%s]" % inode: inode for inode in inodes}
    found = {}
    try:
        pids = [name for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return found
    for pid in pids:
        folder = os.path.join(proc, pid, "fd")
        try:
            handles = os.listdir(folder)
        except OSError:
            continue
        for handle in handles:
            try:
                inode = wanted.get(os.readlink(os.path.join(folder, handle)))
            except OSError:
                continue
            if inode:
                found.setdefault(inode, int(pid))
    return found


def describe_pid(pid, proc="/proc"):
    """{pid, name, unit, cgroup, user} of a process."""
    def read(name):
        try:
            with open(os.path.join(proc, str(pid), name), encoding="utf-8", errors="replace") as stream:
                return stream.read()
        except OSError:
            return ""

    cgroup = (read("cgroup").strip().splitlines() or [""])[-1].rpartition(":")[2]
    services = re.findall(r"([^/]+\.(?:service|scope))", cgroup)
    uid = re.search(r"(?m)^Uid:\s+(\d+)", read("status"))
    return {"pid": pid, "name": read("comm").strip() or "unknown", "cgroup": cgroup,
            "unit": services[-1] if services else "no unit", "uid": int(uid.group(1)) if uid else None}


def port_holders(ports, own_units=(), proc="/proc"):
    """Who listens on ports that units are about to take: [{port, address, pid, name, unit, own}]."""
    wanted = {}
    for entry in ports:
        wanted[int(entry["port"])] = entry
    sockets = [socket for socket in listening(proc) if socket[1] in wanted]
    pids = owners([inode for unused, unused_too, inode in sockets], proc) if sockets else {}
    found = []
    for address, port, inode in sockets:
        pid = pids.get(inode)
        holder = describe_pid(pid, proc) if pid else {
            "pid": None, "name": "a process that can't be seen from here", "unit": "unknown", "cgroup": "", "uid": None}
        own = holder["unit"] in ["%s.service" % name for name in own_units]
        found.append(dict(holder, port=port, address=address, own=own,
                          what=wanted[port].get("what", ""), instance=wanted[port].get("instance", "")))
    return sorted(found, key=lambda item: (item["port"], item["address"]))


def stranger_sentence(holder):
    """One sentence that names who is in the way."""
    who = "pid %d (%s, unit %s)" % (holder["pid"], holder["name"], holder["unit"]) if holder["pid"] \
        else holder["name"]
    return "port %d (%s of %s) is held on %s by %s" % (
        holder["port"], holder["what"] or "port", holder["instance"] or "the plan", holder["address"], who)


# --- what a mode wants ------------------------------------------------------------------------------------


RUNNING = ("active", "activating", "reloading")


def stale_units(facts, active, release, changed_files=(), changed_at=0):
    """{unit: why} of units that run, but not what they should: they have to be stopped and started."""
    found = {}
    for name in active:
        unit = facts[name]
        if unit["active_state"] not in RUNNING:
            continue
        if unit["sub_state"].startswith("auto-restart"):
            found[name] = "fails and restarts"
        elif release and unit["main_pid"] and unit["release"] != release:
            found[name] = "runs from release %s" % (unit["release"] or "none")
        elif "%s.service" % name in changed_files:
            found[name] = "has another unit file than the release"
        elif changed_at and unit["started_at"] and unit["started_at"] < changed_at:
            found[name] = "started before its key was changed"
    return found


def differences(facts, active, inactive, stale):
    """Why the units are not as a mode wants them: sentences, empty when they are."""
    found = []
    for name in active:
        unit = facts[name]
        if not unit["present"]:
            found.append("%s is not installed" % name)
            continue
        if unit["failed"]:
            found.append("%s has failed (%s)" % (name, unit["result"]))
        elif unit["active_state"] not in RUNNING:
            found.append("%s is %s" % (name, unit["active_state"]))
        elif name in stale:
            found.append("%s %s" % (name, stale[name]))
        if not unit["enabled"]:
            found.append("%s is not enabled" % name)
    for name in inactive:
        unit = facts[name]
        if not unit["present"]:
            found.append("%s is not installed" % name)
            continue
        if unit["active_state"] != "inactive":
            found.append("%s is %s" % (name, unit["active_state"]))
        if unit["enabled"]:
            found.append("%s is enabled" % name)
    for name in list(active) + list(inactive):
        if facts[name]["need_reload"]:
            found.append("%s was changed on disk" % name)
    return found


def verdict(unit, baseline_restarts, health):
    """ready, waiting, stopped or failed, for a unit that was started. (A queued start still shows as stopped.)"""
    if unit["failed"]:
        return "failed"
    if unit["restarts"] > baseline_restarts or unit["sub_state"] in ("auto-restart", "auto-restart-queued"):
        return "failed"
    if unit["active_state"] == "active":
        return "ready" if health == 200 else "waiting"
    if unit["active_state"] == "inactive":
        return "stopped"
    return "waiting"
