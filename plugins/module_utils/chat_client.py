# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One HTTP exchange, kept as raw bytes with the times at which they came.

Nothing here judges an answer. An exchange never raises for what a server does: a refusal, a cut or a
time-out is an ``error`` code on the result, so that one broken server cannot end the whole suite.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from urllib.parse import urlsplit

#: No answer of a probe is anywhere near this; it bounds what a runaway server can make us hold.
BODY_LIMIT = 32 * 1024 * 1024


class Exchange:
    """What was asked and what came back."""

    __slots__ = (
        "method", "url", "status", "headers", "body", "error", "error_text", "complete", "cancelled",
        "seconds", "first_byte", "marks", "started", "limit",
    )

    def __init__(self, method="GET", url="", status=None, headers=None, body=b"", error=None, error_text="", complete=True):
        self.method = method
        self.url = url
        self.status = status
        self.headers = dict(headers or {})
        self.body = body
        self.error = error
        self.error_text = error_text
        self.complete = complete
        self.cancelled = False
        self.seconds = 0.0
        self.first_byte = None
        self.marks = []
        self.started = 0.0
        self.limit = None

    def time_of(self, offset):
        """Seconds after which the byte at ``offset`` had arrived, or None."""
        for seconds, length in self.marks:
            if length >= offset:
                return seconds
        return None

    def json(self):
        """The body as JSON, or None."""
        try:
            return json.loads(self.body.decode("utf-8"))
        except (ValueError, UnicodeDecodeError):
            return None


