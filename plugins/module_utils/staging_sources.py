# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Where a model comes from: a directory, an HTTP mirror or the hub.

A source lists files and opens one of them at an offset. What it opens says honestly which bytes follow
(the asked range, or the whole file from its beginning) and carries a validator, so that bytes of two
versions of a file are never mixed. Whatever goes wrong is a SourceError that says whether trying again
can help. rsync is a child process and has a class of its own kind in staging_fetch.
"""

from __future__ import annotations

import datetime
import email.utils
import errno
import http.client
import json
import os
import re
import socket
import ssl
import stat
import threading
import time
import urllib.parse

from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_manifest as manifests

AGENT = "blackwell.dsv4 model_fetch"
MAX_REDIRECTS = 6
MAX_LISTING = 64 * 1024 * 1024
COMMIT = re.compile(r"\A[0-9a-f]{40}\Z")
_CONTENT_RANGE = re.compile(r"\Abytes (\d+)-(\d+)/(\d+|\*)\Z")


class SourceError(Exception):
    """A source did not give what was asked for.

    C(retry) says whether the same request may succeed later, C(wait) how long the other side asked to wait.
    """

    def __init__(self, code, message, retry=False, wait=None):
        super().__init__(message)
        self.code = code
        self.retry = retry
        self.wait = wait


def shown(url):
    """An address fit for messages: without user, password, query and fragment, where secrets live."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        if parts.port:
            host = "%s:%d" % (host, parts.port)
        return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))
    except ValueError:
        return "(unreadable address)"


