# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Stage one model: find its manifest, see what is missing, fetch it, judge the checkpoint, write the marker."""

from __future__ import annotations

import fnmatch
import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import stat

from ansible_collections.blackwell.dsv4.plugins.module_utils import checkpoint
from ansible_collections.blackwell.dsv4.plugins.module_utils import host_files
from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_fetch as fetching
from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_manifest as manifests
from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_sources as sources

_SIZE = re.compile(r"\A\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)[bB]?(?:/s)?\s*\Z")


# What the operator sets, by the code of a failure.
MEND = {
    "no_source": "name one in model_staging_sources, or put the model there",
    "not_found": "mend model_staging_sources, or dsv4_model (name, revision)",
    "source_invalid": "mend model_staging_sources",
    "source_permission": "mend model_staging_sources, or the permissions there",
    "unauthorized": "mend model_staging_token or model_staging_token_file, or ask for access to the model",
    "token_file": "mend model_staging_token_file",
    "token_invalid": "mend model_staging_token or model_staging_token_file",
    "ca_bundle": "mend model_staging_ca_bundle",
    "certificate": "name its authority in model_staging_ca_bundle",
    "no_space": "make room, or lower model_staging_reserve; model_staging_prune removes models by name",
}


class StagingError(Exception):
    """Staging ended without a usable model. C(code) is stable, C(details) is returned to the play."""

    def __init__(self, code, message, **details):
        super().__init__(message + (" -> %s" % MEND[code] if code in MEND else ""))
        self.code = code
        self.details = details


def parse_size(value):
    """Bytes from a number or from text such as 200M, 1.5GiB or 64MiB/s; units are powers of 1024."""
    if value in (None, ""):
        return 0
    match = _SIZE.match(str(value))
    if not match:
        raise StagingError("option_invalid", "%r is not a size such as 64M or 1GiB" % (value,))
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[match.group(2).lower()]
    return int(float(match.group(1)) * 1024 ** power)


def make_source(options, token=None, ca_bundle=None, proxy=None, timeout=60.0, revision=None):
    """A source object from one entry of the list of sources."""
    kind = options.get("type")
    common = {"token": token, "ca_bundle": ca_bundle, "proxy": proxy, "timeout": timeout}

    def need(key):
        if not options.get(key):
            raise StagingError("source_invalid", "a source of type %s needs %s" % (kind, key))
        return options[key]

    try:
        if kind == "directory":
            return sources.DirectorySource(need("path"), options.get("allowed_roots") or ())
        if kind == "http":
            return sources.HttpSource(need("url"), sums=options.get("sums") or "SHA256SUMS", **common)
        if kind == "hub":
            return sources.HubSource(need("repository"), options.get("revision") or revision, need("endpoint"), **common)
        if kind == "rsync":
            return fetching.RsyncSource(need("url"), options.get("program") or "rsync", options.get("shell"))
    except sources.SourceError as exc:
        raise StagingError(exc.code, str(exc)) from exc
    raise StagingError("source_invalid", "a source has the type %r; known are directory, http, hub and rsync" % (kind,))


def owner_ids(owner, group):
    """Numbers for chown, or None when neither is given."""
    if not owner and not group:
        return None
    try:
        uid = pwd.getpwnam(owner).pw_uid if owner else -1
        gid = grp.getgrnam(group).gr_gid if group else -1
    except KeyError as exc:
        raise StagingError("owner_unknown", "owner or group does not exist: %s" % exc.args[0]) from exc
    return uid, gid


def _chosen(files, exclude):
    """Leave out what the engine does not need."""
    return {
        path: entry
        for path, entry in files.items()
        if not any(fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(os.path.basename(path), pattern) for pattern in exclude)
    }


