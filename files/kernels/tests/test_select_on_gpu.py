# SPDX-License-Identifier: Apache-2.0
"""selftest and select on the GPU at hand, as a host runs them: right kernels pass, broken ones are refused, the faster one is
picked in every cell, and a slowed kernel is not picked any more.

    DSV4_SM120_LIB=DIR [DSV4_SM120_PEERS=DIR] python3 -m pytest -m gpu tests/test_select_on_gpu.py

Needs nvcc, to compile the broken kernels. Takes about two minutes on an H200.
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import build_wheel
import pytest

from dsv4_sm120 import _lib, contests

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOYMENT = {
    "schema": 1,
    "context_length": 524288,
    "instances": {
        "decode": {"heads": 16, "max_batch": 64, "kernels": ["topk", "indexer", "indexer_topk", "sparse_mla"]}
    },
}
# What is done to top-k: one row length is copied past the end of its output; every call of 64 rows writes to address 16.
BROKEN = {
    "wrong": ("if (length <= p.k) work.all();", "if (length <= p.k + 1) work.all();"),
    "crash": (
        "  const int lane = threadIdx.x & 31;\n  const int first_length",
        "  if (p.rows == 64) *reinterpret_cast<volatile int*>(16) = 1;\n"
        "  const int lane = threadIdx.x & 31;\n  const int first_length",
    ),
}
SLOW = """
    import importlib.abc, importlib.util, sys

    class Slow(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "dsv4_sm120.topk":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            def exec_module(module):
                run(module)
                launch = module.launch
                def slow(*arguments, **more):
                    import torch
                    torch.cuda._sleep(200_000)
                    launch(*arguments, **more)
                module.launch = slow
            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Slow())
"""


def cli(*words, path=(), **environment):
    """Runs the command; returns its exit status and what it printed."""
    python_path = os.pathsep.join([*map(str, path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-B", "-m", "dsv4_sm120.cli", *map(str, words)],
        env={**os.environ, "PYTHONPATH": python_path, **environment},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    print(done.stderr[-4000:])
    return done.returncode, done.stdout


def compile_broken(name, folder, arch):
    """Compiles the edited top-k beside the other libraries of this build; returns their folder."""
    old, new = BROKEN[name]
    out, tree = folder / name, folder / f"{name}-source"
    shutil.copytree(build_wheel.SOURCE / "topk", tree / "topk", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(build_wheel.SOURCE / "csrc", tree / "csrc")
    path = tree / "topk/kernel.cu"
    text = path.read_text()
    assert text.count(old) == 1, f"kernel.cu no longer has what is broken here: {old}"
    path.write_text(text.replace(old, new))
    shutil.copytree(_lib.folder(), out)
    flags = [*build_wheel.COMPILE_FLAGS, "-shared", "-cudart=static", "-gencode", build_wheel.ARCHS[arch]]
    nvcc = build_wheel.find_nvcc(None)
    command = [str(nvcc), *flags, *build_wheel.toolkit_flags(nvcc), f"-I{tree}/csrc/common", str(path)]
    subprocess.run([*command, "-o", str(out / "_dsv4_topk.so")], check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("select")


@pytest.fixture(scope="module")
def broken(folder):
    """{name: future of the folder with the broken library}; compiled while other tests run."""
    import torch

    arch = {(12, 0): "sm_120a", (9, 0): "sm_90"}[torch.cuda.get_device_capability()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield {name: pool.submit(compile_broken, name, folder, arch) for name in BROKEN}


@pytest.fixture(scope="module")
def proved(broken, folder):
    """What `selftest --out` leaves, once it passed."""
    code, text = cli("selftest", "--out", folder / "selftest.json")
    print(text)
    assert code == 0, text
    return folder / "selftest.json"


@pytest.fixture(scope="module")
def record(folder, proved):
    """The record of the whole deployment."""
    (folder / "deployment.json").write_text(json.dumps(DEPLOYMENT))
    out = folder / "selection.json"
    code, text = cli("select", "--topology", folder / "deployment.json", "--selftest", proved, "--out", out)
    print(text)
    assert code == 0, text
    return json.loads(out.read_text())


def test_every_kernel_is_right(proved):
    found = {name: entry["status"] for name, entry in json.loads(proved.read_text())["operations"].items()}
    assert {name for name, status in found.items() if status == "pass"} == set(contests.modules())


def test_the_faster_one_is_picked_in_every_cell(record):
    assert record["state"] == "complete"
    import torch

    from dsv4_sm120 import _torch

    arch = _torch.capability(torch.cuda.current_device())
    decided = 0
    for operation, cells in record["details"]["cells"].items():
        rivals = contests.contest(operation).rivals[arch]
        for cell in cells:
            medians = cell["median_us"]
            assert cell["winner"] != "none" and rivals[0] in medians, cell
            fastest = min(medians[name] for name in rivals if name in medians)
            faster = "ours" if medians["ours"] < fastest else "stock"
            assert cell["winner"] in (faster, "tie"), (operation, cell)
            decided += cell["winner"] != "tie"
    assert decided


def test_a_slowed_kernel_is_not_picked(record, proved, folder):
    if record["operations"]["topk"]["choice"] != "ours":
        pytest.skip("top-k is not the faster one here to begin with")
    (folder / "slow").mkdir()
    (folder / "slow/sitecustomize.py").write_text(textwrap.dedent(SLOW))
    out = folder / "slowed.json"
    words = ("--topology", folder / "deployment.json", "--selftest", proved, "--operations", "topk")
    assert cli("select", *words, "--out", out, path=[folder / "slow"])[0] == 0
    slowed = json.loads(out.read_text())["operations"]["topk"]
    assert (slowed["choice"], slowed["rows"], slowed["selftest"]) == ("stock", {}, "pass")


@pytest.mark.parametrize(("name", "words"), [("wrong", "h19 length 513"), ("crash", "64 rows: AcceleratorError")])
def test_a_broken_kernel_is_refused(broken, name, words):
    code, text = cli("selftest", "--operations", "topk", DSV4_SM120_LIB=str(broken[name].result()))
    print(text)
    assert code == 1 and "topk       fail" in text and words in text


def test_select_leaves_a_broken_kernel_out_and_chooses_among_the_others(broken, folder, record):
    small = DEPLOYMENT | {"context_length": 8192}
    (folder / "small.json").write_text(json.dumps(small))
    out = folder / "broken.json"
    words = ("--topology", folder / "small.json", "--operations", "topk,sparse_mla", "--out", out)
    assert cli("select", *words, DSV4_SM120_LIB=str(broken["crash"].result()))[0] == 0
    found = json.loads(out.read_text())["operations"]
    assert (found["topk"]["choice"], found["topk"]["selftest"]) == ("stock", "fail")
    assert found["sparse_mla"]["selftest"] == "pass" and found["sparse_mla"]["choice"] == record["operations"]["sparse_mla"]["choice"]
