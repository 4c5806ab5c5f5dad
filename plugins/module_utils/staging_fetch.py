# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Bring the files of a manifest into a directory so that an end at any moment loses next to nothing.

Each missing file grows in the work directory as a C(.part) of its final size, filled piece by piece by
several threads. A small state file says which pieces are there; it is written after each piece, and once
more when the pieces are known to be on the disk, so that a killed process and a lost machine both go on
where they were. While bytes come in order they are hashed on the way; what came out of order or was there
before is read once from the part. A file gets its name only after its hash is right.

Threads share three locks' worth of state: the queue (Fetcher.lock), one file (Job.lock) and the rate.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import json
import os
import random
import subprocess
import threading
import time

from ansible_collections.blackwell.dsv4.plugins.module_utils import child_process
from ansible_collections.blackwell.dsv4.plugins.module_utils import host_files
from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_manifest as manifests
from ansible_collections.blackwell.dsv4.plugins.module_utils.staging_hash import BUFFER, hash_many
from ansible_collections.blackwell.dsv4.plugins.module_utils.staging_sources import SourceError

FREE, TAKEN, DONE = 0, 1, 2
#: Lanes on one file; with pieces of an eighth of a chunk, a kill loses less than one chunk of the file.
MAX_LANES = 8
PIECES_PER_CHUNK = 8
#: How often a file may come with a changed validator before only its hash is believed.
MAX_FLIPS = 3
MAX_EVENTS = 100


class FetchFailed(Exception):
    """The transfer cannot end well. C(code) is stable, C(details) goes to the caller."""

    def __init__(self, code, message, **details):
        super().__init__(message)
        self.code = code
        self.details = details


class Interrupted(Exception):
    """Somebody asked this process to stop."""


def boot_id():
    """Changes with each boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "r", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


class Rate:
    """A limit in bytes per second, shared by all threads."""

    def __init__(self, limit):
        self.limit = limit
        self.lock = threading.Lock()
        self.ready_at = time.monotonic()

    def pay(self, count, stop):
        """Wait until these bytes may have passed."""
        if not self.limit:
            return
        with self.lock:
            now = time.monotonic()
            # Half a second may be saved up, no more.
            self.ready_at = max(self.ready_at, now - 0.5) + count / self.limit
            delay = self.ready_at - now
        if delay > 0:
            stop.wait(delay)


class Events:
    """What went wrong on the way, counted; the play prints it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.counts = {}
        self.items = []

    def add(self, code, what, file=""):
        """Note one."""
        with self.lock:
            self.counts[code] = self.counts.get(code, 0) + 1
            if len(self.items) < MAX_EVENTS:
                self.items.append({"id": code, "what": what, "file": file})