class Staging:
    """One request; the module is a thin shell around it."""

    def __init__(self, params, stop=None):
        self.params = params
        self.dest = params["dest"]
        self.work = os.path.join(self.dest, manifests.WORK_DIR)
        self.marker_path = os.path.join(self.dest, manifests.MARKER)
        self.stop = stop
        self.events = fetching.Events()
        self.manifest_from = ""
        token = None
        try:
            if params.get("token"):
                token = sources.check_token(params["token"])
            elif params.get("token_file"):
                token = sources.read_token_file(params["token_file"])
        except sources.SourceError as exc:
            raise StagingError(exc.code, str(exc)) from exc
        self.sources = [
            make_source(
                options, token, params.get("ca_bundle"), params.get("proxy"), float(params["stall_timeout"]), params.get("revision")
            )
            for options in params["sources"]
        ]
        self.rate = parse_size(params.get("rate"))
        self.chunk = parse_size(params.get("chunk") or "64M")
        self.reserve = parse_size(params.get("reserve"))
        if self.chunk < 1 << 16:
            raise StagingError("option_invalid", "chunk must be at least 64K")
        self.owner = owner_ids(params.get("owner"), params.get("group"))
        self._check_dest()

    def _check_dest(self):
        try:
            status = os.lstat(self.dest)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as exc:
            raise StagingError("dest_invalid", "%s: %s" % (self.dest, getattr(exc, "strerror", None) or exc)) from exc
        if not stat.S_ISDIR(status.st_mode):
            raise StagingError("dest_invalid", "%s exists and is not a directory" % self.dest)

    # -- manifest -------------------------------------------------------------------------------

    def marker(self):
        """The marker's content when it has the form that we write, else None."""
        data = manifests.load_json(self.marker_path)
        if isinstance(data, dict) and data.get("format") == manifests.FORMAT and isinstance(data.get("files"), dict) and data["files"]:
            return data
        return None

    def manifest(self):
        """What the model must be: as given, as staged before, as an unfinished transfer found it, or as a source says."""
        if self.params.get("manifest"):
            self.manifest_from = "given"
            return self._parse(self.params["manifest"], "the manifest")
        marker = self.marker()
        if marker is not None:
            self.manifest_from = "marker"
            try:
                return manifests.parse_manifest(json.dumps({"files": marker["files"]}))
            except manifests.ManifestError:
                self.events.add("marker_invalid", "the marker is damaged and not used", manifests.MARKER)
        kept = os.path.join(self.work, "manifest.json")
        if manifests.load_json(kept) is not None:
            try:
                with open(kept, "r", encoding="utf-8") as stream:
                    files = manifests.parse_manifest(stream.read())
                self.manifest_from = "unfinished transfer"
                return files
            except (OSError, manifests.ManifestError):
                pass
        return self._ask_sources()

    @staticmethod
    def _parse(text, what):
        try:
            return manifests.parse_manifest(text)
        except manifests.ManifestError as exc:
            raise StagingError(exc.code, "%s: %s" % (what, exc)) from exc

    def _ask_sources(self):
        problems = []
        for source in self.sources:
            for attempt in range(3):
                try:
                    files = _chosen(source.listing(), self.params["exclude"])
                    if files:
                        self.manifest_from = source.label
                        return files
                    problems.append({"source": source.label, "id": "manifest_empty", "what": "the source lists no file"})
                    break
                except sources.SourceError as exc:
                    problems.append({"source": source.label, "id": exc.code, "what": str(exc)})
                    self.events.add(exc.code, str(exc), source.label)
                    if not exc.retry or attempt == 2:
                        break
                    if self.stop is not None:
                        self.stop.wait(exc.wait if exc.wait is not None else 1.0)
        if not problems:
            raise StagingError("no_source", "there is nothing at %s and no source to stage it from" % self.dest)
        raise StagingError(
            problems[-1]["id"],
            "no source can say what the model consists of: %s" % "; ".join("%(source)s: %(what)s" % p for p in problems[-4:]),
            reasons=problems,
        )

    # -- plan and run ---------------------------------------------------------------------------

    def _fetcher(self, files):
        params = self.params
        return fetching.Fetcher(
            self.dest,
            files,
            self.sources,
            parallel=params["parallel"],
            chunk=self.chunk,
            rate=self.rate,
            retries=params["retries"],
            stall_timeout=float(params["stall_timeout"]),
            reserve=self.reserve,
            deep=params["deep_verify"],
            owner=self.owner,
            status_path=params.get("status_path"),
            stop=self.stop,
        )

    def plan(self):
        """What a run would do, without doing or reading it."""
        files = self.manifest()
        fetcher = self._fetcher(files)
        right, unknown, missing = fetcher.plan()
        sizes = {path: files[path].get("size") for path in missing}
        for path in [p for p, size in sizes.items() if size is None]:
            for source in self.sources:
                try:
                    sizes[path] = files[path]["size"] = source.size(path)
                    break
                except sources.SourceError as exc:
                    self.events.add(exc.code, str(exc), path)
        have = 0
        for path in missing:
            job = fetching.Job(fetcher, path, dict(files[path], size=sizes[path] or 0))
            state = manifests.load_json(job.state_path)
            try:
                # Only a part that open() leaves as it is: planning changes nothing.
                if isinstance(state, dict) and state.get("size") == job.size == os.path.getsize(job.part):
                    job.open()
                    have += job.have()
                    os.close(job.descriptor)
            except OSError:
                pass
        marker = self.marker()
        complete = not unknown and not missing and marker is not None and not self.params["deep_verify"]
        self._merge(fetcher)
        return {
            "complete": complete,
            "files_total": len(files),
            "files_right": len(right),
            "files_to_read": unknown,
            "files_to_fetch": missing,
            "bytes_total": sum(entry.get("size") or 0 for entry in files.values()),
            "bytes_to_fetch": sum(size or 0 for size in sizes.values()) - have,
            "bytes_resumed": have,
            "sizes_unknown": sum(1 for size in sizes.values() if size is None),
            "manifest_from": self.manifest_from,
            "facts": (marker or {}).get("facts") or {},
            "findings": (marker or {}).get("findings") or [],
            "verified": (marker or {}).get("verified") or "",
            "manifest_sha256": (marker or {}).get("manifest_sha256") or "",
        }

    def _merge(self, fetcher):
        for item in fetcher.events.items:
            self.events.items.append(item)
        for code, count in fetcher.events.counts.items():
            self.events.counts[code] = self.events.counts.get(code, 0) + count

    def run(self):
        """Stage; returns the answer of the module. Raises StagingError."""
        files = self.manifest()
        proven = all(entry.get("sha256") or entry.get("git_sha1") for entry in files.values())
        fetcher = self._fetcher(files)
        answer = {}

        def finalise(fetcher):
            fetcher.phase = "check"
            known = {p: {"size": e["size"], "sha256": e["sha256"]} for p, e in fetcher.record.items() if p in files}
            result = checkpoint.inspect(
                self.dest,
                allowed_roots=(),
                expect=self.params["expect"],
                manifest=known,
                content_known=True,
                structure=self.params["check"],
            )
            answer.update(facts=result["facts"], findings=result["findings"], ok=result["ok"])
            if not result["ok"]:
                return
            answer["changed"] = self._write_marker(fetcher, known, result, proven)
            shutil.rmtree(self.work, ignore_errors=True)

        try:
            host_files.make_parents(self.dest)
            fetcher._directory(self.dest)
            os.makedirs(self.work, mode=0o700, exist_ok=True)
            if self.manifest_from not in ("given", "marker", "unfinished transfer"):
                # The next run must go on with the same manifest even if the source has changed since.
                host_files.write_atomic(os.path.join(self.work, "manifest.json"), manifests.dump_manifest(files), 0o600)
            counters = fetcher.run(finalise)
        except fetching.FetchFailed as exc:
            self._merge(fetcher)
            raise StagingError(exc.code, str(exc), **dict(exc.details, **fetcher.counters())) from exc
        except fetching.Interrupted as exc:
            self._merge(fetcher)
            raise StagingError("interrupted", "the transfer was told to stop; the next run goes on where it was", **fetcher.counters()) from exc
        except OSError as exc:
            self._merge(fetcher)
            raise StagingError(
                "dest_error", "%s: %s" % (exc.filename or self.dest, exc.strerror or exc), **fetcher.counters()
            ) from exc
        self._merge(fetcher)
        answer.update(counters)
        answer["changed"] = bool(answer.get("changed")) or counters["fetched_files"] > 0
        answer["manifest_from"] = self.manifest_from
        answer["bytes_total"] = sum(entry["size"] for entry in fetcher.record.values())
        if not answer["ok"]:
            errors = [f for f in answer["findings"] if f["severity"] == "error"]
            raise StagingError(
                "wrong_checkpoint",
                "what was staged is no checkpoint that can be served: %s" % "; ".join("%(id)s: %(what)s" % f for f in errors[:6]),
                **answer
            )
        return answer

    def _write_marker(self, fetcher, known, result, proven):
        """The last step: from now on the directory counts. Returns whether the marker changed."""
        record = {path: fetcher.record[path] for path in sorted(known)}
        digest = hashlib.sha256(manifests.dump_manifest(known).encode("utf-8")).hexdigest()
        text = (
            json.dumps(
                {
                    "format": manifests.FORMAT,
                    "name": self.params.get("name") or "",
                    "revision": self.params.get("revision") or "",
                    # Whether a manifest said what the content must be, or the source was believed.
                    "verified": "manifest" if proven or self.manifest_from == "marker" and self._was_proven() else "source",
                    "manifest_sha256": digest,
                    "facts": result["facts"],
                    "findings": [f for f in result["findings"] if f["severity"] != "error"],
                    "files": record,
                },
                indent=1,
                sort_keys=True,
                ensure_ascii=False,
            )
            + "\n"
        )
        try:
            with open(self.marker_path, "r", encoding="utf-8") as stream:
                if stream.read() == text:
                    return False
        except (OSError, ValueError):
            pass
        host_files.write_atomic(self.marker_path, text, 0o644)
        if fetcher.owner is not None:
            os.chown(self.marker_path, fetcher.owner[0], fetcher.owner[1])
        host_files.sync_folder(self.dest)
        return True

    def _was_proven(self):
        marker = self.marker()
        return marker is not None and marker.get("verified") == "manifest"
