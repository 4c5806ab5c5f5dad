# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Manifests (what a model must be, file by file) and records (what is known to be right on this host).

A manifest maps a path to its size and sha256. It is read from this collection's own JSON, from the tree
listing of the hub, or from a SHA256SUMS file. A record adds size, modification time and inode of the file
whose content was hashed: as long as these three hold, the content need not be read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat

#: Written last into a staged directory; without it nothing there counts.
MARKER = ".dsv4-staged.json"
#: Partial files, their state and the record of an unfinished transfer.
WORK_DIR = ".dsv4-parts"
FORMAT = 1
#: No metadata file that we parse is larger than this.
MAX_TEXT = 64 * 1024 * 1024

_HEX64 = re.compile(r"\A[0-9a-fA-F]{64}\Z")
_HEX40 = re.compile(r"\A[0-9a-fA-F]{40}\Z")
_SUM_LINE = re.compile(r"\A(\\?)([0-9a-fA-F]{64})[ \t][ *\t]?(.+)\Z")
_BSD_LINE = re.compile(r"\A(\\?)SHA256 ?\((.+)\) ?= ?([0-9a-fA-F]{64})\Z")
_ESCAPE = re.compile(r"\\(.)")


class ManifestError(Exception):
    """The manifest cannot be used. C(code) is stable."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def safe_path(path):
    """Return the path when it is a plain relative one, or raise: a manifest must not write outside of its directory."""
    if not isinstance(path, str) or not path or "\0" in path or path.startswith("/") or len(path.encode("utf-8", "replace")) > 1024:
        raise ManifestError("manifest_unsafe_path", "the path %r is not a relative file name" % (str(path)[:120],))
    parts = path.split("/")
    if any(part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > 255 for part in parts) or any(ord(c) < 32 for c in path):
        raise ManifestError("manifest_unsafe_path", "the path %r leaves its directory or is malformed" % path[:120])
    if parts[0] == WORK_DIR or path == MARKER:
        raise ManifestError("manifest_unsafe_path", "the path %r is reserved" % path[:120])
    return path


def _entry(size, sha256, git_sha1=None):
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise ManifestError("manifest_invalid", "the size %r is not a number of bytes" % (size,))
    entry = {"size": size, "sha256": None}
    if sha256 is not None:
        if not isinstance(sha256, str) or not _HEX64.match(sha256):
            raise ManifestError("manifest_invalid", "%r is not a sha256" % (str(sha256)[:80],))
        entry["sha256"] = sha256.lower()
    if git_sha1 is not None:
        if not isinstance(git_sha1, str) or not _HEX40.match(git_sha1):
            raise ManifestError("manifest_invalid", "%r is not a git object id" % (str(git_sha1)[:80],))
        entry["git_sha1"] = git_sha1.lower()
    return entry


def _add(files, path, entry):
    path = safe_path(path)
    if path in files and files[path] != entry:
        raise ManifestError("manifest_invalid", "%s is listed twice with different content" % path)
    files[path] = entry


def parse_sums(text):
    """Lines of sha256sum (two blanks or blank and star), with sub-directories and escapes, and the BSD form."""
    files = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _SUM_LINE.match(line)
        if match:
            escaped, digest, path = match.groups()
        else:
            match = _BSD_LINE.match(line)
            if not match:
                raise ManifestError("manifest_invalid", "line %d is neither 'sha256  path' nor a comment" % number)
            escaped, path, digest = match.groups()
        if escaped:
            path = _ESCAPE.sub(lambda m: {"n": "\n", "r": "\r"}.get(m.group(1), m.group(1)), path)
        while path.startswith("./"):
            path = path[2:]
        _add(files, path, _entry(None, digest))
    return files


def parse_hub_tree(items):
    """The hub's listing of a revision: large files carry a sha256, small ones only git's object id."""
    files = {}
    for item in items:
        if not isinstance(item, dict) or item.get("type") not in ("file", "directory"):
            raise ManifestError("manifest_invalid", "the listing of the hub holds something that is neither file nor directory")
        if item["type"] == "directory":
            continue
        lfs = item.get("lfs")
        if isinstance(lfs, dict):
            _add(files, item.get("path"), _entry(lfs.get("size", item.get("size")), lfs.get("oid") or lfs.get("sha256")))
        else:
            _add(files, item.get("path"), _entry(item.get("size"), None, item.get("oid")))
    return files


def parse_manifest(text):
    """Any of the known forms to C({path: {size, sha256[, git_sha1]}})."""
    if len(text) > MAX_TEXT:
        raise ManifestError("manifest_invalid", "the manifest is larger than %d bytes" % MAX_TEXT)
    if text.lstrip()[:1] in ("{", "["):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ManifestError("manifest_invalid", "the manifest is not JSON: %s" % str(exc)[:120]) from exc
        if isinstance(data, list):
            files = parse_hub_tree(data)
        else:
            listed = data.get("files")
            if not isinstance(listed, dict):
                raise ManifestError("manifest_invalid", "the manifest has no mapping 'files'")
            files = {}
            for path, item in listed.items():
                if not isinstance(item, dict):
                    raise ManifestError("manifest_invalid", "the entry of %s is no mapping" % path[:120])
                _add(files, path, _entry(item.get("size"), item.get("sha256"), item.get("git_sha1")))
    else:
        files = parse_sums(text)
    if not files:
        raise ManifestError("manifest_empty", "the manifest lists no file")
    return files


def dump_manifest(files):
    """Stable text of a manifest (no dates), fit to be kept in version control or with a release."""
    kept = {
        path: {key: entry[key] for key in ("size", "sha256", "git_sha1") if entry.get(key) is not None}
        for path, entry in sorted(files.items())
    }
    return json.dumps({"format": FORMAT, "files": kept}, indent=1, sort_keys=True) + "\n"


def git_blob(size):
    """Hash object primed as git does for a blob of this size."""
    digest = hashlib.new("sha1", b"blob %d\0" % size, usedforsecurity=False)
    return digest


def stat_entry(status, sha256):
    """The record of a file whose content was hashed while it had this status."""
    return {"size": status.st_size, "mtime": status.st_mtime_ns, "inode": status.st_ino, "sha256": sha256}


def unchanged(entry, status):
    """Whether the file still is the one that was hashed."""
    return (
        isinstance(entry, dict)
        and stat.S_ISREG(status.st_mode)
        and entry.get("size") == status.st_size
        and entry.get("mtime") == status.st_mtime_ns
        and entry.get("inode") == status.st_ino
        and isinstance(entry.get("sha256"), str)
        and bool(_HEX64.match(entry["sha256"]))
    )


def fulfils(entry, wanted):
    """Whether a recorded hash is the one that the manifest asks for."""
    if wanted.get("size") is not None and wanted["size"] != entry["size"]:
        return False
    if wanted.get("sha256"):
        return wanted["sha256"] == entry["sha256"]
    if wanted.get("git_sha1"):
        return wanted["git_sha1"] == entry.get("git_sha1")
    return True


def load_json(path, limit=MAX_TEXT):
    """JSON of a small file, or None when it is absent, unreadable, too large or broken: state is never trusted blindly."""
    try:
        with open(path, "rb") as stream:
            raw = stream.read(limit + 1)
        if len(raw) > limit:
            return None
        return json.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def load_record(directory):
    """The files of the marker, or of an unfinished transfer, as C({path: entry})."""
    files = {}
    for name in (os.path.join(directory, WORK_DIR, "record.json"), os.path.join(directory, MARKER)):
        data = load_json(name)
        if isinstance(data, dict) and data.get("format") == FORMAT and isinstance(data.get("files"), dict):
            files.update({path: entry for path, entry in data["files"].items() if isinstance(entry, dict)})
    return files
