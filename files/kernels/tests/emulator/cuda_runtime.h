// SPDX-License-Identifier: Apache-2.0
// In place of CUDA's header: runs a kernel's own text on the CPU, a block after the other, each thread a fiber that runs
// until it has to wait for its warp or block. Finds wrong results and barriers that not all threads reach; finds no races
// and no timing. Include path: this folder before csrc/common.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __grid_constant__

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct int3 { int x, y, z; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x;
  explicit dim3(unsigned x = 1) : x(x) {}
};
inline dim3 blockIdx, gridDim;

namespace emulator {

// Saves the running stack at *save and goes on with the one at `to`.
extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.text
.weak emulator_switch
emulator_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

struct Fiber {
  void* stack_pointer;
  int thread;
  bool done;
  std::unique_ptr<char[]> stack;
};

struct Warp {
  int arrived = 0, turn = 0;
  uint64_t given[2][32];  // turns alternate: nobody is two turns ahead
};

inline Fiber* running;
inline void* scheduler;
inline std::vector<Fiber> fibers;
inline Warp warps[32];
inline int at_barrier, barrier_turn, threads;
alignas(256) inline unsigned char smem[101376];
inline long steps;  // arrivals that let somebody go on

inline void wait() { emulator_switch(&running->stack_pointer, scheduler); }

// What all lanes of the warp give, once all are here.
inline const uint64_t* exchange(uint64_t given) {
  Warp& warp = warps[running->thread / 32];
  const int turn = warp.turn;
  warp.given[turn & 1][running->thread % 32] = given;
  if (++warp.arrived == 32) warp.arrived = 0, ++warp.turn, ++steps;
  else while (warp.turn == turn) wait();
  return warp.given[turn & 1];
}

template <class To, class From>
inline To bits(From from) {
  To to{};
  std::memcpy(&to, &from, std::min(sizeof(to), sizeof(from)));
  return to;
}

template <class T>
inline T lane_value(T value, int lane) { return bits<T>(exchange(bits<uint64_t>(value))[lane]); }

inline int lane() { return running->thread % 32; }

inline void (*entry)();

inline void start() {
  entry();
  running->done = true;
  ++steps;
  for (;;) wait();
}

// Runs one block; false when its threads wait for one another forever.
inline bool run_block() {
  constexpr size_t kStack = 65536;
  fibers.resize(threads);
  for (Warp& warp : warps) warp.arrived = 0;
  at_barrier = 0;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
    fiber.thread = i;
    fiber.done = false;
    const uintptr_t top = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStack) & ~uintptr_t{63};
    void** pointer = reinterpret_cast<void**>(top);
    *--pointer = nullptr;  // where start() would return to
    *--pointer = reinterpret_cast<void*>(start);
    for (int saved = 0; saved < 6; ++saved) *--pointer = nullptr;
    fiber.stack_pointer = pointer;
  }
  for (int left = threads; left;) {
    const long before = steps;
    left = 0;
    for (int i = 0; i < threads; ++i) {
      // odd blocks run their threads backwards
      running = &fibers[blockIdx.x & 1 ? threads - 1 - i : i];
      if (running->done) continue;
      emulator_switch(&scheduler, running->stack_pointer);
      left += !running->done;
    }
    if (left && steps == before) {
      std::fprintf(stderr, "emulator: block %u: %d threads wait forever\n", blockIdx.x, left);
      return false;
    }
  }
  return true;
}

}  // namespace emulator

inline struct {
  struct {
    operator int() const { return emulator::running->thread; }
  } x;
} threadIdx;

inline void __syncthreads() {
  const int turn = emulator::barrier_turn;
  if (++emulator::at_barrier == emulator::threads) emulator::at_barrier = 0, ++emulator::barrier_turn, ++emulator::steps;
  else while (emulator::barrier_turn == turn) emulator::wait();
}
inline void __syncwarp() { emulator::exchange(0); }
template <class T>
inline T __shfl_sync(unsigned, T value, int lane) { return emulator::lane_value(value, lane & 31); }
template <class T>
inline T __shfl_up_sync(unsigned, T value, int by) {
  const int from = emulator::lane() - by;
  return emulator::lane_value(value, from < 0 ? emulator::lane() : from);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) { return emulator::lane_value(value, emulator::lane() ^ mask); }
inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* given = emulator::exchange(vote);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= static_cast<unsigned>(given[i]) << i;
  return votes;
}
template <class T, class Combine>
inline T emulated_reduction(T value, Combine combine) {
  const uint64_t* given = emulator::exchange(emulator::bits<uint64_t>(value));
  T result = emulator::bits<T>(given[0]);
  for (int i = 1; i < 32; ++i) result = combine(result, emulator::bits<T>(given[i]));
  return result;
}
template <class T>
inline T __reduce_add_sync(unsigned, T value) { return emulated_reduction(value, [](T a, T b) { return a + b; }); }
template <class T>
inline T __reduce_max_sync(unsigned, T value) { return emulated_reduction(value, [](T a, T b) { return std::max(a, b); }); }
// threads run one at a time
inline unsigned __activemask() { return 1u << emulator::lane(); }
template <class T>
inline unsigned __match_any_sync(unsigned mask, T) { return mask; }
inline unsigned atomicAdd(unsigned* at, unsigned by) { return std::exchange(*at, *at + by); }
inline unsigned atomicOr(unsigned* at, unsigned bits) { return std::exchange(*at, *at | bits); }

template <class T>
inline T __ldg(const T* at) { return *at; }
template <class T>
inline T __ldcg(const T* at) { return *at; }
template <class T>
inline void __stcg(T* at, T value) { *at = value; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline int __float_as_int(float x) { return emulator::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
  return sum;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return std::min<unsigned>(a, b); }

// The launch, as far as the kernels' C functions use it.
using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess = 0, cudaErrorLaunchFailure = 719, cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

template <class Params>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params), const Params& params) {
  static void (*launched)(Params);
  static const Params* given;
  launched = kernel, given = &params;
  emulator::entry = [] { launched(*given); };
  gridDim.x = config->gridDim.x;
  emulator::threads = config->blockDim.x;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    std::memset(emulator::smem, 0x7f, sizeof(emulator::smem));  // nothing may count on zeros
    if (!emulator::run_block()) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}
