# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel of dsv4_sm120; needs Python 3.10 or newer, g++ and nvcc 13.0 or newer, nothing else.

    python3 build_wheel.py --out DIR --arch sm_120a [--arch sm_90] [--nvcc PATH] [--cxx PATH]

Each folder of src/dsv4_sm120 with a kernel*.cu becomes one shared library with a plain C boundary, so one build serves
every PyTorch and Python version, and a library that fails to load takes no other down. The same inputs give the same
wheel, byte for byte. As a PEP 517 backend (`pip wheel .`) it reads DSV4_SM120_ARCHS, NVCC and CXX from the environment.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent
PACKAGE = "dsv4_sm120"
SOURCE = ROOT / "src" / PACKAGE
ARCHS = {
    # plain sm_120 lacks block-scaled mma and the ue8m0 conversions
    "sm_120a": "arch=compute_120a,code=sm_120a",
    "sm_90": "arch=compute_90,code=sm_90",
}
MIN_NVCC = (13, 0)
COMPILE_FLAGS = ("-O3", "-std=c++17", "--threads=1", "-Xptxas=-v", "-Xcompiler=-fPIC,-fvisibility=hidden")
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=-s,--build-id=none,--exclude-libs=ALL")
# 1980 is the zip format's first year
TIMESTAMP = (1980, 1, 1, 0, 0, 0)


class BuildError(Exception):
    """A build that cannot go on; the text is for the operator."""


