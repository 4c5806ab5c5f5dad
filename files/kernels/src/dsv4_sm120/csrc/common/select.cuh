// SPDX-License-Identifier: Apache-2.0
// Pieces for exact selection of the k largest values by one block of 1,024 threads.
//
// The code is kept short on purpose: with eight warps a scheduler a hundred instructions that all threads execute take
// 0.4 us, as much as several barriers, so what only some warps have to do the others skip.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace dsv4 {

constexpr int kSelectThreads = 1024;
constexpr int kBins = 4096;
constexpr int kListed = 4096;
// past this many values in the threshold bin, byte-wise passes cost less than ranking all pairs
constexpr int kMaxRank = 256;

// Orders as the floats do; -0 equals +0.
__device__ __forceinline__ uint32_t key_of(float x) {
  const int bits = __float_as_int(x + 0.0f);
  return bits ^ (bits >> 31 | 0x80000000);
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key ^ (~static_cast<int>(key) >> 31 | 0x80000000));
}

// The high 12 bits of the value cut to fp16, in order: the scores of a row spread over few exponents, and this keeps six
// mantissa bits where the high bits of fp32 would keep three. Never falls as the value rises.
__device__ __forceinline__ uint32_t bin_of(float x) {
  const int half = static_cast<short>(__half_as_ushort(__float2half_rz(x + 0.0f)));
  return (half ^ (half >> 15 | 0x8000)) >> 4 & 0xfff;
}

// A float that is no greater than any value of the bin or of a higher one.
__device__ __forceinline__ float bin_floor(uint32_t bin) {
  if (bin == 0) return -INFINITY;
  // one step of fp16 lower: negative values were cut upwards
  const int ordered = (bin << 4) - 1;
  return __half2float(__ushort_as_half(ordered & 0x8000 ? ordered ^ 0x8000 : ~ordered & 0xffff));
}

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t x) {
#pragma unroll
  for (int delta = 1; delta < 32; delta *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, x, delta);
    if ((threadIdx.x & 31) >= delta) x += below;
  }
  return x;
}

struct SelectSmem {
  uint32_t bins[kBins];
  float values[kListed];  // the candidates, in index order
  int indices[kListed];
  uint32_t tied[kMaxRank];  // keys in the threshold bin, in index order
  uint32_t chosen[kMaxRank / 32 + 1];  // a bit for each of them
  uint32_t warp_sums[2][32];
  // threshold bin, values above it, values in it; key that the listed values reach. Aligned, as they are read together, and
  // a wide read should not touch warp_sums
  alignas(16) uint32_t bin;
  uint32_t above, count, bound;
};

// Exclusive prefix over the block of x and its total. One barrier, with it what was written before is seen; calls in
// turn take alternating `turn`s.
__device__ __forceinline__ uint32_t block_prefix(SelectSmem& smem, uint32_t x, int turn, uint32_t& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t in_warp = __reduce_add_sync(0xffffffffu, x);
  if (lane == 0) smem.warp_sums[turn & 1][warp] = in_warp;
  __syncthreads();
  const uint32_t sums = smem.warp_sums[turn & 1][lane];
  const uint32_t inclusive = in_warp ? warp_inclusive_sum(x) : 0;
  total = __reduce_add_sync(0xffffffffu, sums);
  return __reduce_add_sync(0xffffffffu, lane < warp ? sums : 0) + inclusive - x;
}

__device__ __forceinline__ void clear_bins(SelectSmem& smem) {
  reinterpret_cast<uint4*>(smem.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// Finds the bin in which the count, from the highest bin down, reaches k, and clears the bins. The additions to bins[]
// need no barrier before this call. After it bin, above and count are set for all threads; if fewer than k values were
// counted they keep what they were.
__device__ __forceinline__ void find_bin_here(SelectSmem& smem, uint32_t k) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncthreads();
  const int group = kSelectThreads - 1 - threadIdx.x;
  const uint4 counts = reinterpret_cast<const uint4*>(smem.bins)[group];
  reinterpret_cast<uint4*>(smem.bins)[group] = make_uint4(0, 0, 0, 0);
  const uint32_t sum = counts.x + counts.y + counts.z + counts.w;
  const uint32_t in_warp = __reduce_add_sync(0xffffffffu, sum);
  if (lane == 0) smem.warp_sums[0][warp] = in_warp;
  __syncthreads();
  const uint32_t sums = smem.warp_sums[0][lane];
  uint32_t above = __reduce_add_sync(0xffffffffu, lane < warp ? sums : 0);
  if (above < k && above + in_warp >= k) {  // one warp
    above += warp_inclusive_sum(sum) - sum;
    if (above < k && above + sum >= k) {
      int bin = group * 4 + 3;
      uint32_t count = counts.w;
      if (above + count < k) above += count, count = counts.z, --bin;
      if (above + count < k) above += count, count = counts.y, --bin;
      if (above + count < k) above += count, count = counts.x, --bin;
      smem.bin = bin;
      smem.above = above;
      smem.count = count;
    }
  }
  __syncthreads();
}

// The same as a call, where its code is not worth another copy.
__device__ __noinline__ void find_bin(SelectSmem& smem, uint32_t k) { find_bin_here(smem, k); }

// Marks in chosen[], which must be clear, the `wanted` largest of tied[]'s `count` keys, of equal ones the first. Ends
// with a barrier passed.
__device__ __forceinline__ void choose_ties(SelectSmem& smem, int count, uint32_t wanted) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int i = threadIdx.x >> 5; i < count; i += kSelectThreads / 32) {
    const uint32_t key = smem.tied[i];
    uint32_t ahead = 0;
#pragma unroll 1
    for (int j = lane; j - lane < count; j += 32) {
      const uint32_t other = j < count ? smem.tied[j] : 0;
      ahead += __popc(__ballot_sync(0xffffffffu, other > key || (other == key && j < i)));
    }
    if (lane == 0 && ahead < wanted) atomicOr(&smem.chosen[i / 32], 1u << (i & 31));
  }
  __syncthreads();
}

}  // namespace dsv4