class Client:
    """Requests to one base URL, each on a connection of its own.

    A fresh connection per request keeps one request's fate out of the next one's, and the router's
    delayed small writes on kept-alive connections out of the times.
    """

    def __init__(self, base_url, api_key=None, timeout=120.0, ca_path=None):
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.timeout = float(timeout)
        self.ca_path = ca_path
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("base_url must be http://host[:port] or https://host[:port], got %r" % (base_url,))
        self.scheme = parts.scheme
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self._context = None

    def _connect(self, timeout):
        if self.scheme == "http":
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        if self._context is None:
            self._context = ssl.create_default_context(cafile=self.ca_path or None)
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=self._context)

    def get(self, path, timeout=None, key=True):
        return self.request("GET", path, None, timeout=timeout, key=key)

    def chat(self, payload, timeout=None, key=True, until=None):
        return self.request("POST", "/v1/chat/completions", payload, timeout=timeout, key=key, until=until)

    def request(self, method, path, payload=None, timeout=None, key=True, until=None):
        """``payload``: an object sent as JSON, or bytes sent as they are. ``until``: called with the body so
        far after each read; once it is true the connection is dropped, as a client does that goes away."""
        limit = self.timeout if timeout is None else float(timeout)
        exchange = Exchange(method, self.base_url + path)
        exchange.limit = limit
        headers = {"Accept": "*/*", "Connection": "close", "User-Agent": "blackwell.dsv4-chat_probe"}
        data = None
        if payload is not None:
            data = payload if isinstance(payload, bytes) else json.dumps(payload, ensure_ascii=False).encode("utf-8")
            headers["Content-Type"] = "application/json"
        if key and self.api_key:
            headers["Authorization"] = "Bearer " + self.api_key
        exchange.started = start = time.monotonic()
        state = {"late": False, "sock": None}

        def cut():
            # Bounds the whole exchange: socket time-outs alone start anew with every byte that drips in.
            state["late"] = True
            sock = state["sock"]
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

        watchdog = threading.Timer(limit, cut)
        watchdog.daemon = True
        watchdog.start()
        connection = None
        body = bytearray()
        try:
            connection = self._connect(limit)
            connection.connect()
            state["sock"] = connection.sock
            connection.request(method, self.prefix + path, body=data, headers=headers)
            response = connection.getresponse()
            exchange.status = response.status
            exchange.headers = {name.lower(): value for name, value in response.getheaders()}
            exchange.first_byte = time.monotonic() - start
            self._read(exchange, response, body, start, until)
        except socket.timeout as exc:
            state["late"] = True
            self._fail(exchange, "timeout", exc)
        except ssl.SSLError as exc:
            self._fail(exchange, "tls_error", exc)
        except socket.gaierror as exc:
            self._fail(exchange, "name_resolution", exc)
        except ConnectionRefusedError as exc:
            self._fail(exchange, "connection_refused", exc)
        except http.client.RemoteDisconnected as exc:
            self._fail(exchange, "connection_closed", exc)
        except http.client.IncompleteRead as exc:
            self._fail(exchange, "body_cut", exc)
        except (ConnectionResetError, BrokenPipeError) as exc:
            self._fail(exchange, "body_cut" if body else "connection_reset", exc)
        except http.client.HTTPException as exc:
            self._fail(exchange, "http_protocol_error", exc)
        except (OSError, ValueError, AttributeError) as exc:
            # AttributeError: http.client's read of a response whose socket the watchdog has taken away.
            self._fail(exchange, "connection_failed", exc)
        finally:
            watchdog.cancel()
            if connection is not None:
                connection.close()
        exchange.body = bytes(body)
        if exchange.error == "body_cut" and not exchange.error_text.endswith("bytes"):
            exchange.error_text = "%d bytes came, then the connection broke off (%s)" % (len(body), exchange.error_text.split(":")[0])
        exchange.seconds = time.monotonic() - start
        if state["late"] and not exchange.cancelled and (exchange.error or not exchange.complete):
            exchange.complete = False
            got = exchange.status is not None
            exchange.error = "timeout" if got else "timeout_no_bytes"
            exchange.error_text = "%s after %.1f s (limit %.0f s)" % (
                "%d bytes of the body" % len(body) if got else "no byte of an answer", exchange.seconds, limit)
        return exchange

    @staticmethod
    def _fail(exchange, code, exc):
        exchange.error = code
        exchange.error_text = "%s: %s" % (type(exc).__name__, exc)
        exchange.complete = False

    @staticmethod
    def _read(exchange, response, body, start, until):
        length = exchange.headers.get("content-length")
        expected = int(length) if length and length.isdigit() and not response.chunked else None
        while expected is None or len(body) < expected:
            piece = response.read1(65536)
            if not piece:
                break
            body.extend(piece)
            exchange.marks.append((time.monotonic() - start, len(body)))
            if len(body) > BODY_LIMIT:
                exchange.error = "body_too_large"
                exchange.error_text = "more than %d bytes" % BODY_LIMIT
                exchange.complete = False
                return
            if until is not None and until(bytes(body)):
                exchange.cancelled = True
                exchange.complete = False
                return
        if expected is not None and len(body) < expected:
            exchange.error = "body_cut"
            exchange.error_text = "%d of %d bytes" % (len(body), expected)
            exchange.complete = False


def parse_sse(raw):
    """Split an event stream into ``[(event name, data, offset of its end)]`` and the text left over.

    As the standard says, an event counts only when a blank line has closed it. Raises UnicodeDecodeError
    when the bytes are no UTF-8.
    """
    events = []
    name, data, has_data = "", [], False
    position = 0
    closed = 0
    size = len(raw)
    raw.decode("utf-8")
    while position < size:
        newline = raw.find(b"\n", position)
        carriage = raw.find(b"\r", position, newline if newline >= 0 else size)
        if newline < 0 and carriage < 0:
            break
        if carriage >= 0:
            end = carriage
            after = carriage + (2 if raw[carriage:carriage + 2] == b"\r\n" else 1)
        else:
            end, after = newline, newline + 1
        line = raw[position:end]
        position = after
        if not line:
            if has_data:
                events.append((name, "\n".join(data), position))
            name, data, has_data = "", [], False
            closed = position
            continue
        if line.startswith(b":"):
            # A comment, used as keep-alive: nothing is open unless a field came before it.
            if not has_data and not name:
                closed = position
            continue
        field, colon, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            data.append(value.decode("utf-8"))
            has_data = True
        elif field == b"event":
            name = value.decode("utf-8")
    return events, raw[closed:].decode("utf-8")
