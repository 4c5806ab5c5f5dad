// SPDX-License-Identifier: Apache-2.0
// In place of csrc/common/ptx.cuh: what its instructions do.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define DSV4_SHARED_MEMORY(Smem, name)               \
  static_assert(sizeof(Smem) <= sizeof(emulator::smem)); \
  Smem& name = *reinterpret_cast<Smem*>(emulator::smem)

namespace dsv4 {

inline void prefetch(const void*) {}
inline void copy_async4(void* to, const void* from) { std::memcpy(to, from, 4); }
inline void copy_async16(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void copies_arrived() {}
inline void commit_copies() {}
template <int>
inline void committed_copies_arrived() {}
inline void launch_dependents() {}
inline void wait_for_primary() {}
inline unsigned int arrive(unsigned int* counter) { return (*counter)++; }

inline float float_of_e4m3(unsigned byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float size = (byte & 127) == 127 ? NAN
                     : exponent          ? std::ldexp(8.0f + mantissa, exponent - 10)
                                         : std::ldexp(static_cast<float>(mantissa), -9);
  return byte & 128 ? -size : size;
}

// every e4m3 value is an fp16 value
inline uint32_t halves_of_low_e4m3(uint32_t four_fp8) {
  uint32_t halves = 0;
  for (int i = 0; i < 2; ++i)
    halves |= static_cast<uint32_t>(__half_as_ushort(__float2half_rz(float_of_e4m3(four_fp8 >> 8 * i & 255)))) << 16 * i;
  return halves;
}

inline uint32_t halves_of_high_e4m3(uint32_t four_fp8) { return halves_of_low_e4m3(four_fp8 >> 16); }
inline uint32_t halves(float low, float high) {
  return __half_as_ushort(__float2half_rn(low)) | static_cast<uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
}
inline uint32_t relu_halves(float low, float high) { return halves(low < 0 ? 0 : low, high < 0 ? 0 : high); }
inline float low_half(uint32_t both) { return __half2float(__ushort_as_half(both & 0xffff)); }
inline float high_half(uint32_t both) { return low_half(both >> 16); }
// rounds twice where the product has more than 24 bits; operands of few do not
inline uint32_t multiply_halves(uint32_t a, uint32_t b) { return halves(low_half(a) * low_half(b), high_half(a) * high_half(b)); }

// The fragments of mma.m16n8k* as the PTX ISA lays them out: thread 4g + t has of A the rows g and g + 8, of B the column
// g, of the result the columns 2t and 2t + 1; the t-th 4 bytes of each half of k.
template <class Value>
inline void emulated_mma(float (&acc)[4], const uint32_t (&a)[4], uint2 b, int values, Value value) {
  struct Fragment {
    uint32_t a[4], b[2];
  };
  static Fragment given[32][2][32];
  auto& warp = emulator::warps[emulator::running->thread / 32];
  auto& all = given[emulator::running->thread / 32][warp.turn & 1];
  all[emulator::lane()] = {{a[0], a[1], a[2], a[3]}, {b.x, b.y}};
  emulator::exchange(0);
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 2; ++half)
      for (int q = 0; q < 4; ++q)
        for (int j = 0; j < values; ++j)
          acc[i] += value(all[4 * g + q].a[2 * half + i / 2], j) * value(all[4 * (2 * t + i % 2) + q].b[half], j);
}

inline void multiply_f16(float (&acc)[4], const uint32_t (&a)[4], uint2 b) {
  emulated_mma(acc, a, b, 2, [](uint32_t word, int i) { return __half2float(__ushort_as_half(word >> 16 * i & 0xffff)); });
}

inline void multiply_e4m3(float (&acc)[4], const uint32_t (&a)[4], uint2 b) {
  emulated_mma(acc, a, b, 4, [](uint32_t word, int i) { return float_of_e4m3(word >> 8 * i & 255); });
}

}  // namespace dsv4
