# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Copy between GPUs and compare, through the CUDA driver's own library, with a time limit.

Whether peer access "can" be used says nothing: behind a translating IOMMU a copy reports success and the data is wrong, or
it never ends. So the bytes are compared, in a child process that may be ended.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import signal
import time
import typing as t

SIZES = (4096, 1 << 20, 32 << 20)


class CudaError(Exception):
    """A call of the CUDA driver failed; the message names the call and the driver's word for it."""


class Cuda:
    """The few calls of libcuda.so.1 that a copy needs."""

    def __init__(self, library: t.Any = None):
        try:
            self.library = library if library is not None else ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"libcuda.so.1 cannot be loaded: {error}") from error
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: t.Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            word = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(word))
            raise CudaError(f"{name}: {(word.value or b'?').decode()} ({code})")

    def device(self, bus_id: str) -> int:
        handle = ctypes.c_int()
        self("cuDeviceGetByPCIBusId", ctypes.byref(handle), bus_id.encode())
        return handle.value

    def context(self, device: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
        return handle

    def current(self, context: ctypes.c_void_p) -> None:
        self("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def can_access(self, one: int, other: int) -> bool:
        answer = ctypes.c_int()
        self("cuDeviceCanAccessPeer", ctypes.byref(answer), one, other)
        return bool(answer.value)


def pattern(seed: str, size: int) -> bytes:
    """Bytes that a stale or zeroed buffer does not hold by chance."""
    block = hashlib.shake_256(seed.encode()).digest(4096)
    return (block * (size // len(block) + 1))[:size]


def copy_pair(cuda: Cuda, source: str, target: str, sizes: t.Sequence[int] = SIZES) -> dict[str, t.Any]:
    """Copy from one GPU to another and read it back there. ``status``: ok, wrong_data or no_peer_access."""
    one, other = cuda.device(source), cuda.device(target)
    result: dict[str, t.Any] = {"from": source, "to": target, "status": "ok", "reason": None, "gib_per_s": None}
    if not cuda.can_access(one, other):
        return {**result, "status": "no_peer_access", "reason": "the driver offers no peer access for this pair"}
    here, there = cuda.context(one), cuda.context(other)
    for mine, peer in ((here, there), (there, here)):
        cuda.current(mine)
        code = cuda.library.cuCtxEnablePeerAccess(peer, 0)
        if code not in (0, 704):  # 704: enabled already
            return {**result, "status": "no_peer_access", "reason": f"peer access cannot be enabled (CUDA error {code})"}
    for size in sizes:
        data = pattern(f"{source}>{target}:{size}", size)
        cuda.current(here)
        sent = cuda.allocate(size)
        cuda("cuMemcpyHtoD_v2", sent, data, ctypes.c_size_t(size))
        cuda.current(there)
        got = cuda.allocate(size)
        cuda("cuMemsetD8_v2", got, ctypes.c_ubyte(0xA5), ctypes.c_size_t(size))
        cuda("cuCtxSynchronize")
        began = time.perf_counter()
        cuda("cuMemcpyPeer", got, there, sent, here, ctypes.c_size_t(size))
        cuda.current(here)
        cuda("cuCtxSynchronize")
        cuda.current(there)
        cuda("cuCtxSynchronize")
        seconds = time.perf_counter() - began
        back = ctypes.create_string_buffer(size)
        cuda("cuMemcpyDtoH_v2", back, got, ctypes.c_size_t(size))
        cuda("cuMemFree_v2", got)
        cuda.current(here)
        cuda("cuMemFree_v2", sent)
        if back.raw != data:
            wrong = sum(1 for a, b in zip(back.raw, data) if a != b)
            return {**result, "status": "wrong_data", "reason": f"{wrong} of {size} bytes differ although the copy reported success"}
        result["gib_per_s"] = round(size / seconds / (1 << 30), 1)
    return result


def probe(
    pairs: t.Sequence[tuple[str, str]],
    limit: float,
    make: t.Callable[[], t.Any] = Cuda,
    copy: t.Callable[[t.Any, str, str], dict[str, t.Any]] = copy_pair,
) -> dict[str, t.Any]:
    """Try each pair of bus ids in a child process. ``ran`` is False, with the reason, where CUDA cannot be used at all.

    A pair that takes longer than the limit is ``timeout``; the pairs behind it are ``not_tried``.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.close(reading)
            with os.fdopen(writing, "w", buffering=1, encoding="utf-8") as out:
                try:
                    cuda = make()
                    out.write(json.dumps({"ready": True}) + "\n")
                    for source, target in pairs:
                        out.write(json.dumps({"start": [source, target]}) + "\n")
                        try:
                            out.write(json.dumps({"done": copy(cuda, source, target)}) + "\n")
                        except CudaError as error:
                            out.write(
                                json.dumps(
                                    {"done": {"from": source, "to": target, "status": "error", "reason": str(error), "gib_per_s": None}}
                                )
                                + "\n"
                            )
                except CudaError as error:
                    out.write(json.dumps({"refused": str(error)}) + "\n")
        except BaseException:  # the parent sees the pipe end
            code = 1
        os._exit(code)
    os.close(writing)
    text, end, late = b"", time.monotonic() + limit, False
    try:
        while True:
            ready, _w, _x = select.select([reading], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                late = True
                os.kill(child, signal.SIGKILL)
                break
            part = os.read(reading, 65536)
            if not part:
                break
            text += part
            end = time.monotonic() + limit
    finally:
        os.close(reading)
        if late:
            end = time.monotonic() + 2
            while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < end:
                time.sleep(0.05)  # one that hangs in the kernel is left alone
        else:
            os.waitpid(child, 0)
    return _result(text.decode("utf-8", "replace"), pairs, limit, late)


def _result(text: str, pairs: t.Sequence[tuple[str, str]], limit: float, late: bool) -> dict[str, t.Any]:
    done: dict[tuple[str, str], dict[str, t.Any]] = {}
    started, ready = None, False
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if "refused" in said:
            return {"ran": False, "reason": said["refused"], "pairs": []}
        ready = ready or "ready" in said
        if "start" in said:
            started = tuple(said["start"])
        if "done" in said:
            done[(said["done"]["from"], said["done"]["to"])] = said["done"]
    if not ready:
        return {
            "ran": False,
            "reason": f"CUDA did not start within {limit:g} s" if late else "the process that asked CUDA ended",
            "pairs": [],
        }
    rows = []
    for source, target in pairs:
        if (source, target) in done:
            rows.append(done[(source, target)])
        elif (source, target) == started:
            rows.append(
                {
                    "from": source,
                    "to": target,
                    "status": "timeout" if late else "error",
                    "gib_per_s": None,
                    "reason": f"no end within {limit:g} s; the GPUs may have to be reset" if late else "the process ended in the copy",
                }
            )
        else:
            rows.append({"from": source, "to": target, "status": "not_tried", "reason": "a pair before it did not end", "gib_per_s": None})
    return {"ran": True, "reason": None, "pairs": rows}
