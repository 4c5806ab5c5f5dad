# SPDX-License-Identifier: Apache-2.0
"""Sparse-MLA decode in the engine."""

from __future__ import annotations

import os

from .. import _lib, operation, sparse_mla
from ..operation import Operation, Site

TARGET = "sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120"
NAME = "sparse_mla"
# Decode and verify batches; what is larger is a prefill chunk, which the engine has a kernel of its own for and which this
# one was not timed against.
MAX_ROWS = 512


def around(original, *args, **kwargs):
    """AROUND hook for the engine's flash_mla_with_kvcache_sm120, which is called with keywords alone.

    DSV4_SM120_MLA_MAX_ROWS changes the number of rows up to which this kernel serves.
    """
    if not operation.enabled(NAME):
        return original(*args, **kwargs)
    most = int(os.environ.get("DSV4_SM120_MLA_MAX_ROWS") or MAX_ROWS)
    if args:
        operation.fell_back(NAME, "positional arguments")
    elif kwargs["q"].shape[0] > most:
        operation.fell_back(NAME, f"more than {most} rows")
    else:
        try:
            return sparse_mla.flash_mla_with_kvcache_sm120(**kwargs)
        except sparse_mla.Unsupported as reason:
            operation.fell_back(NAME, str(reason))
        except _lib.KernelError as error:
            operation.failed(NAME, error)
    return original(*args, **kwargs)


SITE = Site(TARGET, around)
OPERATIONS = [Operation(NAME, (NAME,), (SITE,))]
