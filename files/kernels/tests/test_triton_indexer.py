# SPDX-License-Identifier: Apache-2.0
"""The Triton contestant under Triton's interpreter, on the CPU, against the float64 reference."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("triton", reason="needs Triton")
ROOT = pathlib.Path(__file__).resolve().parent.parent

SCRIPT = """
import torch, triton_indexer
from dsv4_sm120.indexer import reference
from dsv4_sm120.indexer.test_indexer import make
for lengths, splits in (([1, 64, 65, 200, 0], 2), ([130], 4)):
    case = make(lengths, 256, seed=len(lengths))
    found = triton_indexer.logits(*case, splits=splits)
    expected, magnitudes, _terms = reference.paged_mqa_logits(*case)
    for row, length in enumerate(lengths):
        error = (found[row, :length].double() - expected[row, :length]).abs()
        assert (error <= reference.FP32 * magnitudes[row, :length]).all(), (row, error)
print("right")
"""


def test_the_triton_indexer_agrees_with_the_reference():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr
