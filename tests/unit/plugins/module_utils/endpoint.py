# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small OpenAI-compatible endpoint that answers the probes rightly, until a test tells it otherwise.

``Endpoint.hook(request)`` may return a Reply for a request; None lets the good answer through.
"""

from __future__ import annotations

import http.server
import json
import re
import socket
import socketserver
import threading
import time


class Reply:
    """What to send. ``body`` bytes go out as they are; ``cut`` ends the connection after so many of them."""

    def __init__(self, status=200, body=b"", kind="application/json", cut=None, hang=0.0, chunked=False, pause=0.0):
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        self.kind = kind
        self.cut = cut
        self.hang = hang
        self.chunked = chunked
        self.pause = pause


def sse(chunks, done=True):
    lines = [b"data: " + (c if isinstance(c, bytes) else json.dumps(c, ensure_ascii=False).encode()) + b"\n\n" for c in chunks]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


def whole(content=None, reasoning=None, calls=None, finish=None, model="deepseek-v4-flash", tokens=9):
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    return {
        "id": "c-1", "object": "chat.completion", "created": 1, "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish or ("tool_calls" if calls else "stop"), "matched_stop": None}],
        "usage": {"prompt_tokens": 11, "completion_tokens": tokens, "total_tokens": 11 + tokens},
    }


def streamed(content=None, reasoning=None, calls=None, finish=None, model="deepseek-v4-flash", tokens=9, piece=3):
    """Chunks as SGLang sends them: role first, thought, text, calls, finish, usage."""
    base = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": model}

    def delta(values, end=None):
        return dict(base, choices=[{"index": 0, "delta": values, "logprobs": None, "finish_reason": end, "matched_stop": None}], usage=None)

    chunks = [delta({"role": "assistant", "content": ""})]
    for key, text in (("reasoning_content", reasoning), ("content", content)):
        for at in range(0, len(text or ""), piece):
            chunks.append(delta({key: text[at:at + piece]}))
    for index, call in enumerate(calls or []):
        arguments = call["function"]["arguments"]
        chunks.append(delta({"tool_calls": [{"index": index, "id": call["id"], "type": "function",
                                             "function": {"name": call["function"]["name"], "arguments": ""}}]}))
        for at in range(0, len(arguments), 6):
            chunks.append(delta({"tool_calls": [{"index": index, "id": None, "type": "function",
                                                 "function": {"name": None, "arguments": arguments[at:at + 6]}}]}))
    chunks.append(delta({}, finish or ("tool_calls" if calls else "stop")))
    chunks.append(dict(base, choices=[], usage={"prompt_tokens": 11, "completion_tokens": tokens, "total_tokens": 11 + tokens}))
    return chunks


def call(name, arguments, number=0):
    return {"id": "call_%024x" % (number + 1), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def good_answer(payload):
    """(content, reasoning, calls) for a payload of the probes."""
    messages = payload["messages"]
    last = messages[-1]
    text = last.get("content") or ""
    kwargs = payload.get("chat_template_kwargs") or {}
    effort = payload.get("reasoning_effort")
    thinking = kwargs.get("thinking") is True or (effort is not None and effort != "none")
    product = re.search(r"What is (\d+)\*(\d+)\?", text)
    if last["role"] == "tool":
        values = [json.loads(m["content"])["temperature_c"] for m in messages if m["role"] == "tool"]
        return "Paris: %d degrees, Tokyo: %d degrees." % tuple(values), None, None
    if product and payload.get("response_format"):
        a, b = int(product.group(1)), int(product.group(2))
        return json.dumps({"a": a, "b": b, "product": a * b}), None, None
    if product:
        a, b = int(product.group(1)), int(product.group(2))
        return str(a * b), ("First %d times %d, then the rest." % (a, b) if thinking else None), None
    if "Paris and in Tokyo" in text and payload.get("tools"):
        return "", None, [call("get_weather", {"city": "Paris"}, 0), call("get_weather", {"city": "Tokyo"}, 1)]
    if "Rome" in text and payload.get("tools"):
        return "", None, [call("get_weather", {"city": "Rome"}, 0)]
    order = re.search(r"quantity (\d+), (by|no) express", text)
    if order:
        return "", None, [call("create_order", {
            "customer": {"name": "Ada Lovelace", "address": {"city": "Paris", "zip": "75001"}},
            "items": [{"sku": "A-100", "quantity": int(order.group(1))}], "express": order.group(2) == "by"})]
    echo = re.search(r"exactly, and nothing else: (.*)", text)
    if echo:
        return echo.group(1), None, None
    if "Count from 1" in text:
        return ", ".join(str(n) for n in range(1, 2001)), None, None
    box = re.search(r"What is the code of box (\w+)\?", text)
    if box:
        return "The code of box %s is %s." % (box.group(1), re.search(r"box %s is (\d+)" % box.group(1), text).group(1)), None, None
    return "It tells people what the sky will do.", None, None


class Endpoint:
    """``with Endpoint() as e: ... e.url``"""

    def __init__(self, hook=None, model="deepseek-v4-flash", api_key=None, context_length=20000):
        self.hook = hook
        self.model = model
        self.api_key = api_key
        self.context_length = context_length
        self.requests = []
        self.chats = 0
        self.running = 0
        self.lock = threading.Lock()

    def __enter__(self):
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                outer.serve(self, None)

            def do_POST(self):
                outer.serve(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = "http://127.0.0.1:%d" % self.port
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def serve(self, handler, raw):
        request = {"method": handler.command, "path": handler.path, "headers": dict(handler.headers), "raw": raw, "payload": None, "number": None}
        try:
            request["payload"] = json.loads(raw) if raw else None
        except ValueError:
            pass
        with self.lock:
            if handler.path.endswith("/chat/completions"):
                request["number"] = self.chats
                self.chats += 1
            self.requests.append(request)
        reply = self.hook(request) if self.hook else None
        self.send(handler, reply or self.good(request))

    def good(self, request):
        path = request["path"]
        if path == "/v1/models":
            return Reply(body={"object": "list", "data": [{"id": self.model, "object": "model"}]})
        if path in ("/health", "/readiness"):
            return Reply(body=b"")
        if path == "/v1/loads":
            return Reply(body={"loads": [{"dp_rank": 0, "num_running_reqs": self.running}]})
        if not path.endswith("/chat/completions"):
            return Reply(404, {"detail": "Not Found"})
        if self.api_key and request["headers"].get("Authorization") != "Bearer " + self.api_key:
            return Reply(401, {"error": "Unauthorized"})
        payload = request["payload"]
        if payload is None:
            return Reply(400, {"error": {"message": "Invalid JSON", "type": "invalid_request_error"}})
        if len(request["raw"]) > self.context_length * 2:
            return Reply(400, {"error": {"message": "The input is longer than the model's context length", "type": "invalid_request_error"}})
        return self.answer(payload, *good_answer(payload))

    @staticmethod
    def answer(payload, content=None, reasoning=None, calls=None, finish=None):
        if payload.get("stream"):
            pause = 0.02 if "Count from 1" in str(payload["messages"][-1].get("content")) else 0.0
            return Reply(body=sse(streamed(content, reasoning, calls, finish)), kind="text/event-stream", chunked=True, pause=pause)
        return Reply(body=whole(content, reasoning, calls, finish))

    def send(self, handler, reply):
        with self.lock:
            self.running += 1
        try:
            self._send(handler, reply)
        except OSError:
            handler.close_connection = True
        finally:
            with self.lock:
                self.running -= 1

    def _send(self, handler, reply):
        if reply.hang:
            time.sleep(reply.hang)
        if reply.status is None:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        handler.send_response(reply.status)
        handler.send_header("Content-Type", reply.kind)
        handler.send_header("Connection", "close")
        handler.close_connection = True
        body = reply.body
        if reply.chunked:
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            sent = 0
            pieces = body.split(b"\n\n")
            pieces = [p + b"\n\n" for p in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])
            for piece in pieces:
                if reply.cut is not None and sent + len(piece) > reply.cut:
                    piece = piece[:reply.cut - sent]
                    if piece:
                        handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    return
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                sent += len(piece)
                if reply.pause:
                    time.sleep(reply.pause)
            handler.wfile.write(b"0\r\n\r\n")
        else:
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body if reply.cut is None else body[:reply.cut])
