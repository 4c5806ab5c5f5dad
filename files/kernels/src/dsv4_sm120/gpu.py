# SPDX-License-Identifier: Apache-2.0
"""Asks the driver's libraries for GPUs, without PyTorch and without making a CUDA context."""

from __future__ import annotations

import ctypes

# cuDeviceGetAttribute: compute capability, major and minor
_MAJOR, _MINOR = 75, 76


class NoGpu(RuntimeError):
    """There is no GPU that CUDA could use; the text says why."""


def _cuda(library: ctypes.CDLL, function: str, *arguments) -> None:
    try:
        code = getattr(library, function)(*arguments)
    except AttributeError as error:
        raise NoGpu(f"no CUDA GPU: libcuda.so.1 is not the driver's: it has no {function}") from error
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise NoGpu(f"no CUDA GPU: {function}: {(text.value or b'error %d' % code).decode()}")


def visible() -> list[dict[str, str]]:
    """Returns the GPUs that this process may use as [{name, uuid, capability}]; CUDA_VISIBLE_DEVICES counts.

    Raises NoGpu when there is none.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoGpu(f"no CUDA GPU: {error}") from error
    _cuda(library, "cuInit", 0)
    count = ctypes.c_int()
    _cuda(library, "cuDeviceGetCount", ctypes.byref(count))
    found = []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name, uuid = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
        _cuda(library, "cuDeviceGet", ctypes.byref(device), index)
        _cuda(library, "cuDeviceGetName", name, len(name), device)
        _cuda(library, "cuDeviceGetUuid_v2", uuid, device)
        _cuda(library, "cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
        _cuda(library, "cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
        digits = bytes(uuid).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        found.append(
            {
                "name": name.value.decode(errors="replace"),
                "uuid": "GPU-" + "-".join(parts),
                "capability": f"{major.value}.{minor.value}",
            }
        )
    if not found:
        raise NoGpu("no CUDA GPU: the driver shows this process none")
    return found


def driver() -> str:
    """Returns the driver's version, such as 580.95.05; 'unknown' when its management library does not say."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        version = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(version, len(version)):
            return "unknown"
        return version.value.decode()
    except (OSError, AttributeError):
        return "unknown"
