# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Between the halves: the bootstrap server of prefill, and the hand-over of a request's KV.

Decode really goes to the address that the router put into the request, asks it
where the prefill rank listens, and waits there for the room. What is handed over
is the digest of the prompt that prefill computed, so a pair whose halves render
differently or lay out their caches differently answers garbage, as it would.
"""
from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass, field

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from sglang.rehearsal.resolve import seconds, switch

FAKE_HOST = "2.2.2.2"
ROUTE_ATTEMPTS = 15


class TransferError(RuntimeError):
    """The request is lost; status 500."""


class LayoutError(RuntimeError):
    """The two halves can never work together: decode's scheduler ends."""


def digest(ids: list[int]) -> str:
    return hashlib.sha256(b",".join(b"%d" % item for item in ids)).hexdigest()


def layout(args: dict) -> dict:
    """What the halves must agree on. The last one is not compared by SGLang."""
    return {
        "page_size": args["page_size"],
        "kv_cache_dtype": args["kv_cache_dtype"],
        "transfer_backend": args["disaggregation_transfer_backend"],
        "speculative_algorithm": args["speculative_algorithm"],
        "speculative_num_draft_tokens": args["speculative_num_draft_tokens"],
        "kv_layout": os.environ.get("SGLANG_DSV4_KV_LAYOUT", "v4"),
        "direct_swa": switch("SGLANG_OPT_SM120_DIRECT_SWA_KV", False),
    }


def control_address() -> str:
    """Where control sockets listen. SGLang without SGLANG_HOST_IP takes the address of the default route; this engine stays at home."""
    return os.environ.get("SGLANG_HOST_IP") or os.environ.get("HOST_IP") or "127.0.0.1"


@dataclass
class Room:
    ready: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    taken: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Prefill:
    """The bootstrap server and the rank that hands over."""

    def __init__(self, args: dict):
        self.args = args
        self.layout = layout(args)
        self.rooms: dict[int, Room] = {}
        self.ranks_ready = False
        self.rank_port = 0
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        boot = web.Application()
        boot.router.add_get("/health", lambda _request: _plain("OK"))
        boot.router.add_get("/route", self._route)
        await self._listen(boot, self.args["host"], self.args["disaggregation_bootstrap_port"])
        rank = web.Application()
        rank.router.add_post("/transfer", self._transfer)
        runner = await self._listen(rank, control_address(), 0)
        self.rank_port = runner.addresses[0][1]

    async def _listen(self, app: web.Application, host: str, port: int) -> web.AppRunner:
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        self._runners.append(runner)
        return runner

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _route(self, request: web.Request) -> web.Response:
        if not self.ranks_ready:
            return web.Response(text="Prefill server not fully registered yet", status=503)
        if request.query.get("prefill_dp_rank", "-1") == "-1":
            return web.json_response({
                "attn_tp_size": self.args["tp_size"], "attn_cp_size": 1, "dp_size": self.args["dp_size"],
                "pp_size": self.args["pp_size"], "page_size": self.layout["page_size"],
                "kv_cache_dtype": self.layout["kv_cache_dtype"], "follow_bootstrap_room": True,
                "kv_layout": self.layout["kv_layout"], "prefill_http_port": self.args["port"],
            })
        return web.json_response({"rank_ip": control_address(), "rank_port": self.rank_port})

    def _room(self, number: int) -> Room:
        return self.rooms.setdefault(number, Room())

    async def _transfer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        room = self._room(asked["room"])
        for key, value in self.layout.items():
            if key != "direct_swa" and asked["layout"].get(key) != value:
                reason = "%s differs: prefill %r, decode %r" % (key, value, asked["layout"].get(key))
                if not room.taken.done():
                    room.taken.set_result(reason)
                return web.json_response({"error": reason}, status=409)
        handed = await room.ready
        if not room.taken.done():
            room.taken.set_result(None)
        return web.json_response({**handed, "direct_swa": self.layout["direct_swa"]})

    async def offer(self, number: int, ids: list[int]) -> None:
        """Prefill is done: wait until decode has taken the KV of the room."""
        room = self._room(number)
        try:
            if not room.ready.done():
                room.ready.set_result({"digest": digest(ids), "tokens": len(ids)})
            limit = seconds("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", 300)
            try:
                reason = await asyncio.wait_for(asyncio.shield(room.taken), limit)
            except TimeoutError:
                raise TransferError(
                    "Prefill bootstrap failed for request rank=0 bootstrap_room=%d with exception KVTransferError: Request timed out "
                    "after %.1fs in KVPoll.Bootstrapping" % (number, limit)) from None
            if reason:
                raise TransferError("Prefill transfer failed for request rank=0 bootstrap_room=%d with exception KVTransferError: %s"
                                    % (number, reason))
        finally:
            self.rooms.pop(number, None)


