# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases: folders named by the hash of what is in them, and two links that say which one serves.

A release is written beside its place and moved there whole, so a name that exists is a finished release; its
manifest has the hash of every managed file, so a damaged one is noticed and made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil

from ansible_collections.blackwell.dsv4.plugins.module_utils import host_files

FORMAT = 1
PLACEHOLDER = "@RELEASE@"
MANIFEST = "manifest.json"
ID = re.compile(r"^[0-9a-f]{12}$")


class ReleaseError(Exception):
    """What stands in the way, in one sentence."""


def sha256(content):
    """The hash of a text."""
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def check_path(path):
    """A path that stays inside of the release."""
    parts = path.split("/")
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts) or path == MANIFEST:
        raise ReleaseError("%r is no path inside of a release" % path)


def release_id(files, links, inputs):
    """Twelve digits over everything that makes a release, its own path left symbolic."""
    content = {
        "format": FORMAT,
        "files": {entry["path"]: [sha256(entry["content"]), entry.get("mode") or "0644"] for entry in files},
        "links": links,
        "inputs": inputs,
    }
    return sha256(json.dumps(content, sort_keys=True, ensure_ascii=True))[:12]


def folder(root, identifier):
    """Where a release lies."""
    return os.path.join(root, "releases", identifier)


def rendered(files, path, placeholder=PLACEHOLDER):
    """The files with the real path in them."""
    return [dict(entry, content=entry["content"].replace(placeholder, path)) for entry in files]


def manifest_of(identifier, files, links, inputs):
    """What manifest.json says."""
    return {
        "format": FORMAT,
        "id": identifier,
        "files": {entry["path"]: {"sha256": sha256(entry["content"]), "mode": entry.get("mode") or "0644"}
                  for entry in files},
        "links": dict(links),
        "inputs": inputs,
    }


def read_manifest(path):
    """The manifest of a release, or None."""
    try:
        with open(os.path.join(path, MANIFEST), encoding="utf-8") as stream:
            manifest = json.load(stream)
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def problems(path):
    """What is missing from a release or changed in it: sentences, empty when it is complete."""
    if not os.path.isdir(path):
        return ["no such release: %s" % os.path.basename(path)]
    manifest = read_manifest(path)
    if manifest is None:
        return ["%s has no readable manifest" % path]
    found = []
    for name, entry in sorted(manifest["files"].items()):
        full = os.path.join(path, name)
        try:
            with open(full, "rb") as stream:
                digest = hashlib.sha256(stream.read()).hexdigest()
        except OSError:
            found.append("%s is missing" % full)
            continue
        if digest != entry.get("sha256"):
            found.append("%s was changed" % full)
    for name, target in sorted((manifest.get("links") or {}).items()):
        full = os.path.join(path, name)
        if not os.path.islink(full) or os.readlink(full) != target:
            found.append("%s does not point to %s" % (full, target))
        elif not os.path.exists(full):
            found.append("%s points to %s, which is gone" % (full, target))
    return found


def _write(path, content, mode):
    host_files.make_parents(path)
    host_files.write_atomic(path, content, int(str(mode or "0644"), 8))


def build(root, identifier, files, links, inputs, placeholder=PLACEHOLDER):
    """Write a release; what stood at its place, damaged, goes away. Returns its path."""
    place = folder(root, identifier)
    above = os.path.dirname(place)
    host_files.make_folder(above)
    for name in os.listdir(above):
        if name.startswith(".") and name.endswith((".new", ".old")):
            shutil.rmtree(os.path.join(above, name), ignore_errors=True)
    fresh = os.path.join(above, ".%s.new" % identifier)
    try:
        os.mkdir(fresh)
        os.chmod(fresh, 0o755)
        real = rendered(files, place, placeholder)
        for entry in real:
            check_path(entry["path"])
            _write(os.path.join(fresh, entry["path"]), entry["content"], entry.get("mode"))
        for name, target in links.items():
            check_path(name)
            os.symlink(target, os.path.join(fresh, name))
        # An empty folder for the units to work in: python -m looks for modules in its working folder first.
        host_files.make_folder(os.path.join(fresh, "run"))
        manifest = manifest_of(identifier, real, links, inputs)
        _write(os.path.join(fresh, MANIFEST), json.dumps(manifest, indent=1, sort_keys=True) + "\n", "0644")
        for current, unused, unused_too in os.walk(fresh):
            host_files.sync_folder(current)
        old = os.path.join(above, ".%s.old" % identifier)
        if os.path.lexists(place):
            os.rename(place, old)
        os.rename(fresh, place)
        host_files.sync_folder(above)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise ReleaseError("release %s can't be written: %s" % (identifier, error.strerror or error)) from error
    return place


