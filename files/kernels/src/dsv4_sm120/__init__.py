# SPDX-License-Identifier: Apache-2.0
"""Decode kernels for DeepSeek-V4 on sm_120. Importing this needs neither PyTorch nor a GPU."""

from __future__ import annotations

import json

from . import _lib


def build_info() -> dict:
    """Returns what the wheel was built from: version, source_hash, archs, nvcc, libraries.

    A source tree that was never built into a wheel answers with source_hash 'unbuilt' and no libraries.
    """
    try:
        return json.loads((_lib.folder() / "build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"schema": 1, "version": "0", "source_hash": "unbuilt", "archs": [], "nvcc": "", "libraries": {}}
