# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Hash many large files at once in constant memory.

hashlib releases the interpreter's lock while it works, so that threads scale with the cores. Each thread
reads into one buffer of its own, small enough to stay in the cache between read and hash.
"""

from __future__ import annotations

import hashlib
import os
import threading

#: Larger ones fall out of the second level cache between read and hash, which costs half of the speed.
BUFFER = 1 << 17


def usable_cores():
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0)) or 1
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def hash_file(path, on_bytes=None, buffer=None, git_size=None):
    """Return (status of the file, sha256, git blob id or None); raises OSError.

    The status is the one before reading, checked against the one after: a file that changes under the
    reader has no hash.
    """
    view = memoryview(buffer if buffer is not None else bytearray(BUFFER))
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        before = os.fstat(stream.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        git = None
        if git_size is not None:
            git = hashlib.new("sha1", b"blob %d\0" % git_size, usedforsecurity=False)
        while True:
            count = stream.readinto(view)
            if not count:
                break
            digest.update(view[:count])
            if git is not None:
                git.update(view[:count])
            if on_bytes is not None:
                on_bytes(count)
        after = os.fstat(stream.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise OSError("the file changed while it was read")
    return after, digest.hexdigest(), git.hexdigest() if git is not None else None


def hash_many(paths, workers=0, on_bytes=None, git_sizes=None):
    """Hash files in parallel; returns C({path: (status, sha256, git_sha1) or OSError})."""
    def size_of(path):
        try:
            return os.stat(path).st_size
        except OSError:
            return 0

    queue = sorted(paths, key=size_of)
    results, lock = {}, threading.Lock()
    git_sizes = git_sizes or {}

    def work():
        buffer = bytearray(BUFFER)
        while True:
            with lock:
                if not queue:
                    return
                path = queue.pop()
            try:
                outcome = hash_file(path, on_bytes, buffer, git_sizes.get(path))
            except OSError as exc:
                outcome = exc
            with lock:
                results[path] = outcome

    count = max(1, min(workers or usable_cores(), len(queue), 32))
    threads = [threading.Thread(target=work, daemon=True) for dummy in range(count - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    return results
