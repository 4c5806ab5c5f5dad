# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What lies at a path, what should, and the step from one to the other."""

from __future__ import annotations

import os
import shutil

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


def missing_parents(path):
    """The folders above a path that are not there, the uppermost first."""
    found = []
    above = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(above):
        found.insert(0, above)
        above = os.path.dirname(above)
    return found


def make_parents(path):
    """Make the folders above a path, whatever the umask is."""
    for folder in missing_parents(path):
        os.mkdir(folder)
        os.chmod(folder, int(MODES["directory"], 8))


def remove(path):
    """Remove a file, a link or a folder with all that is in it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