class Job:
    """One file on its way."""

    def __init__(self, fetcher, path, wanted):
        self.fetcher = fetcher
        self.path = path
        self.wanted = wanted
        self.size = wanted["size"]
        stem = hashlib.sha256(path.encode("utf-8")).hexdigest()[:16]
        self.part = os.path.join(fetcher.work, stem + ".part")
        self.state_path = os.path.join(fetcher.work, stem + ".json")
        self.lock = threading.RLock()
        self.descriptor = None
        self.lanes = 0
        self.max_lanes = self.lanes_allowed()
        self.no_ranges = False
        self.generation = 0
        self.validator = None
        self.source_label = None
        self.flips = 0
        self.settled = False
        self.growing = False
        self.failure = None
        self.setbacks = 0
        self.not_before = 0.0
        self.corrupt = 0
        self._reset_pieces()

    def lanes_allowed(self):
        """Without a hash to catch it, no two lanes may be able to mix two versions of a file."""
        return MAX_LANES if self.wanted.get("sha256") or self.wanted.get("git_sha1") else 1

    # -- pieces ---------------------------------------------------------------------------------

    def _reset_pieces(self):
        self.piece = max(self.fetcher.chunk // PIECES_PER_CHUNK, 1)
        self.count = -(-self.size // self.piece)
        self.states = bytearray(self.count)
        self.durable = bytearray(self.count)
        self.left = self.count
        #: piece -> first byte that is still missing, where a connection ended inside of a piece
        self.partials = {}
        self._reset_hash()

    def _reset_hash(self):
        self.digest = hashlib.sha256()
        self.git = None
        if self.wanted.get("git_sha1") and not self.wanted.get("sha256"):
            self.git = manifests.git_blob(self.size)
        self.hashed = 0
        self.hash_owner = None

    def piece_end(self, index):
        """First byte behind a piece."""
        return min((index + 1) * self.piece, self.size)

    def have(self):
        """Bytes in finished pieces."""
        done = self.states.count(DONE)
        if done and self.states[-1] == DONE:
            return (done - 1) * self.piece + self.size - (self.count - 1) * self.piece
        return done * self.piece

    def open(self):
        """Open the part, and take over what an earlier run left."""
        if self.descriptor is not None:
            return
        descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        size = os.fstat(descriptor).st_size
        state = manifests.load_json(self.state_path)
        usable = (
            isinstance(state, dict)
            and state.get("path") == self.path
            and state.get("size") == self.size
            # What a child fills grows from the front; everything else has its final size from the start.
            and (size == self.size or state.get("growing") is True and size < self.size)
            and state.get("sha256") == self.wanted.get("sha256")
            and isinstance(state.get("piece"), int)
            and state["piece"] > 0
        )
        if usable:
            try:
                present = base64.b64decode(state["done" if state.get("boot") == self.fetcher.boot else "durable"], validate=True)
            except (KeyError, TypeError, ValueError):
                present = b""
            self.piece = state["piece"]
            self.count = -(-self.size // self.piece)
            if len(present) == (self.count + 7) // 8:
                self.states = bytearray(
                    DONE if present[i >> 3] >> (i & 7) & 1 and self.piece_end(i) <= size else FREE for i in range(self.count)
                )
                self.durable = bytearray(1 if s == DONE else 0 for s in self.states) if state.get("boot") != self.fetcher.boot else bytearray(self.count)
                self.left = self.count - self.states.count(DONE)
                self.validator = state.get("validator") if isinstance(state.get("validator"), str) else None
                self.source_label = state.get("source")
            else:
                self._reset_pieces()
        if size != self.size:
            os.ftruncate(descriptor, self.size)
        self.descriptor = descriptor

    def save(self, sync=False):
        """Write the state file; called with the lock held."""
        def bits(values, mark):
            packed = bytearray((self.count + 7) // 8)
            for index, value in enumerate(values):
                if value == mark:
                    packed[index >> 3] |= 1 << (index & 7)
            return base64.b64encode(bytes(packed)).decode("ascii")

        state = {
            "path": self.path,
            "size": self.size,
            "sha256": self.wanted.get("sha256"),
            "piece": self.piece,
            "validator": self.validator,
            "source": self.source_label,
            "boot": self.fetcher.boot,
            "growing": self.growing,
            "done": bits(self.states, DONE),
            "durable": bits(self.durable, 1),
        }
        host_files.write_atomic(self.state_path, json.dumps(state), 0o600, sync=sync)

    def restart(self, keep_validator=None):
        """Forget all bytes: they are of another version, or wrong."""
        self.generation += 1
        self._reset_pieces()
        self.validator = keep_validator
        self.save()

    def claim(self):
        """Take the longest useful run of free pieces; returns (first, behind last) or None."""
        limit = self.count if self.no_ranges else PIECES_PER_CHUNK
        first = self.states.find(FREE)
        if first < 0:
            return None
        last = first
        while last < self.count and last - first < limit and self.states[last] == FREE:
            self.states[last] = TAKEN
            last += 1
        return first, last

    def release(self, first, last):
        """Give back pieces that were not finished."""
        for index in range(first, last):
            if self.states[index] == TAKEN:
                self.states[index] = FREE

    def drop(self):
        """Remove what belongs to the transfer."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        for path in (self.part, self.state_path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass


class Fetcher:
    """A whole transfer: plan, fetch, publish."""

    def __init__(
        self,
        dest,
        files,
        sources,
        parallel=4,
        chunk=64 << 20,
        rate=0,
        retries=8,
        stall_timeout=60.0,
        low_speed=1024,
        reserve=1 << 30,
        deep=False,
        owner=None,
        file_mode=0o644,
        directory_mode=0o755,
        status_path=None,
        workers=0,
        stop=None,
        max_wait=900.0,
        backoff=0.5,
        statvfs=os.statvfs,
    ):
        self.dest = dest
        self.work = os.path.join(dest, manifests.WORK_DIR)
        self.files = files
        self.sources = sources
        self.parallel = max(1, min(parallel, 64))
        self.chunk = max(chunk, PIECES_PER_CHUNK)
        self.rate = Rate(rate)
        self.retries = retries
        self.stall_timeout = stall_timeout
        self.low_speed = low_speed
        self.reserve = reserve
        self.deep = deep
        self.owner = owner
        self.file_mode = file_mode
        self.directory_mode = directory_mode
        self.status_path = status_path or os.path.join(self.work, "progress.json")
        self.workers = workers
        self.stop = stop or threading.Event()
        self.max_wait = max_wait
        self.backoff = backoff
        self.statvfs = statvfs
        self.boot = boot_id()
        self.lock = threading.Condition()
        self.events = Events()
        self.record = {}
        self.record_lock = threading.Lock()
        self.jobs = []
        self.received = 0
        self.copied = 0
        self.pause_until = 0.0
        self.paused_for = 0.0
        self.source = None
        self.phase = "plan"
        self.read_back = 0
        self.started = time.monotonic()
        self.start_have = 0
        self.error = None
        self.lock_descriptor = None
        self._status_thread = None
        self._ended = threading.Event()

    # -- plan -----------------------------------------------------------------------------------

    def plan(self):
        """Judge what is there by its record alone; returns (right, unknown, missing) lists of paths. Reads no content."""
        record = manifests.load_record(self.dest)
        right, unknown, missing = [], [], []
        for path, wanted in sorted(self.files.items()):
            try:
                status = os.lstat(os.path.join(self.dest, path))
            except (OSError, ValueError):
                missing.append(path)
                continue
            entry = record.get(path)
            if entry is not None and manifests.unchanged(entry, status) and not self.deep:
                if manifests.fulfils(entry, wanted):
                    self.record[path] = entry
                    right.append(path)
                else:
                    missing.append(path)
            elif wanted.get("size") is not None and wanted["size"] != status.st_size:
                missing.append(path)
                if status.st_size == 0:
                    self.events.add("zero_byte_shards", "the file has no byte", path)
                else:
                    self.events.add("size_mismatch", "%d bytes instead of %d" % (status.st_size, wanted["size"]), path)
            elif wanted.get("sha256") or wanted.get("git_sha1"):
                unknown.append(path)
            else:
                missing.append(path)
        return right, unknown, missing

    def adopt(self, unknown):
        """Read files that have no valid record; returns those that are wrong."""
        if not unknown:
            return []
        self.phase = "verify"
        places = {os.path.join(self.dest, path): path for path in unknown}
        git_sizes = {
            place: os.stat(place).st_size
            for place, path in places.items()
            if self.files[path].get("git_sha1") and not self.files[path].get("sha256") and os.path.exists(place)
        }
        self.total_read = sum(os.stat(p).st_size for p in places if os.path.exists(p))

        def on_bytes(count):
            self.read_back += count
            if self.stop.is_set():
                raise OSError(errno.EINTR, "interrupted")

        outcome = hash_many(list(places), self.workers, on_bytes, git_sizes)
        self._check_stop()
        wrong = []
        for place, path in places.items():
            result = outcome[place]
            if isinstance(result, OSError):
                self.events.add("unreadable_file", result.strerror or str(result), path)
                wrong.append(path)
                continue
            status, sha256, git_sha1 = result
            wanted = self.files[path]
            expected, actual = (wanted["sha256"], sha256) if wanted.get("sha256") else (wanted.get("git_sha1"), git_sha1)
            if expected != actual:
                self.events.add("checksum_mismatch", "the content has %s, the manifest %s" % (actual[:12], expected[:12]), path)
                wrong.append(path)
                continue
            entry = manifests.stat_entry(status, sha256)
            if git_sha1:
                entry["git_sha1"] = git_sha1
            self.record[path] = entry
        self._save_record()
        return wrong

    def check_space(self, jobs):
        """Refuse a transfer that cannot fit, before the first byte."""
        needed = 0
        for job in jobs:
            allocated = 0
            try:
                allocated = os.stat(job.part).st_blocks * 512
            except OSError:
                pass
            needed += max(job.size - allocated, 0)
        status = self.statvfs(self.dest)
        free = status.f_bavail * status.f_frsize
        if needed + self.reserve > free:
            raise FetchFailed(
                "no_space",
                "%s needs %d bytes and %d in reserve, %d are free" % (self.dest, needed, self.reserve, free),
                needed=needed,
                free=free,
                reserve=self.reserve,
            )
        inodes = 2 * len(jobs) + 8
        if status.f_files and status.f_favail < inodes:
            raise FetchFailed(
                "no_inodes", "%s needs %d inodes, %d are free" % (self.dest, inodes, status.f_favail), needed=inodes, free=status.f_favail
            )

    # -- the run --------------------------------------------------------------------------------

    def run(self, finalise=None):
        """Make the directory hold the manifest; returns counters. Raises FetchFailed or Interrupted.

        C(finalise) is called when all files are right, while no other transfer can run.
        """
        self._directory(self.dest)
        os.makedirs(self.work, mode=0o700, exist_ok=True)
        lock = self.lock_descriptor = os.open(os.path.join(self.work, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise FetchFailed("busy", "another transfer into %s is running, or an rsync of one that was killed" % self.dest) from exc
            self._sweep()
            self._status_thread = threading.Thread(target=self._write_status_loop, daemon=True)
            self._status_thread.start()
            try:
                counters = self._run()
                if finalise is not None:
                    finalise(self)
                return counters
            except OSError as exc:
                if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise FetchFailed("no_space", "%s: %s" % (self.dest, exc.strerror)) from exc
                raise
            finally:
                self._ended.set()
                self._status_thread.join(5)
                for job in self.jobs:
                    with job.lock:
                        if job.descriptor is not None:
                            self._make_durable(job)
                            os.close(job.descriptor)
                            job.descriptor = None
        finally:
            os.close(lock)

    def _sweep(self):
        """Remove small files that a kill left half-written; only the holder of the lock may."""
        for folder, start in ((self.work, ""), (self.dest, manifests.MARKER)):
            for name in os.listdir(folder):
                if name.startswith(start) and ".new." in name:
                    os.unlink(os.path.join(folder, name))

    def _run(self):
        right, unknown, missing = self.plan()
        wrong = self.adopt(unknown)
        todo = sorted(missing + wrong)
        self._save_record()
        self._sizes(todo)
        self.jobs = [Job(self, path, self.files[path]) for path in todo]
        self.check_space(self.jobs)
        for job in self.jobs:
            # Only a look at what is left from before; the part is opened when its turn comes.
            with job.lock:
                job.open()
                self.start_have += job.have()
                os.close(job.descriptor)
                job.descriptor = None
        self.phase = "fetch"
        reasons = []
        for number, source in enumerate(self.sources):
            open_jobs = [job for job in self.jobs if not job.settled]
            if not open_jobs:
                break
            for job in open_jobs:
                job.failure, job.setbacks, job.not_before, job.corrupt, job.lanes = None, 0, 0.0, 0, 0
                job.max_lanes = job.lanes_allowed()
                job.growing = job.no_ranges = False
            self.source = source
            self.pause_until = self.paused_for = 0.0
            if source.kind == "rsync":
                self._rsync_all(source, open_jobs)
            else:
                self._threads()
            self._check_stop()
            for job in open_jobs:
                if job.failure is not None:
                    reasons.append({"source": source.label, "file": job.path, "id": job.failure.code, "what": str(job.failure)})
        left = [job for job in self.jobs if not job.settled]
        if left:
            have = sum(job.have() for job in left)
            code = reasons[-1]["id"] if reasons else "no_source"
            raise FetchFailed(
                code,
                "%d of %d files could not be fetched: %s"
                % (len(left), len(self.jobs), "; ".join("%(source)s: %(file)s: %(what)s" % r for r in reasons[-3:]) or "there is no source"),
                reasons=reasons[-50:],
                files=[job.path for job in left][:50],
                have_bytes=have,
            )
        self.phase = "done"
        return self.counters()

    def counters(self):
        """Numbers of this run."""
        size = sum(job.size for job in self.jobs if job.settled)
        return {
            "fetched_files": sum(1 for job in self.jobs if job.settled),
            "fetched_bytes": self.received,
            "resumed_bytes": self.start_have,
            "refetched_bytes": max(0, self.received + self.start_have - size) if self.jobs and all(j.settled for j in self.jobs) else 0,
            "read_back_bytes": self.read_back,
        }

    def _sizes(self, todo):
        """Ask for sizes that the manifest does not give."""
        unsized = [path for path in todo if self.files[path].get("size") is None]
        if not unsized:
            return
        self.phase = "sizes"
        problems = []
        for source in self.sources:
            for path in [p for p in unsized if self.files[p].get("size") is None]:
                for attempt in range(max(1, self.retries)):
                    self._check_stop()
                    try:
                        self.files[path]["size"] = source.size(path)
                        break
                    except SourceError as exc:
                        problems.append(exc)
                        self.events.add(exc.code, str(exc), path)
                        if not exc.retry:
                            break
                        self.stop.wait(exc.wait if exc.wait is not None else min(30.0, self.backoff * 2 ** attempt))
        unsized = [p for p in unsized if self.files[p].get("size") is None]
        if unsized:
            last = problems[-1] if problems else SourceError("no_source", "there is no source")
            raise FetchFailed(last.code, "the size of %s is unknown: %s" % (unsized[0], last), files=unsized[:50])

    def _threads(self):
        """Work on all open files with one source."""
        threads = [threading.Thread(target=self._guard, args=(self._work,), daemon=True) for dummy in range(self.parallel)]
        flusher = threading.Thread(target=self._guard, args=(self._flush_loop,), daemon=True)
        self._round = threading.Event()
        for thread in threads:
            thread.start()
        flusher.start()
        for thread in threads:
            while thread.is_alive():
                # A plain join would keep the signal handler from running.
                thread.join(0.5)
        self._round.set()
        flusher.join()
        if self.error is not None:
            raise self.error

    def _guard(self, work):
        try:
            work()
        except BaseException as exc:  # handed to the main thread, which raises it
            with self.lock:
                if self.error is None and not isinstance(exc, Interrupted):
                    self.error = exc
                self.lock.notify_all()
            if not isinstance(exc, Interrupted):
                self.stop.set()

    def _check_stop(self):
        if self.error is not None:
            raise self.error
        if self.stop.is_set():
            raise Interrupted("interrupted")

    def _pick(self):
        """The next lane: (job, first, last), or None when all files are settled or given up."""
        with self.lock:
            while True:
                self._check_stop()
                now = time.monotonic()
                waiting = [job for job in self.jobs if not job.settled and job.failure is None]
                if not waiting:
                    return None
                pause = self.pause_until - now
                soonest = pause if pause > 0 else 1.0
                if pause <= 0:
                    # Files without a lane first: in order they are hashed while they stream.
                    for job in sorted(waiting, key=lambda j: j.lanes):
                        if job.not_before > now:
                            soonest = min(soonest, job.not_before - now)
                            continue
                        if job.lanes >= job.max_lanes:
                            continue
                        with job.lock:
                            if job.settled:
                                continue
                            job.open()
                            run = job.claim()
                            if run is None and job.left == 0 and job.lanes == 0:
                                run = (job.count, job.count)
                            if run is None:
                                continue
                            job.lanes += 1
                            return job, run[0], run[1]
                self.lock.wait(max(0.01, min(soonest, 1.0)))

    def _work(self):
        view = memoryview(bytearray(BUFFER))
        while True:
            picked = self._pick()
            if picked is None:
                return
            job, first, last = picked
            try:
                if first < last:
                    self._lane(job, first, last, view)
                self._catch_up(job, view)
                self._finish(job)
            except SourceError as exc:
                self._setback(job, exc)
            finally:
                with self.lock:
                    job.lanes -= 1
                    self.lock.notify_all()

    def _setback(self, job, exc):
        """A request failed: try again later, or give the file up for this source."""
        code = exc.code
        text = str(exc)
        if code == "download_stalled":
            text = "download_stalled at %d of %d bytes: %s" % (job.have(), job.size, exc)
        self.events.add(code, text, job.path)
        with self.lock:
            job.setbacks += 1
            if code == "slow_down":
                self.paused_for += exc.wait
                self.pause_until = max(self.pause_until, time.monotonic() + exc.wait)
                job.setbacks -= 1
                if self.paused_for > self.max_wait:
                    job.failure = SourceError("slow_down", "%s; waited %d s already" % (exc, self.paused_for))
            elif not exc.retry:
                job.failure = exc
            elif job.setbacks > self.retries:
                job.failure = SourceError(code, "%s (%d attempts without a byte of progress)" % (text, job.setbacks))
            else:
                delay = min(60.0, self.backoff * 2 ** (job.setbacks - 1))
                job.not_before = time.monotonic() + delay * random.uniform(0.5, 1.0)
            self.lock.notify_all()

    # -- one lane -------------------------------------------------------------------------------

    def _lane(self, job, first, last, view):
        """Fetch pieces first..last-1; on the way hash them if they are next in line."""
        with job.lock:
            generation = job.generation
            position = start = job.partials.pop(first, first * job.piece)
            end = job.piece_end(last - 1)
        me = threading.get_ident()
        index = first
        try:
            # Bytes before this run that are there already must be hashed first for this run to be in line.
            if position:
                self._catch_up(job, view)
            with job.lock:
                if job.generation != generation:
                    return
                use_validator = job.flips < MAX_FLIPS
                validator = job.validator if job.source_label == self.source.label else None
            reply = self.source.open(job.path, position, end, validator, job.size, use_validator)
            complete = owner = False
            counted, descriptor = 0, None
            try:
                self._check_version(job, reply, generation, use_validator)
                with job.lock:
                    if job.generation != generation:
                        # Started anew: only the beginning of a whole reply is of use.
                        return
                if reply.whole:
                    if position:
                        with job.lock:
                            job.max_lanes, job.no_ranges = 1, True
                        self._skip(job, reply, position, view, generation)
                    end = job.size
                with job.lock:
                    owner = job.hash_owner is None and job.hashed == position
                    if owner:
                        job.hash_owner = me
                mark, mark_bytes = time.monotonic(), 0
                # This loop sees every byte: what is looked up here is looked up once.
                read, size, piece_end = reply.read, len(view), job.piece_end(index)
                update = job.digest.update
                git_update = job.git.update if job.git is not None else None
                limited, stopped, monotonic = bool(self.rate.limit), self.stop.is_set, time.monotonic
                with job.lock:
                    if job.generation != generation or job.descriptor is None:
                        return
                    descriptor = os.dup(job.descriptor)
                while position < end:
                    if stopped():
                        self._check_stop()
                    # Never across the end of a piece, so that a finished piece is noted at once.
                    room = piece_end - position
                    count = read(view[:room] if room < size else view)
                    if not count:
                        raise SourceError("cut", "the answer ended at byte %d of %d" % (position, job.size), retry=True)
                    data = view[:count]
                    if job.generation != generation:
                        return
                    self._write(descriptor, data, position)
                    if owner:
                        update(data)
                        if git_update is not None:
                            git_update(data)
                    position += count
                    counted += count
                    if limited:
                        self.rate.pay(count, self.stop)
                    mark_bytes += count
                    now = monotonic()
                    if now - mark >= self.stall_timeout:
                        if mark_bytes < self.low_speed * (now - mark):
                            raise SourceError(
                                "download_stalled", "only %d bytes in %d s" % (mark_bytes, now - mark), retry=True
                            )
                        mark, mark_bytes = now, 0
                    if position == piece_end:
                        self._count(counted)
                        counted = 0
                        with job.lock:
                            if job.generation != generation:
                                return
                            if job.states[index] != DONE:
                                job.states[index] = DONE
                                job.left -= 1
                            if owner:
                                job.hashed = position
                            job.setbacks = 0
                            job.save()
                            index += 1
                            piece_end = job.piece_end(index)
                            if index < job.count and position < end and index >= last:
                                # Beyond what was claimed: only a whole reply leads here.
                                if job.states[index] != FREE:
                                    break
                                job.states[index] = TAKEN
                                last = index + 1
                complete = position >= end
            finally:
                if descriptor is not None:
                    os.close(descriptor)
                self._count(counted)
                with job.lock:
                    if position - start >= 65536:
                        job.setbacks = 0
                    if job.generation == generation and owner:
                        job.hash_owner = None
                        job.hashed = position
                reply.finish(complete)
        finally:
            with job.lock:
                if job.generation == generation:
                    if index < job.count and job.states[index] == TAKEN and position > index * job.piece:
                        job.partials[index] = position
                    job.release(first, last)

    def _check_version(self, job, reply, generation, use_validator):
        """Bytes of two versions of a file must not meet."""
        with job.lock:
            if job.generation != generation:
                return
            label = self.source.label
            if job.source_label != label:
                if job.have() and not job.wanted.get("sha256"):
                    # Another source and no hash to prove that both hold the same.
                    job.restart(reply.validator)
                else:
                    job.validator = reply.validator
                job.source_label = label
                return
            if reply.validator and job.validator and reply.validator != job.validator:
                job.flips += 1
                self.events.add("source_changed", "the file is another version than before", job.path)
                if job.flips > 4 * MAX_FLIPS and not job.wanted.get("sha256"):
                    raise SourceError("source_changed", "the file changed %d times while it was read, and no hash says which is meant" % job.flips)
                if job.flips <= MAX_FLIPS or not job.wanted.get("sha256"):
                    job.restart(reply.validator)
                else:
                    job.validator = reply.validator
            elif job.validator is None:
                job.validator = reply.validator

    def _skip(self, job, reply, count, view, generation):
        """Pass over the beginning of a whole reply: this server does not do ranges."""
        self.events.add("range_ignored", "the server sent the whole file in place of a range", job.path)
        while count:
            self._check_stop()
            got = reply.read(view[: min(len(view), count)])
            if not got:
                raise SourceError("cut", "the answer ended before the wanted range", retry=True)
            count -= got
            self._count(got)
            self.rate.pay(got, self.stop)
            with job.lock:
                if job.generation != generation:
                    return

    def _count(self, count):
        with self.record_lock:
            self.received += count

    @staticmethod
    def _write(descriptor, data, position):
        while len(data):
            written = os.pwrite(descriptor, data, position)
            position += written
            data = data[written:]

    # -- hash and publish -----------------------------------------------------------------------

    def _catch_up(self, job, view):
        """Hash finished pieces that follow what is hashed; at most one thread per file does."""
        me = threading.get_ident()
        while True:
            with job.lock:
                if job.hash_owner is not None or job.descriptor is None or job.settled:
                    return
                generation, position = job.generation, job.hashed
                behind = position
                while behind < job.size and job.states[behind // job.piece] == DONE:
                    behind = job.piece_end(behind // job.piece)
                if behind == position:
                    return
                job.hash_owner = me
                descriptor = os.dup(job.descriptor)
                digest, git = job.digest.copy(), job.git.copy() if job.git is not None else None
            try:
                while position < behind and job.generation == generation:
                    self._check_stop()
                    count = os.preadv(descriptor, [view[: min(len(view), behind - position)]], position)
                    if not count:
                        raise OSError(errno.EIO, "the part is shorter than it was")
                    digest.update(view[:count])
                    if git is not None:
                        git.update(view[:count])
                    position += count
                    self.read_back += count
            finally:
                os.close(descriptor)
                with job.lock:
                    if job.generation == generation and job.hash_owner == me:
                        job.hash_owner = None
                        job.digest, job.git, job.hashed = digest, git, position

    def _finish(self, job):
        """Publish a file that is whole and right; start one anew that is whole and wrong."""
        with job.lock:
            if job.settled or job.left or job.hashed != job.size or job.hash_owner is not None or job.descriptor is None:
                return
            sha256 = job.digest.hexdigest()
            git_sha1 = job.git.hexdigest() if job.git is not None else None
            expected, actual = (
                (job.wanted["sha256"], sha256) if job.wanted.get("sha256") else (job.wanted.get("git_sha1"), git_sha1)
            )
            if expected and expected != actual:
                job.corrupt += 1
                job.restart()
                job.source_label = None
                self.events.add("checksum_mismatch", "fetched content has %s, the manifest %s" % (actual[:12], expected[:12]), job.path)
                if job.corrupt > 3:
                    job.failure = SourceError("checksum_mismatch", "the source gave wrong content %d times" % job.corrupt)
                return
            final = os.path.join(self.dest, job.path)
            self._directory(os.path.dirname(final))
            os.fsync(job.descriptor)
            os.fchmod(job.descriptor, self.file_mode)
            if self.owner is not None:
                os.fchown(job.descriptor, self.owner[0], self.owner[1])
            os.rename(job.part, final)
            status = os.fstat(job.descriptor)
            host_files.sync_folder(os.path.dirname(final))
            entry = manifests.stat_entry(status, sha256)
            if git_sha1:
                entry["git_sha1"] = git_sha1
            self._remember(job.path, entry)
            job.settled = True
            job.drop()
        with self.lock:
            self.lock.notify_all()

    def _remember(self, path, entry):
        with self.record_lock:
            self.record[path] = entry
        self._save_record()

    def _save_record(self):
        with self.record_lock:
            text = json.dumps({"format": manifests.FORMAT, "files": self.record})
            host_files.write_atomic(os.path.join(self.work, "record.json"), text, 0o600)

    def _directory(self, path):
        """Make a directory and its missing parents with our mode and owner."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path) or "."
        for directory in reversed(missing):
            try:
                os.mkdir(directory, self.directory_mode)
            except FileExistsError:
                continue
            os.chmod(directory, self.directory_mode)
            if self.owner is not None:
                os.chown(directory, self.owner[0], self.owner[1])

    # -- durability and status ------------------------------------------------------------------

    def _make_durable(self, job):
        """Bring finished pieces to the disk and note it; called with or without lanes running."""
        with job.lock:
            if job.descriptor is None or job.settled:
                return
            generation = job.generation
            pending = [i for i in range(job.count) if job.states[i] == DONE and not job.durable[i]]
            if not pending:
                return
            descriptor = os.dup(job.descriptor)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        with job.lock:
            if job.descriptor is None or job.settled or job.generation != generation:
                return
            for index in pending:
                job.durable[index] = 1
            job.save(sync=True)

    def _flush_loop(self):
        while not self._round.wait(5.0):
            for job in list(self.jobs):
                if not job.settled and job.descriptor is not None:
                    self._make_durable(job)

    def status(self):
        """A snapshot for whoever watches."""
        total = sum(job.size for job in self.jobs)
        have = sum(job.size if job.settled else job.have() for job in self.jobs)
        elapsed = max(time.monotonic() - self.started, 0.001)
        if self.phase == "verify":
            total, have = getattr(self, "total_read", 0), self.read_back
            speed = self.read_back / elapsed
        else:
            speed = max(0, have - self.start_have) / elapsed
        left = max(total - have, 0)
        return {
            "phase": self.phase,
            "done_bytes": have,
            "total_bytes": total,
            "percent": round(100.0 * have / total, 1) if total else 100.0,
            "rate": int(speed),
            "seconds_left": int(left / speed) if speed > 0 else None,
            "files_done": sum(1 for job in self.jobs if job.settled),
            "files_total": len(self.jobs),
            "current": sorted(job.path for job in self.jobs if job.lanes > 0)[:4],
            "source": self.source.label if self.source is not None else "",
            "troubles": dict(self.events.counts),
            "pid": os.getpid(),
        }

    def _write_status_loop(self):
        while True:
            ended = self._ended.wait(1.0)
            try:
                host_files.write_atomic(self.status_path, json.dumps(self.status()), 0o644, sync=False)
            except (OSError, RuntimeError):
                pass
            if ended:
                return

    # -- rsync ----------------------------------------------------------------------------------

    def _rsync_all(self, source, jobs):
        """One child per file, as many at once as asked for."""
        queue, lock = list(jobs), threading.Lock()
        self._round = threading.Event()

        def work():
            view = memoryview(bytearray(BUFFER))
            while True:
                with lock:
                    if not queue:
                        return
                    job = queue.pop(0)
                job.lanes = 1
                try:
                    self._rsync_one(source, job, view)
                except SourceError as exc:
                    self.events.add(exc.code, str(exc), job.path)
                    job.failure = exc
                finally:
                    job.lanes = 0

        threads = [threading.Thread(target=self._guard, args=(work,), daemon=True) for dummy in range(min(self.parallel, len(jobs)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
        if self.error is not None:
            raise self.error

    def _rsync_one(self, source, job, view):
        """Fetch one file with a child that is watched; the second attempt is the plain one."""
        failure = None
        for plain in (False, True):
            self._check_stop()
            with job.lock:
                job.open()
                # rsync fills from the front: keep the pieces that are there without a gap.
                prefix = job.states.find(FREE)
                start = job.size if prefix < 0 else prefix * job.piece
                if plain or (job.source_label not in (None, source.label) and not job.wanted.get("sha256")):
                    start = 0
                job.restart()
                job.growing = True
                job.source_label = source.label
                os.ftruncate(job.descriptor, start)
                self._grown(job, start)
            try:
                if start < job.size or job.size == 0:
                    self._rsync_child(source, job, start, plain)
                with job.lock:
                    if os.path.getsize(job.part) != job.size:
                        raise SourceError("wrong_length", "rsync brought %d of %d bytes" % (os.path.getsize(job.part), job.size), retry=True)
                    job.states[:] = bytes([DONE]) * job.count
                    job.left = 0
                    job.save()
                self._catch_up(job, view)
                self._finish(job)
                if job.settled:
                    return
                failure = SourceError("checksum_mismatch", "the source gave wrong content", retry=True)
            except SourceError as exc:
                failure = exc
                self.events.add(exc.code, str(exc), job.path)
                if not exc.retry:
                    break
        raise failure

    def _rsync_child(self, source, job, start, plain):
        limit = self.rate.limit / self.parallel if self.rate.limit else 0
        argv = source.argv(job.path, job.part, plain, limit, self.stall_timeout)
        environment = source.environment(plain)
        try:
            child = child_process.start(
                argv,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                # The lock goes along: a child that outlives a killed parent keeps others away from its part.
                pass_fds=(self.lock_descriptor,),
            )
        except OSError as exc:
            raise SourceError("rsync_missing", "%s cannot be started: %s" % (argv[0], exc.strerror)) from exc
        complaint = []
        reader = threading.Thread(target=lambda: complaint.append(child.stderr.read(65536)), daemon=True)
        reader.start()
        size, moved = start, time.monotonic()
        try:
            while True:
                try:
                    status = child.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    pass
                now = time.monotonic()
                try:
                    current = os.path.getsize(job.part)
                except OSError:
                    current = size
                if current != size:
                    if current > size:
                        self._count(current - size)
                        self._grown(job, current)
                    size, moved = current, now
                elif now - moved > self.stall_timeout:
                    raise SourceError(
                        "download_stalled", "download_stalled at %d of %d bytes: rsync moved nothing for %d s" % (size, job.size, now - moved), retry=True
                    )
                if self.stop.is_set():
                    raise Interrupted("interrupted")
        except BaseException:
            child_process.end(child)
            try:
                self._grown(job, os.path.getsize(job.part))
            except OSError:
                pass
            raise
        finally:
            reader.join(2)
            child.stderr.close()
        try:
            current = os.path.getsize(job.part)
        except OSError:
            current = 0
        self._count(max(0, current - size))
        if status != 0:
            self._grown(job, current)
            text = (complaint[0] if complaint else b"").decode("utf-8", "replace").strip().splitlines()
            raise SourceError("rsync_failed", "rsync ended with status %d: %s" % (status, (text or ["no message"])[-1][:200]), retry=True)

    @staticmethod
    def _grown(job, size):
        """Note the pieces that the child has filled, for the display and for the next run."""
        with job.lock:
            for index in range(job.count):
                if job.piece_end(index) > size:
                    break
                if job.states[index] != DONE:
                    job.states[index] = DONE
                    job.left -= 1
            job.save()


class RsyncSource:
    """Another host, through the rsync program."""

    kind = "rsync"

    def __init__(self, url, program="rsync", shell=None, ca_bundle=None):
        if not url or url.startswith("-") or any(ord(c) < 32 for c in url):
            raise SourceError("source_invalid", "an rsync source is written host:/path, host::module/path or /path")
        self.url = url.rstrip("/")
        self.label = self.url
        self.program = program
        self.shell = shell

    def argv(self, path, part, plain, limit, timeout):
        """Command line for one file into its part."""
        argv = [self.program, "--inplace", "--copy-links", "--times", "--timeout=%d" % max(1, int(timeout))]
        if plain:
            argv.append("--whole-file")
        else:
            argv.append("--append")
        if limit:
            argv.append("--bwlimit=%d" % max(1, int(limit // 1024)))
        if self.shell:
            argv.extend(["--rsh", self.shell])
        return argv + ["--", "%s/%s" % (self.url, path), part]

    def environment(self, plain):
        """What the child may see; nothing of ours that is secret."""
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "USER", "SSH_AUTH_SOCK", "LANG") if key in os.environ}
        kept["LC_ALL"] = "C"
        kept["RSYNC_OLD_ARGS"] = "0"
        if plain:
            kept["STAGING_PLAIN"] = "1"
        return kept

    def _ask(self, argv):
        """Run a short call of rsync."""
        try:
            return subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.environment(True), timeout=120, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise SourceError("rsync_failed", "%s: %s" % (self.program, getattr(exc, "strerror", None) or "no answer within 120 s")) from exc

    def listing(self):
        """The manifest must come with the request: rsync has none that we trust."""
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            target = os.path.join(folder, "sums")
            done = self._ask(self.argv("SHA256SUMS", target, True, 0, 60))
            if done.returncode != 0 or not os.path.exists(target):
                raise SourceError("manifest_missing", "%s has no SHA256SUMS, and no manifest was given" % self.label)
            with open(target, "rb") as stream:
                try:
                    return manifests.parse_manifest(stream.read(manifests.MAX_TEXT + 1).decode("utf-8", "replace"))
                except manifests.ManifestError as exc:
                    raise SourceError(exc.code, "SHA256SUMS: %s" % exc) from exc

    def size(self, path):
        """Size of a file from a listing of it."""
        argv = [self.program, "--list-only", "--copy-links", "--no-human-readable"]
        if self.shell:
            argv.extend(["--rsh", self.shell])
        done = self._ask(argv + ["--", "%s/%s" % (self.url, path)])
        fields = done.stdout.decode("utf-8", "replace").split()
        if done.returncode != 0 or len(fields) < 2 or not fields[1].replace(",", "").isdigit():
            raise SourceError("not_found", "%s does not list %s" % (self.label, path))
        return int(fields[1].replace(",", ""))
