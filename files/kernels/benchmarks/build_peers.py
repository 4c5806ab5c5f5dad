# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels that dsv4_sm120.contestants times, from unpacked wheels, for one architecture.

    python3 build_peers.py --out DIR --sglang DIR [--flashinfer DIR --curand INCLUDE] [--tilelang] [--arch sm_90]

Needs nvcc and g++, and in the running Python apache-tvm-ffi (headers), and for --tilelang also tilelang and torch with
the unpacked SGLang importable: TileLang lowers its kernel without a GPU, nvcc compiles it. Nothing of the peers' text is
kept in this repository.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile

TVM = "#include <tvm/ffi/function.h>\n"
V1 = TVM + (
    "#include <deepseek_v4/topk_v1.cuh>\n"
    "TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_transform, (sglang::TopKKernel<true>::transform));\n"
)
V2 = TVM + (
    "#include <deepseek_v4/topk_v2.cuh>\n"
    "TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_transform_paged, (sglang::TopKKernel<true>::transform_paged));\n"
    "TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_plan, (sglang::TopKKernel<true>::plan));\n"
)
FLASHINFER = """#include "tvm_ffi_utils.h"
using tvm::ffi::Optional;
void radix_topk_page_table_transform(TensorView, TensorView, TensorView, Optional<TensorView>, TensorView,
                                     Optional<TensorView>, int64_t, bool, int64_t, int64_t, bool, Optional<TensorView>,
                                     Optional<TensorView>, Optional<TensorView>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(radix_topk_page_table_transform, radix_topk_page_table_transform);
"""
TILELANG = """
extern "C" __attribute__((visibility("default"))) int tl_launch(const void* q, const void* kv, const void* w,
    const void* lengths, const void* table, void* o, int batch, int width, int pages, void* stream) {
  fp8_paged_mqa_logits_kernel<<<batch * SPLIT, 128, 16640, (cudaStream_t)stream>>>((const uchar*)kv, (float*)o,
      (const int*)table, (const fp8_e4_t*)q, (const int*)lengths, (const float*)w, batch, width, pages);
  return (int)cudaPeekAtLastError();
}
"""


def compile_one(out: pathlib.Path, name: str, text: str, arch: str, extra: list[str]) -> None:
    """Compiles text to out/<name>.so."""
    with tempfile.NamedTemporaryFile("w", suffix=".cu") as source:
        source.write(text)
        source.flush()
        base = ["nvcc", "-shared", "-O3", "-w", "-Xcompiler=-fPIC", "-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        subprocess.run([*base, *extra, source.name, "-o", str(out / f"{name}.so")], check=True)
    print(name)


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="build the kernels that ours are timed against")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--sglang", type=pathlib.Path, required=True, help="folder that holds sglang/")
    parser.add_argument("--flashinfer", type=pathlib.Path, help="folder that holds flashinfer/")
    parser.add_argument("--curand", help="include folder of the cuRAND headers, which FlashInfer wants")
    parser.add_argument("--tilelang", action="store_true")
    parser.add_argument("--arch", default="90", choices=["90", "120a"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    import tvm_ffi

    ffi = pathlib.Path(tvm_ffi.__file__).parent
    common = ["-std=c++20", "--expt-relaxed-constexpr", f"-I{ffi}/include", f"-L{ffi}/lib", "-ltvm_ffi"]
    jit = options.sglang / "sglang/kernels/jit"
    number = int(options.arch.rstrip("a")) * 10
    includes = [f"-I{jit}/include", f"-I{jit}/csrc", f"-DSGL_CUDA_ARCH={number}"]
    compile_one(options.out, "v1", V1, options.arch, [*common, *includes])
    with tempfile.TemporaryDirectory() as overlay:
        # v2 as sm_120 runs it: the cluster paths off
        header = jit / "include/sgl_kernel/deepseek_v4/topk_impl.cuh"
        lines = header.read_text().splitlines()
        lines = ["#define SUPPORT_CLUSTER 0" if x.startswith("#define SUPPORT_CLUSTER") else x for x in lines]
        changed = pathlib.Path(overlay) / "sgl_kernel/deepseek_v4"
        changed.mkdir(parents=True)
        (changed / "topk_impl.cuh").write_text("\n".join(lines) + "\n")
        compile_one(options.out, "v2", V2, options.arch, [f"-I{overlay}", *common, *includes])
    if options.flashinfer:
        data = options.flashinfer / "flashinfer/data"
        extra = [f"-I{data}/csrc", f"-I{data}/include", "-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16"]
        extra += [f"-I{options.curand}"] if options.curand else []
        compile_one(options.out, "fi", FLASHINFER, options.arch, [*common, *extra, str(data / "csrc/topk.cu")])
    if options.tilelang:
        sys.path.insert(0, str(options.sglang))
        import torch
        from tilelang import tvm

        import tilelang
        from sglang.kernels.ops.attention.dsa import tilelang_kernel

        root = pathlib.Path(tilelang.__file__).parent
        arguments = (
            torch.empty(2, 64, 128, dtype=torch.float8_e4m3fn),
            torch.empty(4, 64 * 132, dtype=torch.uint8),
            torch.empty(2, 64),
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, 4, dtype=torch.int32),
            torch.empty(2, 256),
        )
        for split in (256, 64, 16, 4):
            kernel = tilelang_kernel.fp8_paged_mqa_logits_kernel(clear_accum=False, split_kv=split)
            kernel.target = tvm.target.Target({"kind": "cuda", "arch": f"sm_{options.arch.rstrip('a')}"})
            extra = ["-std=c++17", f"-DSPLIT={split}", f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include"]
            target = "90a" if options.arch == "90" else options.arch
            compile_one(options.out, f"tl_{split}", kernel.get_kernel_source(*arguments) + TILELANG, target, extra)
    return 0


if __name__ == "__main__":
    sys.exit(main())