def project_table() -> dict[str, str]:
    """Returns name, version and summary from pyproject.toml (Python 3.10 has no tomllib)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[project]", 1)[1].split("\n[", 1)[0]
    return dict(re.findall(r'^(\w[\w-]*) = "([^"]*)"$', table, re.MULTILINE))


def kernel_folders() -> list[pathlib.Path]:
    """Returns the folders that hold at least one kernel*.cu, sorted by name."""
    return sorted({path.parent for path in SOURCE.glob("*/kernel*.cu")})


def is_test(path: pathlib.Path) -> bool:
    """Says whether a source is used by tests and benchmarks alone and stays out of the wheel."""
    return path.name.startswith(("test_", "conftest")) or path.name == "bench.py" or path.suffix == ".md"


def sources() -> list[pathlib.Path]:
    """Returns every file that can change what the wheel does, sorted."""
    found = [
        path
        for path in SOURCE.rglob("*")
        if path.is_file()
        and path.suffix in (".py", ".cu", ".cuh", ".json")
        and not is_test(path)
        and "__pycache__" not in path.parts
        and "lib" not in path.relative_to(SOURCE).parts[:1]
    ]
    found += [ROOT / "pyproject.toml", ROOT / "build_wheel.py", ROOT / "LICENSE"]
    return sorted(found, key=lambda path: path.relative_to(ROOT).as_posix())


def source_hash(archs: list[str]) -> str:
    """Returns 16 hex digits over the sources and the architectures: the name of a build."""
    digest = hashlib.sha256("\0".join(sorted(archs)).encode())
    for path in sources():
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def find_nvcc(given: str | None) -> pathlib.Path:
    """Returns nvcc: the one given, $CUDA_HOME's, the one of the running Python's PyPI packages, or PATH's.

    Raises BuildError when there is none.
    """
    candidates = [given] if given else []
    if not given:
        home = os.environ.get("CUDA_HOME")
        candidates += [f"{home}/bin/nvcc"] if home else []
        candidates += [f"{entry}/nvidia/cu13/bin/nvcc" for entry in sys.path if entry.endswith("-packages")]
        candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return pathlib.Path(candidate)
    raise BuildError("no nvcc found: pass --nvcc, set CUDA_HOME, or install nvidia-cuda-nvcc and its companions")


def nvcc_version(nvcc: pathlib.Path) -> str:
    """Returns e.g. '13.0.88'; raises BuildError when nvcc does not answer or is too old."""
    try:
        text = subprocess.run([str(nvcc), "--version"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{nvcc} does not run: {error}") from error
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
    if not match:
        raise BuildError(f"{nvcc} printed no version")
    if (int(match[1]), int(match[2])) < MIN_NVCC:
        raise BuildError(f"nvcc {match[0][1:]} is older than {MIN_NVCC[0]}.{MIN_NVCC[1]}, the first that is tried here")
    return match[0][1:]


def toolkit_flags(nvcc: pathlib.Path) -> list[str]:
    """Returns the extra flags that nvcc needs when it comes from PyPI packages (they have lib, not lib64)."""
    home = nvcc.resolve().parent.parent
    if (home / "lib").is_dir() and not (home / "lib64").is_dir() and not (home / "targets").is_dir():
        return [f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    return []


@contextlib.contextmanager
def build_folder(name: str):
    """Yields a new folder to compile in, removed afterwards; always the same one unless somebody builds there already.

    nvcc marks names without external linkage with a hash of the source's absolute path.
    """
    fixed = pathlib.Path(tempfile.gettempdir()) / f"dsv4-sm120-{os.getuid()}-{name}"
    try:
        fixed.mkdir(mode=0o700)
    except FileExistsError:
        fixed = pathlib.Path(tempfile.mkdtemp(prefix="dsv4-sm120-"))
    try:
        yield fixed
    finally:
        shutil.rmtree(fixed, ignore_errors=True)


def compile_folder(
    folder: pathlib.Path, out: pathlib.Path, archs: list[str], nvcc: pathlib.Path, cxx: str | None
) -> tuple[pathlib.Path, str]:
    """Compiles one kernel folder to out/_dsv4_<folder>.so; returns the library and the compiler's report.

    Raises BuildError with the compiler's output when it fails.
    """
    with build_folder(folder.name) as work:
        tree = work / "src"
        shutil.copytree(SOURCE / "csrc", tree / "csrc")
        shutil.copytree(folder, tree / folder.name, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
        (tree / folder.name / "keep").mkdir()
        library = out / f"_dsv4_{folder.name}.so"
        units = sorted(path.name for path in (tree / folder.name).glob("kernel*.cu"))
        report, objects = "", []
        common = [*COMPILE_FLAGS, *toolkit_flags(nvcc), "-I../csrc/common"]
        common += ["-ccbin", cxx] if cxx else []
        for arch in archs:
            common += ["-gencode", ARCHS[arch]]
        commands = []
        for unit in units:
            objects.append(f"{unit[:-3]}.o")
            # kept intermediate files have fixed names, which are part of the hash too
            commands.append([str(nvcc), *common, "--keep", "--keep-dir=keep", "-c", unit, "-o", objects[-1]])
        link = [str(nvcc), *LINK_FLAGS, *toolkit_flags(nvcc), *(["-ccbin", cxx] if cxx else [])]
        for arch in archs:
            link += ["-gencode", ARCHS[arch]]
        commands.append([*link, *objects, "-o", str(library)])
        for command in commands:
            done = subprocess.run(command, cwd=tree / folder.name, capture_output=True, text=True, check=False)
            report += done.stdout + done.stderr
            if done.returncode:
                raise BuildError(f"{folder.name}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return library, report


def compile_all(
    out: pathlib.Path, archs: list[str], nvcc: pathlib.Path, cxx: str | None, jobs: int | None = None
) -> dict[str, tuple[pathlib.Path, str]]:
    """Compiles every kernel folder, several at once; returns {folder: (library, report)}."""
    out.mkdir(parents=True, exist_ok=True)
    folders = kernel_folders()
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        built = pool.map(lambda folder: compile_folder(folder, out, archs, nvcc, cxx), folders)
        return {folder.name: result for folder, result in zip(folders, built)}


def local_version(archs: list[str]) -> str:
    """Returns the version with the architectures as its local part, e.g. '0.1.0+sm90.sm120a'."""
    named = sorted((arch.replace("_", "") for arch in archs), key=lambda arch: int(re.sub(r"\D", "", arch)))
    return f"{project_table()['version']}+{'.'.join(named)}"


def metadata(version: str) -> str:
    """Returns the METADATA file."""
    table = project_table()
    return (
        "Metadata-Version: 2.4\n"
        f"Name: {table['name']}\nVersion: {version}\nSummary: {table['description']}\n"
        f"License-Expression: {table['license']}\nLicense-File: LICENSE\n"
        f"Requires-Python: {table['requires-python']}\nDescription-Content-Type: text/markdown\n\n"
        + (ROOT / "README.md").read_text(encoding="utf-8")
    )


def entry_points() -> str:
    """Returns entry_points.txt from pyproject.toml's two tables."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    parts = []
    for heading, group in (
        ('[project.entry-points."sglang.srt.plugins"]', "sglang.srt.plugins"),
        ("[project.scripts]", "console_scripts"),
    ):
        table = text.split(heading, 1)[1].split("\n[", 1)[0]
        lines = [f"{name} = {value}" for name, value in re.findall(r'^(\w[\w-]*) = "([^"]*)"$', table, re.MULTILINE)]
        parts.append(f"[{group}]\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def write_wheel(out: pathlib.Path, archs: list[str], libraries: dict[str, pathlib.Path], build: dict) -> pathlib.Path:
    """Writes the wheel with sorted members and fixed times; returns its path."""
    version = local_version(archs)
    files: dict[str, bytes] = {}
    for path in SOURCE.rglob("*.py"):
        if not is_test(path) and "__pycache__" not in path.parts:
            files[f"{PACKAGE}/{path.relative_to(SOURCE).as_posix()}"] = path.read_bytes()
    for path in SOURCE.glob("*/*.json"):
        files[f"{PACKAGE}/{path.relative_to(SOURCE).as_posix()}"] = path.read_bytes()
    for library in libraries.values():
        files[f"{PACKAGE}/lib/{library.name}"] = library.read_bytes()
    files[f"{PACKAGE}/lib/build.json"] = (json.dumps(build, indent=1, sort_keys=True) + "\n").encode()
    info = f"{PACKAGE}-{version}.dist-info"
    files[f"{info}/METADATA"] = metadata(version).encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: dsv4-sm120 build_wheel.py\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"
    )
    files[f"{info}/entry_points.txt"] = entry_points().encode()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = f"{info}/RECORD"
    lines = []
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(files[name])}")
    lines.append(f"{record},,")
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{PACKAGE}-{version}-py3-none-linux_x86_64.whl"
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in [*sorted(files.items()), (record, ("\n".join(lines) + "\n").encode())]:
            member = zipfile.ZipInfo(name, TIMESTAMP)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3
            member.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(member, data)
    partial.replace(target)
    return target


