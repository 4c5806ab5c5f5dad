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


def variant(extra_k_cache) -> str:
    """Names the kind of layer by what the host can see, the page of its second cache: swa, c4 or c128."""
    if extra_k_cache is None:
        return "swa"
    return {64: "c4", 2: "c128"}.get(extra_k_cache.shape[1], "other")


def around(original, *args, **kwargs):
    """AROUND hook for the engine's flash_mla_with_kvcache_sm120, which is called with keywords alone.

    DSV4_SM120_MLA_MAX_ROWS changes the number of rows up to which this kernel serves.
    """
    rows = None if args else kwargs["q"].shape[0]
    if not operation.enabled(NAME, rows, variant(kwargs.get("extra_k_cache"))):
        return original(*args, **kwargs)
    most = int(os.environ.get("DSV4_SM120_MLA_MAX_ROWS") or MAX_ROWS)
    if args:
        operation.fell_back(NAME, "positional arguments")
    elif rows > most:
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
