# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What lies at a path, what should, and the step from one to the other."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

MODES = {"file": "0644", "directory": "0755"}


class HostFilesError(Exception):
    """What stands in the way, in one sentence."""


def look(path):
    """(state, content) of a path; the content of files only, and None where it is no text."""
    if not os.path.lexists(path):
        return "absent", None
    if os.path.isdir(path):
        return "directory", None
    if not os.path.isfile(path) or os.path.islink(path):
        return "other", None
    with open(path, "rb") as stream:
        data = stream.read()
    try:
        return "file", data.decode("utf-8")
    except UnicodeDecodeError:
        return "file", None


def difference(entry, state, content):
    """{before, after} with headers where a path, as look() saw it, is not as the entry says, or None; owner and mode are not looked at."""
    path, wanted = entry["path"], entry["state"]
    if state == wanted and (wanted != "file" or content == entry["content"]):
        return None
    if wanted == "file" and state == "directory":
        raise HostFilesError("%s is a folder, where a file belongs" % path)
    if wanted == "directory" and state != "absent":
        raise HostFilesError("%s is in the way of a folder" % path)

    def shown(state, content):
        if state == "file":
            return content if content is not None else "(no text)\n"
        return "" if state == "absent" else "(%s)\n" % {"other": "no regular file"}.get(state, state)

    return {"before_header": path, "after_header": path, "before": shown(state, content),
            "after": shown(wanted, entry.get("content"))}


def make_folder(path, mode=0o755):
    """Make a folder and those above it, whatever the umask is; one that is there is left as it is."""
    if os.path.isdir(path):
        return
    make_parents(path)
    os.mkdir(path, mode)
    os.chmod(path, mode)


def make_parents(path):
    """Make the folders above a path, whatever the umask is."""
    make_folder(os.path.dirname(os.path.abspath(path)))


def write_atomic(path, content, mode=0o644, sync=True):
    """Replace a file in one step, whatever the umask is: a reader sees the old one or the new one, never a part.

    Raises OSError when the folder is missing or the disk is full; the old file then stays. Without sync it may be lost with the power.
    """
    descriptor, fresh = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=os.path.basename(path) + ".new.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if sync:
                os.fsync(stream.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise


def sync_folder(path):
    """Make renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path):
    """Remove a file, a link or a folder with all that is in it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
