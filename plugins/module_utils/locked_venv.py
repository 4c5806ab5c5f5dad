# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A virtual environment that is exactly what a lock says, named by the lock's content.

A finished environment carries a marker, written last. Without the marker, or with a marker of another lock, what
lies there is taken for a torn build and made anew, so a killed build never serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess

from . import host_files

MARKER = ".dsv4-venv.json"
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;]+)")


class VenvError(Exception):
    """A build that failed; the message is one sentence, the log's tail says more."""

    def __init__(self, message, tail=""):
        super().__init__(message)
        self.tail = tail


def logical_lines(text):
    """The requirements of a lock, continuation lines joined, comments and blank lines gone."""
    joined = re.sub(r"\\\s*\n", " ", text)
    lines = []
    for line in joined.splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line).strip()
        if line:
            lines.append(re.sub(r"\s+", " ", line))
    return lines


def split_lock(text):
    """(options, hashed, unhashed): pip refuses to mix requirements with and without hashes."""
    options, hashed, unhashed = [], [], []
    for line in logical_lines(text):
        if line.startswith("-"):
            options.append(line)
        elif "--hash=" in line:
            hashed.append(line)
        else:
            unhashed.append(line)
    return options, hashed, unhashed


def normal_name(name):
    """The spelling of a distribution's name that two spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pin_of(line):
    """("sglang", "0.5.23") of a pinned requirement, or None."""
    match = _PIN.match(line)
    return (normal_name(match.group(1)), match.group(2)) if match else None


def problems_of_lock(text, require_hashes=True):
    """What makes a lock unfit: sentences, empty when it is fit."""
    options, hashed, unhashed = split_lock(text)
    problems = ["option %s is not for a lock" % line.split()[0] for line in options]
    if not hashed and not unhashed:
        problems.append("the lock names no package")
    for line in hashed + unhashed:
        if pin_of(line) is None:
            problems.append("%s is not pinned to one version" % line.split()[0])
    if require_hashes:
        problems += ["%s has no hash" % line.split()[0] for line in unhashed]
    return problems


def file_sha256(path):
    """The sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for piece in iter(lambda: stream.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def wheels_of(lines, wheel_dir):
    """Wheels of a folder that unhashed pins would take, so that a rebuilt wheel is noticed."""
    found = []
    if not wheel_dir or not os.path.isdir(wheel_dir):
        return found
    names = sorted(os.listdir(wheel_dir))
    for line in lines:
        pin = pin_of(line)
        for name in names:
            parts = name.split("-")
            if pin and name.endswith(".whl") and len(parts) >= 5 and normal_name(parts[0]) == pin[0] \
                    and parts[1] == pin[1]:
                found.append(os.path.join(wheel_dir, name))
    return found


def venv_key(text, python_version, wheels=(), probe=""):
    """The first twelve digits of the hash over everything that decides what is inside."""
    content = {
        "lock": sorted(logical_lines(text)),
        "python": python_version,
        "wheels": sorted([os.path.basename(path), file_sha256(path)] for path in wheels),
        "probe": hashlib.sha256(probe.encode("utf-8")).hexdigest() if probe else "",
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()[:12]


def python_version(python, run=None):
    """"3.13.5 CPython" of an interpreter; raises VenvError when it doesn't run."""
    code = "import platform; print(platform.python_version(), platform.python_implementation())"
    try:
        result = (run or _run)([python, "-I", "-c", code], None)
    except OSError as error:
        raise VenvError("%s does not run: %s" % (python, error)) from error
    if result[0] != 0:
        raise VenvError("%s does not run" % python, result[1])
    return result[1].strip().splitlines()[-1]


def read_marker(path):
    """The marker of a finished environment, or None."""
    try:
        with open(os.path.join(path, MARKER), encoding="utf-8") as stream:
            marker = json.load(stream)
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def is_complete(path, key):
    """Finished, of this lock, and its interpreter still there (a distribution upgrade takes it away)."""
    marker = read_marker(path)
    return bool(marker) and marker.get("key") == key and os.path.exists(os.path.join(path, "bin", "python"))


def _run(argv, environment, log=None):
    """(exit code, output); with a log the output goes there as it comes and only its tail is returned."""
    if log is None:
        result = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, check=False)
        return result.returncode, result.stdout.decode("utf-8", "replace")
    with open(log, "ab") as stream:
        start = stream.tell()
        code = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, stdout=stream,
                              stderr=subprocess.STDOUT, check=False).returncode
    with open(log, "rb") as stream:
        stream.seek(max(start, os.path.getsize(log) - 4000))
        return code, stream.read().decode("utf-8", "replace")


