# SPDX-License-Identifier: Apache-2.0
"""Device memory by the CUDA runtime alone, for programs under compute-sanitizer: PyTorch's allocator would hide what lies
outside an allocation, and uninitialised memory."""

from __future__ import annotations

import ctypes

_TO_DEVICE, _TO_HOST = 1, 2


def must(code: int) -> None:
    """Ends the program when a call failed or a kernel refused."""
    if code:
        raise SystemExit(f"CUDA error or refusal {code}")


class Runtime:
    """libcudart.so at a path."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def malloc(self, size: int) -> int:
        """Returns the address of so many uninitialised bytes."""
        pointer = ctypes.c_void_p()
        must(self._library.cudaMalloc(ctypes.byref(pointer), size))
        return pointer.value

    def upload(self, data: bytes, at: int | None = None) -> int:
        """Copies data to an address, or to memory of its own; returns the address."""
        at = at or self.malloc(len(data))
        must(self._library.cudaMemcpy(at, data, len(data), _TO_DEVICE))
        return at

    def download(self, pointer: int, size: int) -> bytearray:
        """Returns so many bytes."""
        raw = bytearray(size)
        must(self._library.cudaMemcpy((ctypes.c_char * size).from_buffer(raw), pointer, size, _TO_HOST))
        return raw

    def synchronize(self) -> None:
        """Waits for the kernels; ends the program when one failed."""
        must(self._library.cudaDeviceSynchronize())


def ints(values) -> bytes:
    """Returns values as int32."""
    return bytes((ctypes.c_int * len(values))(*values))