# --- links ---------------------------------------------------------------------------------------------


def linked(root, name):
    """The release that current or previous points to, or None."""
    try:
        target = os.readlink(os.path.join(root, name))
    except OSError:
        return None
    identifier = os.path.basename(target.rstrip("/"))
    return identifier if ID.match(identifier) else None


def switch(root, name, identifier):
    """Point a link to a release in one step; to None takes it away."""
    path = os.path.join(root, name)
    if identifier is None:
        os.unlink(path)
        host_files.sync_folder(root)
        return
    fresh = path + ".new"
    if os.path.lexists(fresh):
        os.unlink(fresh)
    os.symlink(os.path.join("releases", identifier), fresh)
    os.replace(fresh, path)
    host_files.sync_folder(root)


def wanted_links(identifier, served):
    """current and previous once a release is active. served: both as they were when the last verified release served."""
    current, previous = served.get("current"), served.get("previous")
    if current and current != identifier:
        previous = current
    if previous == identifier:
        previous = None
    return {"current": identifier, "previous": previous}


def known(root):
    """The releases of a host, newest last."""
    above = os.path.join(root, "releases")
    try:
        names = [name for name in os.listdir(above) if ID.match(name)]
    except OSError:
        return []

    def age(name):
        try:
            return os.stat(os.path.join(above, name, MANIFEST)).st_mtime
        except OSError:
            return 0.0

    return sorted(names, key=lambda name: (age(name), name))


# --- unit files -----------------------------------------------------------------------------------------


def read_text(path):
    """A file's text, or None when it is not there."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    except OSError:
        return None


def unit_differences(release_path, unit_dir, names):
    """{name: (installed text or None, wanted text)} of the units that are not as in the release."""
    different = {}
    for name in names:
        wanted = read_text(os.path.join(release_path, "units", name))
        if wanted is None:
            raise ReleaseError("%s has no unit %s" % (release_path, name))
        path = os.path.join(unit_dir, name)
        installed = read_text(path)
        if installed != wanted or os.path.islink(path):
            different[name] = (installed, wanted)
    return different


def releases_of_units(unit_dir, names, root):
    """Releases that installed units run from."""
    found = set()
    pattern = re.compile(re.escape(os.path.join(root, "releases")) + r"/([0-9a-f]{12})\b")
    for name in names:
        found.update(pattern.findall(read_text(os.path.join(unit_dir, name)) or ""))
    return found


# --- pruning --------------------------------------------------------------------------------------------


def prunable(root, keep, protected):
    """(releases to remove, environments that no remaining release uses)."""
    names = known(root)
    guarded = {name for name in protected if name} | {linked(root, "current"), linked(root, "previous")}
    removable = [name for name in names if name not in guarded]
    spare = max(0, keep - len([name for name in names if name in guarded]))
    # Oldest first; more room than releases leaves all of them.
    gone = removable[:max(0, len(removable) - spare)]
    used = set()
    for name in names:
        if name not in gone:
            for target in ((read_manifest(folder(root, name)) or {}).get("links") or {}).values():
                used.add(os.path.realpath(target))
    venvs = os.path.join(root, "venvs")
    try:
        entries = sorted(os.listdir(venvs))
    except OSError:
        entries = []
    unused = [os.path.join(venvs, name) for name in entries
              if re.match(r"^(engine|router)-[0-9a-f]{12}$", name)
              and os.path.realpath(os.path.join(venvs, name)) not in used]
    return gone, unused if gone else []


def unneeded_keys(root, gone, paths):
    """Files with keys that no release needs, once those that go are gone. A release that was made with a key does not start without it."""
    left = [read_manifest(folder(root, name)) or {} for name in known(root) if name not in gone]
    if any((manifest.get("inputs") or {}).get("api_key") for manifest in left):
        return []
    return [path for path in paths if os.path.lexists(path)]
