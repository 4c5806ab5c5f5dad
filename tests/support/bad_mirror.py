# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An HTTP server that serves files and misbehaves as it is told.

A plan is a function C(plan(path, number, request) -> name of a fault or None); C(number) counts the requests for
that path. Faults end up in C(log), bytes of bodies in C(sent), so that a test can prove what happened.
"""

from __future__ import annotations

import collections
import email.utils
import hashlib
import http.server
import threading
import time
import urllib.parse

FAULTS = (
    "cut",
    "ignore_range",
    "changed",
    "html",
    "slow_down",
    "slow_down_date",
    "stall",
    "wrong_length",
    "short",
    "corrupt",
    "server_error",
    "drop",
    "wrong_range",
    "compressed",
)


class Mirror:
    """Serves C(files) ({path: bytes, or an object with size() and read(start, end)})."""

    def __init__(self, files, plan=None, prefix="/", delay=0.0, token=None, seed=1, stall=30.0, cut_at=None):
        self.files = files
        self.plan = plan or (lambda path, number, request: None)
        self.prefix = prefix
        self.delay = delay
        self.token = token
        self.stall = stall
        self.cut_at = cut_at
        self.routes = {}
        self.log = collections.Counter()
        self.sent = collections.Counter()
        self.numbers = collections.Counter()
        self.requests = []
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._seed = seed
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def log_message(self, *args):
                pass

            def do_GET(self):
                try:
                    mirror.answer(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:%d%s" % (self.server.server_port, prefix.rstrip("/"))
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *args):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def number(self, what, below):
        """A reproducible number for a decision that the test does not care about."""
        digest = hashlib.sha256(("%s-%s" % (self._seed, what)).encode()).digest()
        return int.from_bytes(digest[:6], "big") % max(1, below)

    @staticmethod
    def size(content):
        return len(content) if isinstance(content, (bytes, bytearray)) else content.size()

    @staticmethod
    def part(content, start, end):
        return content[start:end] if isinstance(content, (bytes, bytearray)) else content.read(start, end)

    def etag(self, path):
        return '"%s"' % hashlib.sha256(path.encode()).hexdigest()[:16]

    def answer(self, request):
        """One request, good or bad."""
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        with self.lock:
            self.numbers[path] += 1
            number = self.numbers[path]
            self.requests.append((path, dict(request.headers)))
        if path in self.routes:
            return self.routes[path](request)
        if self.token is not None and request.headers.get("Authorization") != "Bearer " + self.token:
            return self.plain(request, 401, b"who are you")
        relative = path[len(self.prefix):].lstrip("/") if path.startswith(self.prefix) else None
        if relative not in self.files:
            return self.plain(request, 404, b"no such file")
        content = self.files[relative]
        fault = self.plan(relative, number, request)
        with self.lock:
            self.log[fault or "good"] += 1
        if fault == "html":
            return self.plain(request, 200, b"<html><body>Please log in</body></html>", "text/html; charset=utf-8")
        if fault == "slow_down":
            return self.plain(request, 429, b"slow down", extra={"Retry-After": "0"})
        if fault == "slow_down_date":
            return self.plain(request, 503, b"later", extra={"Retry-After": email.utils.formatdate(time.time() + 1, usegmt=True)})
        if fault == "server_error":
            return self.plain(request, 500, b"oops")
        if fault == "drop":
            request.close_connection = True
            return request.connection.close()
        return self.serve(request, relative, content, fault, number)

    def plain(self, request, status, body, kind="text/plain", extra=None):
        """A small answer that is no file."""
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        for key, value in (extra or {}).items():
            request.send_header(key, value)
        request.end_headers()
        request.wfile.write(body)

    def serve(self, request, path, content, fault, number):
        """A file or a range of it, with the fault worked in."""
        total = self.size(content)
        etag = self.etag(path)
        if fault == "changed":
            etag = '"other-%d"' % number
        start, end, ranged = 0, total, False
        asked = request.headers.get("Range")
        if asked and fault != "ignore_range":
            validator = request.headers.get("If-Range")
            if validator is None or validator == etag:
                first, dummy, last = asked.split("=", 1)[1].partition("-")
                start, end, ranged = int(first), min(int(last) + 1 if last else total, total), True
                if start >= total:
                    return self.plain(request, 416, b"", extra={"Content-Range": "bytes */%d" % total})
        length = end - start
        said = length
        if fault == "wrong_length":
            said, total = length - 1 if length > 1 else length, total - 1
        request.send_response(206 if ranged else 200)
        request.send_header("Content-Type", "application/octet-stream")
        request.send_header("ETag", etag)
        request.send_header("Accept-Ranges", "bytes")
        if fault == "compressed":
            request.send_header("Content-Encoding", "gzip")
        if ranged:
            first = start + 1 if fault == "wrong_range" else start
            request.send_header("Content-Range", "bytes %d-%d/%d" % (first, end - 1, total))
        request.send_header("Content-Length", str(said))
        request.end_headers()
        stop = end
        if fault in ("cut", "stall", "short"):
            share = self.cut_at if self.cut_at is not None else self.number((path, number, "cut"), length)
            stop = start + min(share, length)
        flip = start + self.number((path, number, "flip"), length) if fault == "corrupt" else -1
        position = start
        while position < min(stop, start + said):
            piece = self.part(content, position, min(position + (1 << 18), stop, start + said))
            if position <= flip < position + len(piece):
                piece = bytearray(piece)
                piece[flip - position] ^= 0x55
            request.wfile.write(piece)
            position += len(piece)
            with self.lock:
                self.sent[path] += len(piece)
            if self.delay:
                time.sleep(self.delay)
        if fault == "stall":
            request.wfile.flush()
            self.closing.wait(self.stall)
        if position < start + said or fault in ("cut", "stall", "short"):
            request.close_connection = True


class Pattern:
    """A large file that exists only as a rule: the bytes at each offset follow from a seed."""

    BLOCK = 1 << 16

    def __init__(self, seed, size):
        self.seed = seed
        self._size = size
        # One block of noise, cut at a place that depends on the number of the block: no two regions are equal.
        self.noise = hashlib.shake_128(("pattern-%s" % seed).encode()).digest(2 * self.BLOCK)

    def size(self):
        return self._size

    def block(self, number):
        shift = (number * 40503 + 17) % self.BLOCK
        return number.to_bytes(8, "little") + self.noise[shift:shift + self.BLOCK - 8]

    def read(self, start, end):
        end = min(end, self._size)
        first, last = start // self.BLOCK, -(-end // self.BLOCK)
        data = b"".join(self.block(n) for n in range(first, last))
        return data[start - first * self.BLOCK:end - first * self.BLOCK]

    def sha256(self):
        digest = hashlib.sha256()
        for number in range(-(-self._size // self.BLOCK)):
            digest.update(self.block(number)[: self._size - number * self.BLOCK])
        return digest.hexdigest()
