# SPDX-License-Identifier: Apache-2.0
"""The wheel and the checker of kernel limits."""

import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import build_wheel
import check_kernels
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
needs_nvcc = pytest.mark.skipif(not (shutil.which("nvcc") and shutil.which("g++")), reason="no nvcc or no g++")


def write(tmp_path, libraries=None):
    library = tmp_path / "_dsv4_topk.so"
    library.write_bytes(b"not really a library")
    return build_wheel.write_wheel(tmp_path / "out", ["sm_120a"], libraries or {"topk": library}, {"schema": 1})


def test_the_wheel_names_its_architectures(tmp_path):
    assert write(tmp_path).name == "dsv4_sm120-0.1.0+sm120a-py3-none-linux_x86_64.whl"
    assert build_wheel.local_version(["sm_120a", "sm_90"]) == "0.1.0+sm90.sm120a"


def test_the_same_inputs_give_the_same_wheel(tmp_path):
    first = write(tmp_path).read_bytes()
    for path in build_wheel.SOURCE.glob("*.py"):
        path.touch()
    assert write(tmp_path).read_bytes() == first


def test_the_wheel_holds_no_tests_and_lists_all_members(tmp_path):
    with zipfile.ZipFile(write(tmp_path)) as wheel:
        names = wheel.namelist()
        record = wheel.read(next(n for n in names if n.endswith("RECORD"))).decode()
    assert names == [*sorted(names[:-1]), names[-1]]
    assert not [n for n in names if "test_" in n or n.endswith(("bench.py", ".cu", ".cuh", ".md"))]
    assert "dsv4_sm120/topk/targets.json" in names and "dsv4_sm120/lib/build.json" in names
    assert [line.split(",")[0] for line in record.splitlines()] == names


def test_an_installed_wheel_is_found_by_the_engines_plugin_group(tmp_path):
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, write(tmp_path)],
        check=True,
    )
    script = (
        "from importlib.metadata import entry_points; "
        "found = [e for e in entry_points(group='sglang.srt.plugins') if e.name == 'dsv4_sm120']; "
        "assert callable(found[0].load()); import dsv4_sm120; print(dsv4_sm120.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(site)}, check=True, capture_output=True, text=True
    )
    assert str(site) in done.stdout


def test_the_source_hash_follows_sources_and_architectures_alone(tmp_path, monkeypatch):
    tree = tmp_path / "kernels"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache", "lib"))
    monkeypatch.setattr(build_wheel, "ROOT", tree)
    monkeypatch.setattr(build_wheel, "SOURCE", tree / "src" / "dsv4_sm120")
    first = build_wheel.source_hash(["sm_120a"])
    assert re.fullmatch(r"[0-9a-f]{16}", first) and build_wheel.source_hash(["sm_90"]) != first
    (tree / "src/dsv4_sm120/topk/NOTES.md").write_text("other")
    (tree / "src/dsv4_sm120/topk/test_topk.py").write_text("other")
    assert build_wheel.source_hash(["sm_120a"]) == first
    (tree / "src/dsv4_sm120/csrc/common/abi.cuh").write_text("other")
    assert build_wheel.source_hash(["sm_120a"]) != first


def test_an_unknown_architecture_and_a_missing_compiler_are_clear(tmp_path):
    with pytest.raises(build_wheel.BuildError, match="unknown architecture sm_1; known: sm_120a"):
        build_wheel.build(tmp_path, ["sm_1"])
    with pytest.raises(build_wheel.BuildError, match="no nvcc"):
        build_wheel.build(tmp_path, ["sm_120a"], nvcc=str(tmp_path / "nvcc"))


