# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for sm_120a and prints a line each: registers, spills, shared memory, CTAs per SM.

    python3 check_kernels.py [--nvcc PATH] [--cxx PATH] [--arch sm_120a]

Exit status 1 when a kernel spills, needs more than 101,376 B of shared memory a block, cannot run at all with its
threads and registers, or is not declared in its folder's DSV4_KERNELS list; also when it does not compile.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import re
import sys
import tempfile

import build_wheel

MAX_BLOCK_SMEM = 101_376
# per SM: registers, threads, blocks, shared memory; CUDA programming guide, compute capabilities 12.0 and 9.0
SM = {"sm_120a": (65_536, 1536, 24, 102_400), "sm_90": (65_536, 2048, 32, 233_472)}
RESERVED_SMEM = 1024

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse(report: str, arch: str) -> dict[str, dict[str, int]]:
    """Returns {entry: {stack, spill, registers, static_smem}} of one architecture from ptxas -v output; the functions that
    an entry calls are reported after it and count as its own."""
    kernels: dict[str, dict[str, int]] = {}
    current = None
    for line in report.splitlines():
        if match := ENTRY.search(line):
            current = match[1] if match[2] == arch else None
            if current:
                kernels[current] = {"stack": 0, "spill": 0, "registers": 0, "static_smem": 0}
        elif current and (match := SPILLS.search(line)):
            kernels[current]["stack"] = max(kernels[current]["stack"], int(match[1]))
            kernels[current]["spill"] += int(match[2]) + int(match[3])
        elif current and (match := USED.search(line)):
            kernels[current]["registers"] = int(match[1])
            kernels[current]["static_smem"] = int(match[2] or 0)
    return kernels


def ctas_per_sm(arch: str, registers: int, threads: int, smem: int) -> int:
    """Returns how many blocks fit an SM: registers are given out 256 at a time to a warp, shared memory as 128-B units."""
    total_registers, total_threads, total_blocks, total_smem = SM[arch]
    warps = threads // 32
    per_warp = -(-registers * 32 // 256) * 256
    # each of the SM's four schedulers holds a quarter of the registers and of the warps
    by_registers = (total_registers // 4 // per_warp) * 4 // warps if per_warp else total_blocks
    by_smem = total_smem // (-(-(smem + RESERVED_SMEM) // 128) * 128)
    return min(by_registers, total_threads // threads, total_blocks, by_smem)


def limits(library: pathlib.Path) -> list[tuple[str, int, int]]:
    """Returns the library's declared (entry part, threads, dynamic bytes); loading it needs no GPU."""
    loaded = ctypes.CDLL(str(library))
    loaded.dsv4_kernel_limits.restype = ctypes.c_char_p
    rows = (line.split() for line in loaded.dsv4_kernel_limits().decode().splitlines())
    return [(entry, int(threads), int(smem)) for entry, threads, smem in rows]


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="compile the kernels and check their limits", allow_abbrev=False)
    parser.add_argument("--nvcc")
    parser.add_argument("--cxx")
    parser.add_argument("--arch", default="sm_120a", choices=list(SM))
    options = parser.parse_args(argv)
    faults = []
    checked = 0
    try:
        nvcc = build_wheel.find_nvcc(options.nvcc)
        print(f"nvcc {build_wheel.nvcc_version(nvcc)}, {options.arch}")
        with tempfile.TemporaryDirectory(prefix="dsv4-check-") as work:
            built = build_wheel.compile_all(pathlib.Path(work), [options.arch], nvcc, options.cxx)
            declared = {name: limits(library) for name, (library, _report) in built.items()}
    except build_wheel.BuildError as error:
        print(f"check_kernels: {error}", file=sys.stderr)
        return 1
    print(
        f"{'kernel':<44} {'regs':>4} {'spill B':>7} {'stack B':>7} {'smem B':>7} {'dyn B':>7} {'threads':>7} {'CTAs/SM':>7}"
    )
    for folder, (_library, report) in sorted(built.items()):
        unused = {entry for entry, _threads, _smem in declared[folder]}
        for entry, used in sorted(parse(report, options.arch).items()):
            matches = [row for row in declared[folder] if row[0] in entry]
            if len(matches) != 1:
                faults.append(f"{folder}: {entry} has {len(matches)} declarations in DSV4_KERNELS")
                continue
            name, threads, dynamic = matches[0]
            unused.discard(name)
            smem = used["static_smem"] + dynamic
            ctas = ctas_per_sm(options.arch, used["registers"], threads, smem)
            label = f"{folder}/{name}"
            print(
                f"{label:<44} {used['registers']:>4} {used['spill']:>7} {used['stack']:>7} {used['static_smem']:>7} "
                f"{dynamic:>7} {threads:>7} {ctas:>7}"
            )
            checked += 1
            if used["spill"]:
                faults.append(f"{label} spills {used['spill']} bytes")
            if smem > MAX_BLOCK_SMEM:
                faults.append(f"{label} needs {smem} B of shared memory, {MAX_BLOCK_SMEM} is the most")
            if ctas < 1:
                faults.append(f"{label} cannot run: {used['registers']} registers x {threads} threads, {smem} B")
        faults += [f"{folder}: {entry} is declared and was not compiled" for entry in sorted(unused)]
    for fault in faults:
        print(f"FAIL {fault}", file=sys.stderr)
    print(f"{checked} kernels, {len(faults)} faults")
    return 1 if faults or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
