// SPDX-License-Identifier: Apache-2.0
// What every kernel library exports, and the limits that every kernel keeps.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#define DSV4_ABI 1
#define DSV4_EXPORT extern "C" __attribute__((visibility("default")))

namespace dsv4 {

// return codes beside CUDA's own (which are positive); named in _lib.py
constexpr int kBadArgument = -1;
constexpr int kNoCode = -2;

// sm_120: 100 KB of shared memory an SM, 1 KB of it reserved for each block
constexpr int kMaxBlockSmem = 101376;

struct KernelLimit {
  const char* entry;  // a part of the kernel's mangled name that no other kernel has
  int threads;        // per block
  int dynamic_smem;   // bytes per block, the value that the launch passes
};

// Declares a kernel with the same constants that its launch uses; past the limits it does not compile.
template <int kThreads, int kDynamicSmem>
constexpr KernelLimit limit(const char* entry) {
  static_assert(kThreads % 32 == 0 && kThreads > 0 && kThreads <= 1024, "threads per block");
  static_assert(kDynamicSmem >= 0 && kDynamicSmem <= kMaxBlockSmem, "dynamic shared memory past sm_120's limit");
  return {entry, kThreads, kDynamicSmem};
}

}  // namespace dsv4

// One per library. The arguments are dsv4::limit<threads, dynamic bytes>("entry") terms.
#define DSV4_KERNELS(...)                                                                     \
  DSV4_EXPORT int dsv4_abi() { return DSV4_ABI; }                                             \
  DSV4_EXPORT const char* dsv4_error_string(int code) {                                       \
    return cudaGetErrorString(static_cast<cudaError_t>(code));                                \
  }                                                                                           \
  DSV4_EXPORT const char* dsv4_kernel_limits() {                                              \
    static constexpr dsv4::KernelLimit limits[] = {__VA_ARGS__};                              \
    static char text[4096];                                                                   \
    int used = 0;                                                                             \
    for (const dsv4::KernelLimit& l : limits)                                                 \
      used += std::snprintf(text + used, sizeof(text) - used, "%s %d %d\n", l.entry, l.threads, l.dynamic_smem); \
    return text;                                                                              \
  }
