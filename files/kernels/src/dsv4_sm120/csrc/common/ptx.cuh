// SPDX-License-Identifier: Apache-2.0
// The PTX that the kernels use, an instruction a function. Nothing else holds PTX, so that the rest of the code also runs
// in the emulator of the tests, which has a header of its own in this one's place.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// Names the block's dynamic shared memory. A macro: through a function the compiler schedules what uses it otherwise.
#define DSV4_SHARED_MEMORY(Smem, name)                     \
  extern __shared__ __align__(16) uint8_t raw_smem[]; \
  Smem& name = *reinterpret_cast<Smem*>(raw_smem)

namespace dsv4 {

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Copies to shared memory; arrived for the copying thread after copies_arrived().
__device__ __forceinline__ void copy_async4(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async16(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for the copies before the last kPending commits.
template <int kPending>
__device__ __forceinline__ void committed_copies_arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A kernel that was launched to start early may start from here on.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits for the end of the kernel that this one was launched to start early behind.
__device__ __forceinline__ void wait_for_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Counts one more at a counter of all blocks and returns the count before; what this thread saw written before is
// seen by whoever counts after it.
__device__ __forceinline__ unsigned int arrive(unsigned int* counter) {
  unsigned int before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The two low fp8 values as fp16.
__device__ __forceinline__ uint32_t halves_of_low_e4m3(uint32_t four_fp8) {
  uint32_t halves;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(halves) : "r"(four_fp8));
  return halves;
}

// The two high fp8 values as fp16.
__device__ __forceinline__ uint32_t halves_of_high_e4m3(uint32_t four_fp8) {
  uint32_t halves;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(halves) : "r"(four_fp8));
  return halves;
}

// Two values rounded to fp16.
__device__ __forceinline__ uint32_t halves(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// The same of max(x, 0).
__device__ __forceinline__ uint32_t relu_halves(float low, float high) {
  uint32_t both;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t both;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}

__device__ __forceinline__ float low_half(uint32_t both) {
  float value;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(both));
  return value;
}

__device__ __forceinline__ float high_half(uint32_t both) { return low_half(both >> 16); }

// acc += a * b for 16 x 16 and 16 x 8 fp16.
__device__ __forceinline__ void multiply_f16(float (&acc)[4], const uint32_t (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// acc += a * b for 16 x 32 and 32 x 8 e4m3; sm_89 and newer, and only sm_120 does it in one instruction.
__device__ __forceinline__ void multiply_e4m3(float (&acc)[4], const uint32_t (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

}  // namespace dsv4
