# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths, messages and small file helpers that every part of the rehearsal host uses."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CLONE = HERE.parent.parent
PR_SET_PDEATHSIG = 1


class Problem(Exception):
    """Something the person at the keyboard has to do; its text is one line."""


def say(text: str) -> None:
    print(f"rehearsal: {text}", flush=True)


@contextlib.contextmanager
def step(text: str):
    """Announce a step and say how long it took, also when it failed."""
    say(f"{text} ...")
    began = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"{text}: failed after {time.monotonic() - began:.1f} s")
        raise
    say(f"{text}: done in {time.monotonic() - began:.1f} s")


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "blackwell-dsv4"


def digest(*parts: object) -> str:
    """A short content key over values that JSON can say."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def file_digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def tree_digest(*roots: Path) -> str:
    """A content key over files and folders: names, executable bits and bytes; leftovers of builds do not count."""
    entries = []
    for root in roots:
        files = [root] if root.is_file() else sorted(root.rglob("*")) if root.is_dir() else []
        for path in files:
            if not path.is_file() or "__pycache__" in path.parts or path.suffix in (".pyc", ".o", ".so"):
                continue
            name = path.name if path == root else str(path.relative_to(root))
            entries.append([root.name, name, bool(path.stat().st_mode & 0o100), file_digest(path)])
    return digest(entries)


@contextlib.contextmanager
def locked(path: Path, what: str):
    """Hold a lock file; say so when somebody else holds it, then wait for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that is busy with {what} ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def cached_folder(parent: Path, key: str, what: str, build, keep: int = 3, in_use: set[str] = frozenset()) -> Path:
    """parent/key, built by build(temporary folder) when it is not there; an interrupted build leaves nothing behind that is used.
    Of the older ones, the last few used stay, and those that a running host stands on."""
    final = parent / key
    if final.is_dir():
        os.utime(final)
        return final
    with locked(parent / ".lock", what):
        if final.is_dir():
            return final
        for leftover in parent.glob(".building-*"):
            shutil.rmtree(leftover)
        work = parent / f".building-{os.getpid()}"
        work.mkdir(mode=0o755)
        try:
            with step(what):
                build(work)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        work.rename(final)
        older = sorted((path for path in parent.iterdir() if path.is_dir() and path != final), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in older[keep - 1:]:
            if path.name not in in_use:
                shutil.rmtree(path)
    return final


def run(argv: list[str], name: str = "", **options) -> subprocess.CompletedProcess:
    """subprocess.run with text output captured; a failure shows the command, or the name it is given, and its own last words."""
    options.setdefault("capture_output", True)
    done = subprocess.run(argv, text=True, check=False, **options)
    if done.returncode:
        words = ((done.stderr or "") + (done.stdout or "")).strip()[-1500:]
        raise Problem(f"{name or ' '.join(map(str, argv))} ended with {done.returncode}: {words}")
    return done


def die_with_parent(number: int):
    """For preexec_fn: the child gets this signal when the thread that started it ends."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, number)


def write(path: Path, text: str | bytes, mode: int = 0o644) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(text.encode() if isinstance(text, str) else text)
    part.chmod(mode)
    part.replace(path)


def _same_file(one: Path, two: Path) -> bool:
    a, b = one.stat(), two.stat()
    return one.samefile(two) or (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


def same_tree(source: Path, target: Path) -> bool:
    """Make target hold exactly the files of source, by hard link where possible; target itself stays the same folder (it may be
    bind-mounted). Returns whether anything changed."""
    target.mkdir(parents=True, exist_ok=True)
    changed = False
    wanted = {path.relative_to(source): path for path in source.rglob("*")} if source.is_dir() else {}
    for path in sorted(target.rglob("*"), reverse=True):
        known = wanted.get(path.relative_to(target))
        if known is not None and known.is_dir() == path.is_dir() and (path.is_dir() or _same_file(path, known)):
            continue
        path.rmdir() if path.is_dir() else path.unlink()
        changed = True
    for name in sorted(wanted):
        path, known = target / name, wanted[name]
        if path.exists():
            continue
        changed = True
        if known.is_dir():
            path.mkdir(mode=0o755)
        else:
            try:
                os.link(known, path)
            except OSError:
                shutil.copy2(known, path)
    return changed


def ca_bundle() -> Path | None:
    """The machine's CA bundle: a company's proxy may have its own authority in it."""
    for name in (os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"):
        if name and Path(name).is_file():
            return Path(name)
    return None


def fail(text: str) -> int:
    print(f"rehearsal: {text}", file=sys.stderr, flush=True)
    return 1
