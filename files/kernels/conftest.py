# SPDX-License-Identifier: Apache-2.0
"""Skips what this machine cannot run, each with its reason."""

import importlib.util
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent
for entry in (ROOT / "src", ROOT):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))
if os.environ.get("DSV4_SM120_SGLANG"):
    sys.path.insert(0, os.environ["DSV4_SM120_SGLANG"])


# the kernel folders' tests compute their references with PyTorch
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["src/*"]


def pytest_report_header(config):
    return "dsv4_sm120: no PyTorch here, tests of the kernel folders are left out" if collect_ignore_glob else None


def gpu_problem() -> str | None:
    """Returns why GPU tests cannot run here, None when they can."""
    if importlib.util.find_spec("torch") is None:
        return "no PyTorch"
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    library = pathlib.Path(os.environ.get("DSV4_SM120_LIB") or ROOT / "src" / "dsv4_sm120" / "lib")
    if not list(library.glob("_dsv4_*.so")):
        return f"no compiled libraries in {library}: set DSV4_SM120_LIB"
    return None


def engine_problem() -> str | None:
    """Returns why tests against the engine's wheel cannot run here, None when they can."""
    if importlib.util.find_spec("sglang") is None:
        return "no sglang: unpack the wheel of 0.5.23 and set DSV4_SM120_SGLANG to the folder"
    return None


def pytest_collection_modifyitems(config, items):
    problems = {"gpu": gpu_problem(), "engine": engine_problem()}
    for item in items:
        for marker, problem in problems.items():
            if problem and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=problem))