def build(out: pathlib.Path, archs: list[str], nvcc: str | None = None, cxx: str | None = None) -> pathlib.Path:
    """Compiles everything for the architectures and writes the wheel into out; returns the wheel's path.

    Raises BuildError for an unknown architecture, a missing or old nvcc and a kernel that does not compile.
    """
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown or not archs:
        raise BuildError(f"unknown architecture {', '.join(unknown) or '(none)'}; known: {', '.join(ARCHS)}")
    archs = sorted(set(archs), key=list(ARCHS).index)
    compiler = find_nvcc(nvcc)
    version = nvcc_version(compiler)
    with tempfile.TemporaryDirectory(prefix="dsv4-out-") as work:
        built = compile_all(pathlib.Path(work), archs, compiler, cxx)
        libraries = {name: library for name, (library, _report) in built.items()}
        record = {
            "schema": 1,
            "version": local_version(archs),
            "source_hash": source_hash(archs),
            "archs": archs,
            "nvcc": version,
            "libraries": {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in libraries.items()},
        }
        return write_wheel(out, archs, libraries, record)


# PEP 517 hooks; the other function names above are free because a frontend calls only these
def get_requires_for_build_wheel(config_settings=None):
    """Returns the packages that a build needs: none."""
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds for DSV4_SM120_ARCHS (default sm_120a) into wheel_directory; returns the file name."""
    archs = os.environ.get("DSV4_SM120_ARCHS", "sm_120a").replace(",", " ").split()
    return build(pathlib.Path(wheel_directory), archs, os.environ.get("NVCC"), os.environ.get("CXX")).name


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="build the dsv4_sm120 wheel", allow_abbrev=False)
    parser.add_argument("--out", type=pathlib.Path, help="folder for the wheel")
    parser.add_argument("--arch", action="append", choices=list(ARCHS), help="repeatable; default sm_120a")
    parser.add_argument("--nvcc")
    parser.add_argument("--cxx")
    parser.add_argument("--print-source-hash", action="store_true", help="print the build's name and stop")
    options = parser.parse_args(argv)
    archs = options.arch or ["sm_120a"]
    if options.print_source_hash:
        print(source_hash(archs))
        return 0
    if options.out is None:
        parser.error("--out is needed")
    start = time.monotonic()
    try:
        wheel = build(options.out, archs, options.nvcc, options.cxx)
    except BuildError as error:
        print(f"build_wheel: {error}", file=sys.stderr)
        return 1
    print(f"{wheel}")
    print(f"built in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