def test_an_old_compiler_is_refused(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    with pytest.raises(build_wheel.BuildError, match="older than 13.0"):
        build_wheel.nvcc_version(nvcc)


REPORT = """
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90'
ptxas info    : Used 9 registers
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_120a'
ptxas info    : Function properties for _Z5firstv
    64 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 62 registers, used 1 barriers, 45232 bytes smem
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_120a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 154 registers, used 1 barriers
ptxas info    : Function properties for _Z6calledv
    16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
"""


def test_the_compilers_report_is_read():
    found = check_kernels.parse(REPORT, "sm_120a")
    assert found["_Z5firstv"] == {"stack": 64, "spill": 12, "registers": 62, "static_smem": 45232}
    # what it calls is reported after it
    assert found["_Z6secondv"] == {"stack": 16, "spill": 44, "registers": 154, "static_smem": 0}


@pytest.mark.parametrize(
    ("registers", "threads", "smem", "ctas"),
    [
        (64, 1024, 0, 1),
        (32, 1024, 0, 1),
        (32, 512, 0, 3),
        (128, 256, 0, 2),
        (168, 128, 50_176, 2),
        (168, 128, 50_177, 1),
        (255, 512, 0, 0),
        (16, 32, 0, 24),
        (16, 32, 101_376, 1),
    ],
)
def test_ctas_per_sm(registers, threads, smem, ctas):
    assert check_kernels.ctas_per_sm("sm_120a", registers, threads, smem) == ctas


@needs_nvcc
def test_compiling_twice_gives_the_same_library(tmp_path, monkeypatch):
    source = tmp_path / "dsv4_sm120"
    shutil.copytree(build_wheel.SOURCE / "csrc", source / "csrc")
    folder = source / "small"
    folder.mkdir()
    (folder / "kernel.cu").write_text(
        '#include "abi.cuh"\nnamespace {\n__device__ const int step = 2;\n__device__ int count;\n__global__ void small_kernel() { count += step; }\n}\n'
        'DSV4_KERNELS(dsv4::limit<32, 0>("small_kernel"))\n'
        "DSV4_EXPORT void launch() { small_kernel<<<1, 32>>>(); }\n"
    )
    monkeypatch.setattr(build_wheel, "SOURCE", source)
    built = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        library, _report = build_wheel.compile_folder(
            folder, tmp_path / name, ["sm_120a"], build_wheel.find_nvcc(None), None
        )
        built.append(library.read_bytes())
    assert built[0] == built[1]


@needs_nvcc
def test_a_kernel_past_the_limits_does_not_compile(tmp_path, monkeypatch):
    source = tmp_path / "dsv4_sm120"
    shutil.copytree(build_wheel.SOURCE / "csrc", source / "csrc")
    (source / "fat").mkdir()
    (source / "fat/kernel.cu").write_text(
        '#include "abi.cuh"\n__global__ void fat_kernel() {}\nDSV4_KERNELS(dsv4::limit<128, 101377>("fat_kernel"))\n'
    )
    monkeypatch.setattr(build_wheel, "SOURCE", source)
    with pytest.raises(build_wheel.BuildError, match="dynamic shared memory past"):
        build_wheel.compile_folder(source / "fat", tmp_path, ["sm_120a"], build_wheel.find_nvcc(None), None)


@needs_nvcc
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('__global__ void a_kernel() {}\nDSV4_KERNELS(dsv4::limit<128, 0>("other"))\n', "has 0 declarations"),
        (
            "__global__ void a_kernel(int* p) { __shared__ int x[25400]; x[threadIdx.x] = *p; __syncthreads(); *p = x[*p]; }\n"
            'DSV4_KERNELS(dsv4::limit<128, 0>("a_kernel"))\n',
            "uses too much shared data",
        ),
        (
            "__global__ void a_kernel(int* p) { __shared__ int x[10000]; x[threadIdx.x] = *p; __syncthreads(); *p = x[*p]; }\n"
            'DSV4_KERNELS(dsv4::limit<128, 70000>("a_kernel"))\n',
            "101376 is the most",
        ),
    ],
)
def test_the_checker_fails_past_the_limits(tmp_path, monkeypatch, capsys, text, message):
    source = tmp_path / "dsv4_sm120"
    shutil.copytree(build_wheel.SOURCE / "csrc", source / "csrc")
    (source / "a").mkdir()
    (source / "a/kernel.cu").write_text('#include "abi.cuh"\n' + text)
    monkeypatch.setattr(build_wheel, "SOURCE", source)
    assert check_kernels.main([]) == 1
    assert message in capsys.readouterr().err