def read_token_file(path):
    """A token from a file that nobody else can read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise SourceError("token_file", "the token file %s: %s" % (path, exc.strerror)) from exc
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("token_file", "the token file %s is not a regular file" % path)
        if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise SourceError("token_file", "the token file %s must be 0600 and belong to root or to the user that runs this" % path)
        return check_token(stream.read(65536).decode("utf-8", "replace"))


def check_token(token):
    """A token that fits into a header; its value is never part of a message."""
    token = token.strip()
    if not token or any(ord(c) < 33 or ord(c) > 126 for c in token):
        raise SourceError("token_invalid", "the token is empty or holds characters that no token has")
    return token


class Reply:
    """An opened file: C(whole) or the asked range, its total size and its validator."""

    def __init__(self, whole, total, validator, read, finish):
        self.whole = whole
        self.total = total
        self.validator = validator
        #: read(view) -> number of bytes, 0 at the end
        self.read = read
        #: finish(complete) gives the connection back or closes it
        self.finish = finish


class DirectorySource:
    """A mounted directory: NFS, USB, or a former copy."""

    kind = "directory"

    def __init__(self, path, allowed_roots=()):
        self.path = path
        self.label = path
        self.allowed_roots = allowed_roots

    def _problem(self, exc, path):
        codes = {errno.ENOENT: "not_found", errno.EACCES: "source_permission", errno.ELOOP: "link_loop"}
        retry = exc.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN)
        return SourceError(codes.get(exc.errno, "source_error"), "%s: %s" % (path, exc.strerror or exc), retry=retry)

    def listing(self):
        """Manifest beside the files when there is one, else names and sizes only."""
        try:
            names = os.listdir(self.path)
        except OSError as exc:
            raise self._problem(exc, self.path) from exc
        sums = None
        for name in (manifests.MARKER, "SHA256SUMS", "manifest.sha256"):
            if name in names:
                try:
                    with open(os.path.join(self.path, name), "rb") as stream:
                        sums = manifests.parse_manifest(stream.read(manifests.MAX_TEXT + 1).decode("utf-8", "replace"))
                except OSError as exc:
                    raise self._problem(exc, name) from exc
                except manifests.ManifestError as exc:
                    raise SourceError(exc.code, "%s: %s" % (name, exc)) from exc
                break
        if sums is not None:
            for path, entry in sums.items():
                if entry["size"] is None:
                    entry["size"] = self.size(path)
            return sums
        files = {}

        def visit(relative, depth):
            try:
                found = sorted(os.scandir(os.path.join(self.path, relative)), key=lambda e: e.name)
            except OSError as exc:
                raise self._problem(exc, relative or self.path) from exc
            for entry in found:
                name = "%s/%s" % (relative, entry.name) if relative else entry.name
                if entry.name.startswith("."):
                    continue
                try:
                    status = os.stat(entry.path)
                except OSError as exc:
                    if exc.errno == errno.ENOENT and entry.is_symlink():
                        raise SourceError("dangling_links", "%s is a link to something that is absent" % name) from exc
                    raise self._problem(exc, name) from exc
                if stat.S_ISDIR(status.st_mode):
                    if depth < 8:
                        visit(name, depth + 1)
                elif stat.S_ISREG(status.st_mode):
                    files[manifests.safe_path(name)] = {"size": status.st_size, "sha256": None}

        try:
            visit("", 0)
        except manifests.ManifestError as exc:
            raise SourceError(exc.code, str(exc)) from exc
        return files

    def size(self, path):
        """Size of a file without opening it."""
        try:
            return os.stat(os.path.join(self.path, path)).st_size
        except OSError as exc:
            raise self._problem(exc, path) from exc

    def open(self, path, start, end, validator, size, use_validator=True):
        """Open a file at an offset."""
        place = os.path.join(self.path, path)
        try:
            stream = open(place, "rb", buffering=0)
        except OSError as exc:
            raise self._problem(exc, path) from exc
        try:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SourceError("not_the_file", "%s is not a regular file" % path)
            if size is not None and status.st_size != size:
                raise SourceError("wrong_length", "%s has %d bytes in the source, %d are expected" % (path, status.st_size, size))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), start, end - start, os.POSIX_FADV_SEQUENTIAL)
            stream.seek(start)
        except BaseException:
            stream.close()
            raise
        mark = "%d-%d-%d" % (status.st_size, status.st_mtime_ns, status.st_ino)

        def read(view):
            try:
                return stream.readinto(view)
            except OSError as exc:
                raise self._problem(exc, path) from exc

        return Reply(False, status.st_size, mark, read, lambda complete: stream.close())


class HttpSource:
    """Files below one address. Redirects are followed; the token goes to the first host only."""

    kind = "http"

    def __init__(self, url, token=None, ca_bundle=None, proxy=None, timeout=60.0, sums="SHA256SUMS"):
        try:
            parts = urllib.parse.urlsplit(url)
            # Reading the port is what finds a malformed one.
            self.origin = self._origin(parts)
        except ValueError as exc:
            raise SourceError("source_invalid", "the address of a source is malformed: %s" % exc) from exc
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceError("source_invalid", "%s is no http or https address" % shown(url))
        if parts.username or parts.password:
            raise SourceError("source_invalid", "%s: no user or password in the address, use the token option" % shown(url))
        self.base = url.rstrip("/") + "/"
        self.label = shown(url)
        self.token = token
        self.timeout = timeout
        self.sums = sums
        self.proxy = None
        if proxy:
            try:
                self.proxy = urllib.parse.urlsplit(proxy if "://" in proxy else "http://" + proxy)
                # Reading the port is what finds a malformed one.
                self.proxy_port = self.proxy.port or 3128
            except ValueError as exc:
                raise SourceError("source_invalid", "the proxy is malformed") from exc
            if self.proxy.scheme != "http" or not self.proxy.hostname:
                raise SourceError("source_invalid", "the proxy must be an http address")
        try:
            self.context = ssl.create_default_context(cafile=ca_bundle or None)
        except (OSError, ssl.SSLError) as exc:
            raise SourceError("ca_bundle", "the CA bundle %s cannot be used: %s" % (ca_bundle, exc)) from exc
        self._local = threading.local()
        self._resolved = {}

    @staticmethod
    def _origin(parts):
        return (parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80))

    def address(self, path):
        """Where a file of the model is."""
        return self.base + urllib.parse.quote(path)

    # -- connections, one per thread and host ---------------------------------------------------

    def _connection(self, parts):
        pool = self._local.__dict__.setdefault("pool", {})
        key = self._origin(parts)
        if key in pool:
            return pool[key], key
        scheme, host, port = key
        proxy = self.proxy
        if scheme == "https":
            connection = http.client.HTTPSConnection(
                proxy.hostname if proxy else host, self.proxy_port if proxy else port, timeout=self.timeout, context=self.context
            )
            if proxy:
                connection.set_tunnel(host, port, headers=self._proxy_headers())
        else:
            connection = http.client.HTTPConnection(
                proxy.hostname if proxy else host, self.proxy_port if proxy else port, timeout=self.timeout
            )
        pool[key] = connection
        return connection, key

    def _drop(self, key):
        connection = self._local.__dict__.get("pool", {}).pop(key, None)
        if connection is not None:
            connection.close()

    def _proxy_headers(self):
        if self.proxy is None or self.proxy.username is None:
            return {}
        pair = "%s:%s" % (urllib.parse.unquote(self.proxy.username), urllib.parse.unquote(self.proxy.password or ""))
        import base64

        return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode("utf-8")).decode("ascii")}

    def _send(self, url, headers):
        """One request to one address; returns (response, key)."""
        parts = urllib.parse.urlsplit(url)
        fresh = self._origin(parts) not in self._local.__dict__.get("pool", {})
        target = parts.path or "/"
        if parts.query:
            target += "?" + parts.query
        headers = dict(headers, Host=parts.netloc.rpartition("@")[2])
        headers["User-Agent"] = AGENT
        headers["Accept-Encoding"] = "identity"
        if self.token and self._origin(parts) == self.origin:
            headers["Authorization"] = "Bearer " + self.token
        if self.proxy is not None and parts.scheme == "http":
            target = urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path or "/", parts.query, ""))
            headers.update(self._proxy_headers())
        while True:
            connection, key = self._connection(parts)
            try:
                connection.request("GET", target, headers=headers)
                return connection.getresponse(), key
            except ssl.SSLCertVerificationError as exc:
                self._drop(key)
                raise SourceError("certificate", "%s: %s" % (shown(url), exc.verify_message)) from exc
            except (socket.timeout, TimeoutError) as exc:
                self._drop(key)
                raise SourceError("download_stalled", "%s did not answer within %d s" % (shown(url), self.timeout), retry=True) from exc
            except (OSError, http.client.HTTPException, ValueError) as exc:
                self._drop(key)
                if not fresh:
                    # The other side had closed an idle connection; that is no failure.
                    fresh = True
                    continue
                reason = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
                raise SourceError("connection", "%s: %s" % (shown(url), reason), retry=True) from exc

    def _get(self, url, headers):
        """Follow redirects; returns (response, key, final address)."""
        for dummy in range(MAX_REDIRECTS):
            response, key = self._send(url, headers)
            if response.status not in (301, 302, 303, 307, 308):
                return response, key, url
            location = response.getheader("Location")
            response.close()
            self._drop(key)
            if not location:
                raise SourceError("redirect", "%s redirects to nowhere" % shown(url), retry=True)
            target = urllib.parse.urljoin(url, location)
            old, new = urllib.parse.urlsplit(url), urllib.parse.urlsplit(target)
            if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
                raise SourceError("redirect", "%s redirects to %s, which is less safe" % (shown(url), shown(target)))
            url = target
        raise SourceError("redirect", "%s redirects in a circle" % shown(url))

    def _refuse(self, response, key, url):
        """Turn a status that brings no file into a SourceError."""
        status = response.status
        wait = retry_after(response.getheader("Retry-After"))
        response.close()
        self._drop(key)
        if status in (401, 403):
            raise SourceError("unauthorized", "%s answers %d: token missing, wrong, or without access to the model" % (shown(url), status))
        if status in (404, 410):
            raise SourceError("not_found", "%s answers %d" % (shown(url), status))
        if status == 429 or (status == 503 and wait is not None):
            raise SourceError("slow_down", "%s answers %d" % (shown(url), status), retry=True, wait=wait if wait is not None else 5.0)
        if status in (408, 425) or status >= 500:
            raise SourceError("server_error", "%s answers %d" % (shown(url), status), retry=True)
        if status == 416:
            raise SourceError("range_refused", "%s answers 416 to a range inside of the file" % shown(url), retry=True)
        raise SourceError("unexpected_status", "%s answers %d" % (shown(url), status))

    def document(self, url, limit=MAX_LISTING):
        """A small document and its headers."""
        response, key, final = self._get(url, {})
        if response.status != 200:
            self._refuse(response, key, final)
        try:
            raw = response.read(limit + 1)
        except (OSError, http.client.HTTPException) as exc:
            self._drop(key)
            raise SourceError("connection", "%s: the answer ended early" % shown(final), retry=True) from exc
        if len(raw) > limit:
            self._drop(key)
            raise SourceError("source_invalid", "%s is larger than %d bytes" % (shown(final), limit))
        return raw, response.headers

    def listing(self):
        """The manifest of a mirror: its SHA256SUMS, with sizes asked for one by one."""
        raw, headers = self.document(self.base + self.sums)
        if "html" in (headers.get("Content-Type") or "").lower():
            raise SourceError("not_the_file", "%s%s is an HTML page" % (self.label, self.sums), retry=True)
        try:
            files = manifests.parse_manifest(raw.decode("utf-8", "replace"))
        except manifests.ManifestError as exc:
            raise SourceError(exc.code, "%s: %s" % (self.sums, exc)) from exc
        return files

    def size(self, path):
        """Size of a file, from an answer that carries no more than one byte of it."""
        response, key, final = self._get(self.address(path), {"Range": "bytes=0-0"})
        if response.status == 416:
            length = (response.getheader("Content-Range") or "").rpartition("/")[2]
            response.close()
            self._drop(key)
            if length == "0":
                return 0
            raise SourceError("range_refused", "%s answers 416" % shown(final), retry=True)
        if response.status not in (200, 206):
            self._refuse(response, key, final)
        total = None
        if response.status == 206:
            match = _CONTENT_RANGE.match(response.getheader("Content-Range") or "")
            if match and match.group(3) != "*":
                total = int(match.group(3))
        elif (response.getheader("Content-Length") or "").isdigit():
            total = int(response.getheader("Content-Length"))
        html = "text/html" in (response.getheader("Content-Type") or "").lower() and not path.endswith((".html", ".htm"))
        response.close()
        self._drop(key)
        if html:
            raise SourceError("not_the_file", "%s is an HTML page" % shown(final), retry=True)
        if total is None:
            raise SourceError("wrong_length", "%s does not say how long it is" % shown(final), retry=True)
        return total

    def open(self, path, start, end, validator, size, use_validator=True):
        """Ask for a range of a file and check that this is what comes."""
        headers = {}
        if start or end != size:
            headers["Range"] = "bytes=%d-%d" % (start, end - 1)
            if use_validator and validator and start:
                headers["If-Range"] = validator
        first = self._resolved.get(path) or self.address(path)
        response, key, final = self._get(first, headers)
        if response.status in (401, 403, 404, 410) and first != self.address(path):
            # The signed address that a redirect gave has expired.
            response.close()
            self._drop(key)
            self._resolved.pop(path, None)
            response, key, final = self._get(self.address(path), headers)
        if response.status not in (200, 206):
            self._resolved.pop(path, None)
            self._refuse(response, key, final)
        if self._origin(urllib.parse.urlsplit(final)) != self.origin:
            self._resolved[path] = final
        try:
            self._judge(response, path, final, start, end, size)
        except SourceError:
            response.close()
            self._drop(key)
            raise
        whole = response.status == 200

        left = None if response.chunked or response.length is None else [response.length]

        def read(view):
            # One system call each time: a buffered read would wait until the view is full, and hide a trickle.
            try:
                if left is None:
                    data = response.read1(len(view))
                    view[: len(data)] = data
                    return len(data)
                if not left[0]:
                    return 0
                count = response.fp.readinto1(view[: left[0]])
                left[0] -= count
                return count
            except (socket.timeout, TimeoutError) as exc:
                raise SourceError("download_stalled", "%s: no byte for %d s" % (shown(final), self.timeout), retry=True) from exc
            except (OSError, http.client.HTTPException, ValueError) as exc:
                reason = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
                raise SourceError("connection", "%s: %s" % (shown(final), reason), retry=True) from exc

        def finish(complete):
            whole_body = response.isclosed() if left is None else not left[0]
            response.close()
            if not complete or not whole_body:
                self._drop(key)

        return Reply(whole, size, _validator(response), read, finish)

    @staticmethod
    def _judge(response, path, final, start, end, size):
        """Reject what is not the file: pages of a proxy, other lengths, other ranges, compressed bodies."""
        kind = (response.getheader("Content-Type") or "").lower()
        length = response.getheader("Content-Length")
        if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
            raise SourceError("not_the_file", "%s comes compressed although that was not asked for" % shown(final), retry=True)
        if "text/html" in kind and not path.endswith((".html", ".htm")):
            raise SourceError("not_the_file", "%s is an HTML page: a login or an error page in place of the file" % shown(final), retry=True)
        if response.status == 206:
            match = _CONTENT_RANGE.match(response.getheader("Content-Range") or "")
            if not match or int(match.group(1)) != start or int(match.group(2)) > end - 1:
                raise SourceError("wrong_range", "%s answers with another range than asked for" % shown(final), retry=True)
            if match.group(3) != "*" and int(match.group(3)) != size:
                raise SourceError("wrong_length", "%s has %s bytes there, %d are expected" % (shown(final), match.group(3), size), retry=True)
        elif length is not None and (not length.isdigit() or int(length) != size):
            raise SourceError("wrong_length", "%s has %s bytes there, %d are expected" % (shown(final), length, size), retry=True)


class HubSource(HttpSource):
    """A repository on the hub at one commit."""

    kind = "hub"

    def __init__(self, repository, revision, endpoint, **options):
        if not re.match(r"\A[\w.-]+/[\w.-]+\Z", repository or ""):
            raise SourceError("source_invalid", "the repository of a hub source is written owner/name")
        if not COMMIT.match(revision or ""):
            raise SourceError(
                "revision_not_pinned", "the hub needs a commit (40 hexadecimal digits) as revision: a branch may change between two files"
            )
        super().__init__(endpoint, **options)
        self.repository = repository
        self.revision = revision
        self.label = "%s%s at %s" % (shown(self.base), repository, revision[:12])

    def address(self, path):
        return "%s%s/resolve/%s/%s" % (self.base, self.repository, self.revision, urllib.parse.quote(path))

    def listing(self):
        """All files of the commit with sizes, and the sha256 of the large ones."""
        url = "%sapi/models/%s/tree/%s?recursive=true&expand=false" % (self.base, self.repository, self.revision)
        items = []
        for dummy in range(1000):
            raw, headers = self.document(url)
            try:
                page = json.loads(raw.decode("utf-8"))
            except ValueError as exc:
                raise SourceError("not_the_file", "%s: the listing is not JSON" % self.label, retry=True) from exc
            if not isinstance(page, list):
                raise SourceError("source_invalid", "%s: the listing is not a list" % self.label)
            items.extend(page)
            following = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', headers.get("Link") or "")
            if not following:
                break
            target = urllib.parse.urljoin(url, following.group(1))
            if self._origin(urllib.parse.urlsplit(target)) != self.origin:
                raise SourceError("redirect", "%s: the listing goes on at another host" % self.label)
            url = target
        try:
            return manifests.parse_hub_tree(items)
        except manifests.ManifestError as exc:
            raise SourceError(exc.code, "%s: %s" % (self.label, exc)) from exc


def _validator(response):
    """A strong ETag or the modification time; None when neither can prove sameness."""
    etag = response.getheader("ETag")
    if etag and etag.startswith('"'):
        return etag
    return response.getheader("Last-Modified")


def retry_after(value):
    """Seconds that the other side asks to wait, from either form of the header; None without one."""
    if not value:
        return None
    value = value.strip()
    if value.isdigit():
        return min(float(value), 3600.0)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError, IndexError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return max(0.0, min(moment.timestamp() - time.time(), 3600.0))