def pip_environment(index_url="", ca_bundle="", proxy="", base=None):
    """pip's settings by environment: an index address may hold a password, and arguments are readable."""
    environment = {key: value for key, value in (base if base is not None else os.environ).items()
                   if not key.startswith("PIP_") and key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    environment.update({
        "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_NO_CACHE_DIR": "1",
        "PIP_ROOT_USER_ACTION": "ignore", "PIP_PROGRESS_BAR": "off", "LC_ALL": "C.UTF-8",
        # Of the host's pip.conf, index and certificates hold. The lock alone decides versions, the environment the place.
        "PIP_CONSTRAINT": os.devnull, "PIP_USER": "0",
    })
    if index_url:
        environment["PIP_INDEX_URL"] = index_url
    if ca_bundle:
        environment["PIP_CERT"] = ca_bundle
    if proxy:
        environment["PIP_PROXY"] = proxy
    return environment


def pip_steps(python, hashed, unhashed, wheels, wheel_dir, scratch):
    """The pip calls of a build, in order. --no-deps: the lock is complete, and pip check says so afterwards."""
    # Wheels only: nothing is compiled on the host.
    common = [python, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--no-warn-script-location"]
    if wheel_dir:
        common += ["--no-index", "--find-links", wheel_dir]
    steps = []
    for name, lines, extra in (("hashed.txt", hashed, ["--require-hashes"]), ("unhashed.txt", unhashed, [])):
        if lines:
            path = os.path.join(scratch, name)
            with open(path, "w", encoding="utf-8") as stream:
                stream.write("\n".join(lines) + "\n")
            steps.append(common + extra + ["-r", path])
    if wheels:
        steps.append([python, "-m", "pip", "install", "--no-deps", "--no-index"] + list(wheels))
    return steps


def build(path, key, text, python, version, wheels=(), wheel_dir="", index_url="", ca_bundle="", proxy="", probe="",
          missing_ok=(), run=None, log=None):
    """Make the environment at its final place (its scripts hold the path); the marker comes last."""
    run = run or _run
    environment = pip_environment(index_url, ca_bundle, proxy)
    unused, hashed, unhashed = split_lock(text)
    if os.path.lexists(path):
        if os.path.islink(path) or not os.path.isdir(path):
            raise VenvError("%s is in the way and no folder" % path)
        shutil.rmtree(path)
    host_files.make_parents(path)
    inside = os.path.join(path, "bin", "python")
    code, output = run([python, "-I", "-m", "venv", path], environment, log)
    if code != 0:
        raise VenvError("%s -m venv failed; on Debian and Ubuntu it needs the package python3-venv" % python, output)
    # What pip downloads (gigabytes for an engine) needs this disk and no other, and goes with a torn build.
    scratch = os.path.join(path, ".build")
    os.mkdir(scratch)
    environment["TMPDIR"] = scratch
    try:
        for step in pip_steps(inside, hashed, unhashed, wheels, wheel_dir, scratch):
            code, output = run(step, environment, log)
            if code != 0:
                raise VenvError(explain(output), output)
        code, output = run([inside, "-m", "pip", "check"], environment, None)
        if code != 0:
            wrong = check_problems(output, missing_ok)
            if wrong:
                raise VenvError("the lock is not complete: pip check found %s" % "; ".join(wrong[:5]), output)
        facts = {}
        if probe:
            code, output = run([inside, "-I", "-c", probe], environment, None)
            if code != 0:
                raise VenvError("the installed packages do not import", output)
            facts = json.loads(output.strip().splitlines()[-1])
        code, output = run([inside, "-m", "pip", "list", "--format=json"], environment, None)
        packages = {item["name"]: item["version"] for item in json.loads(output.strip().splitlines()[-1])} \
            if code == 0 else {}
        marker = {"key": key, "python": version, "packages": packages, "facts": facts}
        host_files.write_atomic(os.path.join(path, MARKER), json.dumps(marker, indent=1, sort_keys=True) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return marker


def check_problems(output, missing_ok=()):
    """What pip check complains of, without packages that are left out on purpose; * stands for any."""
    allowed = {normal_name(name) for name in missing_ok}
    found = []
    for line in output.strip().splitlines():
        match = re.search(r" requires ([A-Za-z0-9._-]+), which is not installed", line)
        if line.strip() and not (match and ("*" in allowed or normal_name(match.group(1)) in allowed)):
            found.append(line.strip())
    return found


def explain(output):
    """One sentence for a failed pip call."""
    rules = (
        (r"No space left on device", "no space left on the disk of the virtual environments (while one is built it needs half as much again)"),
        (r"(?:from versions: none|No matching distribution found for ([^\s(]+))",
         "a package of the lock was not found; the index or the wheel folder does not have it, or can't be reached"),
        (r"THESE PACKAGES DO NOT MATCH THE HASHES", "a downloaded package is not the one that the lock names"),
        (r"CERTIFICATE_VERIFY_FAILED|SSLError", "the index's certificate is not trusted; set the CA bundle variable"),
        (r"ProxyError|ConnectTimeout|Temporary failure in name resolution|NewConnectionError|Connection refused",
         "the package index can't be reached"),
    )
    for pattern, sentence in rules:
        match = re.search(pattern, output)
        if match:
            name = match.group(1) if match.groups() and match.group(1) else ""
            return "pip install failed: %s%s" % (sentence, " (%s)" % name if name else "")
    return "pip install failed"