async def _plain(text: str) -> web.Response:
    return web.Response(text=text)


class Decode:
    """The receiving half."""

    def __init__(self, args: dict):
        self.args = args
        self.layout = layout(args)
        self._http: ClientSession | None = None

    async def start(self) -> None:
        self._http = ClientSession(timeout=ClientTimeout(total=None, sock_connect=5))

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def fetch(self, host: str, port: int, room: int, ids: list[int]) -> bool:
        """Wait for the KV of a room. False when what came does not belong to this prompt."""
        address = "%s:%d" % (host, port)
        limit = seconds("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", 300)
        try:
            return await asyncio.wait_for(self._fetch(address, room, ids), limit)
        except TimeoutError:
            raise TransferError(
                "Decode transfer failed for request rank=0 bootstrap_room=%d with exception KVTransferError: Request timed out after "
                "%.1fs in KVPoll.WaitingForInput" % (room, limit)) from None

    async def _fetch(self, address: str, room: int, ids: list[int]) -> bool:
        info = await self._info(address, room)
        for key, title in (("page_size", "Page size"), ("kv_cache_dtype", "KV cache dtype")):
            if info.get(key) != self.layout[key]:
                raise LayoutError("RuntimeError: %s mismatch: prefill server has %s=%s, but decode server has %s=%s."
                                  % (title, key, info.get(key), key, self.layout[key]))
        try:
            async with self._http.get("http://%s/route?prefill_dp_rank=0&target_tp_rank=0" % address) as answer:
                rank = await answer.json()
            target = "http://%s:%d/transfer" % (rank["rank_ip"], rank["rank_port"])
            async with self._http.post(target, json={"room": room, "layout": self.layout}) as answer:
                handed = await answer.json()
                if answer.status != 200:
                    raise TransferError("Decode transfer failed for request rank=0 bootstrap_room=%d with exception KVTransferError: %s"
                                        % (room, handed.get("error")))
        except (ClientError, OSError, ValueError) as error:
            raise TransferError(
                "Decode transfer failed for request rank=0 bootstrap_room=%d with exception KVTransferError: Lost connection with prefill "
                "instance (bootstrap_addr: %s): %s" % (room, address, error)) from None
        return handed["digest"] == digest(ids) and handed["direct_swa"] == self.layout["direct_swa"]

    async def _info(self, address: str, room: int) -> dict:
        for _attempt in range(ROUTE_ATTEMPTS):
            try:
                url = "http://%s/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1" % address
                async with self._http.get(url, timeout=ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    problem = "%d, %s" % (answer.status, await answer.text())
            except (TimeoutError, ClientError, OSError, ValueError) as error:
                problem = str(error)
            await asyncio.sleep(1)
        raise TransferError(
            "Decode handshake failed for request rank=0 bootstrap_room=%d with exception KVTransferError: Could not fetch prefill parallel "
            "info from %s after %d attempts (%s)" % (room, address, ROUTE_ATTEMPTS, problem))
