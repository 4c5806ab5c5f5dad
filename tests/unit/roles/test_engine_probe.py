# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine's environment is refused where it could not compile its kernels."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

PROBE = Path(__file__).resolve().parents[3] / "roles/sglang_runtime/files/engine_probe.py"


@pytest.fixture(name="probe")
def _probe(tmp_path):
    """A virtual environment with a stand-in for sglang, and the probe's run in it."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "sglang").mkdir()
    (site / "sglang/__init__.py").touch()
    (site / "sglang-0.5.23.dist-info").mkdir()
    (site / "sglang-0.5.23.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n", encoding="utf-8")
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(torch=True, ninja=True, compilers=("gcc", "c++")):
        if torch:
            (site / "torch.py").write_text("__version__ = '2.14.1'\nclass _C:\n    _cuda_getArchFlags = staticmethod(lambda: 'sm_90 sm_120')\n",
                                           encoding="utf-8")
        if ninja:
            (folder / "bin/ninja").touch()
        for name in compilers:
            (programs / name).touch(mode=0o755)
        return subprocess.run([str(folder / "bin/python"), str(PROBE)], env={"PATH": str(programs)}, capture_output=True, text=True, check=False)

    return run


def test_a_whole_environment_passes(probe):
    include = Path(sys.base_prefix) / f"include/python3.{sys.version_info.minor}/Python.h"
    if not include.exists():
        pytest.skip("this Python has no headers")
    done = probe()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"arch_list": ["sm_90", "sm_120"], "sglang": "0.5.23", "torch": "2.14.1"}


@pytest.mark.parametrize("lacks,word", [({"compilers": ("gcc",)}, "c++"), ({"compilers": ("c++",)}, "gcc"), ({"ninja": False}, "ninja")])
def test_what_is_missing_is_named(probe, lacks, word):
    done = probe(**lacks)
    assert done.returncode != 0
    assert "cannot compile its kernels" in done.stderr and word in done.stderr.rsplit("without", 1)[1]


def test_an_engine_without_torch_compiles_nothing(probe):
    assert probe(torch=False, ninja=False, compilers=()).returncode == 0
