# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled kernels: one shared library per kernel folder, called through ctypes.

The boundary is plain C (pointers, sizes and the stream as integers), so one build serves every PyTorch. Each exported
function returns 0, a CUDA error (> 0), or one of the negative codes below.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

LIBRARY_FOLDER = pathlib.Path(__file__).with_name("lib")
# must equal DSV4_ABI in csrc/common/abi.cuh
ABI = 1
CODES = {-1: "an argument is out of the range that the kernel was made for", -2: "no code for this GPU in the library"}


class KernelError(RuntimeError):
    """A kernel's library is missing, of another build, or a launch was refused."""


def folder() -> pathlib.Path:
    """Returns where the libraries lie; DSV4_SM120_LIB overrides it for a source tree."""
    return pathlib.Path(os.environ.get("DSV4_SM120_LIB") or LIBRARY_FOLDER)


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """Returns the library of one kernel folder.

    Loading initialises no CUDA context. Raises KernelError when the file is missing, does not load or has another ABI.
    """
    path = folder() / f"_dsv4_{name}.so"
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        raise KernelError(f"{path.name} does not load: {error}") from error
    library.dsv4_error_string.restype = ctypes.c_char_p
    library.dsv4_error_string.argtypes = [ctypes.c_int]
    library.dsv4_kernel_limits.restype = ctypes.c_char_p
    found = library.dsv4_abi()
    if found != ABI:
        raise KernelError(f"{path.name} has ABI {found}, this package needs {ABI}")
    return library


def function(library: str, name: str, argtypes: list) -> ctypes._CFuncPtr:
    """Returns one exported function with its argument types set; it returns an int."""
    found = getattr(load(library), name)
    found.argtypes = argtypes
    found.restype = ctypes.c_int
    return found


def check(library: str, what: str, code: int) -> None:
    """Raises KernelError when a call's return code is not 0."""
    if code == 0:
        return
    if code < 0:
        raise KernelError(f"{what}: {CODES.get(code, 'code %d' % code)}")
    raise KernelError(f"{what}: CUDA error {code}: {load(library).dsv4_error_string(code).decode()}")
