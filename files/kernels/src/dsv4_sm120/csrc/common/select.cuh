// SPDX-License-Identifier: Apache-2.0
// Pieces for exact selection of the k largest values by one block of 1,024 threads.
//
// The code is kept small on purpose: with a cold cache every 128 bytes of instructions come from device memory, and a
// first version that held everything unrolled spent more time fetching itself than selecting.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace dsv4 {

constexpr int kSelectThreads = 1024;
constexpr int kBins = 4096;
constexpr int kListed = 4096;
// past this many values in the threshold bin, byte-wise passes cost less than ranking all pairs
constexpr int kMaxRank = 512;

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
  uint32_t tied[kMaxRank + 4];
  uint32_t warp_sums[2][32];
  uint32_t bin, above, count;  // threshold bin, values above it, values in it
  uint32_t listed;
  uint32_t threshold, equal;
};

// Exclusive prefix over the block of x and its total; two barriers' worth of buffers alternate by `turn`, so one
// barrier a call is enough.
__device__ __forceinline__ uint32_t block_prefix(SelectSmem& smem, uint32_t x, int turn, uint32_t& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t inclusive = warp_inclusive_sum(x);
  if (lane == 31) smem.warp_sums[turn & 1][warp] = inclusive;
  __syncthreads();
  const uint32_t totals = warp_inclusive_sum(smem.warp_sums[turn & 1][lane]);
  total = __shfl_sync(0xffffffffu, totals, 31);
  const uint32_t before = __shfl_sync(0xffffffffu, totals, warp ? warp - 1 : 0);
  return (warp ? before : 0) + inclusive - x;
}

__device__ __forceinline__ void clear_bins(SelectSmem& smem) {
  reinterpret_cast<uint4*>(smem.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// Finds the bin in which the count, from the highest bin down, reaches k, and clears the bins. The additions to bins[]
// need no barrier before this call. After it bin, above and count are set for all threads; if fewer than k values were
// counted they keep what they were.
__device__ __noinline__ void find_bin(SelectSmem& smem, uint32_t k) {
  __syncthreads();
  const int group = kSelectThreads - 1 - threadIdx.x;
  const uint4 counts = reinterpret_cast<const uint4*>(smem.bins)[group];
  reinterpret_cast<uint4*>(smem.bins)[group] = make_uint4(0, 0, 0, 0);
  const uint32_t sum = counts.x + counts.y + counts.z + counts.w;
  uint32_t total;
  uint32_t above = block_prefix(smem, sum, 0, total);
  if (above < k && above + sum >= k) {
    int bin = group * 4 + 3;
    uint32_t count = counts.w;
    if (above + count < k) above += count, count = counts.z, --bin;
    if (above + count < k) above += count, count = counts.y, --bin;
    if (above + count < k) above += count, count = counts.x, --bin;
    smem.bin = bin;
    smem.above = above;
    smem.count = count;
    smem.listed = 0;
  }
  __syncthreads();
}

// The k-th largest of the `count` listed values (count > k) into smem.threshold, as a key, and into smem.equal how
// many of its equals are among the k. bins[] must be clear, or with `binned` hold just the listed values; they are
// clear afterwards. Ends with a barrier passed.
__device__ __forceinline__ void find_threshold(SelectSmem& smem, int count, uint32_t k, bool binned) {
  if (!binned) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kSelectThreads) atomicAdd(&smem.bins[bin_of(smem.values[i])], 1u);
  }
  find_bin(smem, k);
  const uint32_t bin = smem.bin, in_bin = smem.count;
  uint32_t wanted = k - smem.above;
  if (in_bin <= kMaxRank) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
      const float value = smem.values[i];
      if (bin_of(value) == bin) smem.tied[atomicAdd(&smem.listed, 1u)] = key_of(value);
    }
    if (threadIdx.x < 4) smem.tied[in_bin + threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x < in_bin) {
      const uint32_t own = smem.tied[threadIdx.x];
      uint32_t greater = 0, not_less = 0;
#pragma unroll 1
      for (uint32_t i = 0; i < in_bin; i += 4) {
        const uint4 other = *reinterpret_cast<const uint4*>(&smem.tied[i]);
        greater += (other.x > own) + (other.y > own) + (other.z > own) + (other.w > own);
        not_less += (other.x >= own) + (other.y >= own) + (other.z >= own) + (other.w >= own);
      }
      if (greater < wanted && wanted <= not_less) {  // all threads of that key write the same
        smem.threshold = own;
        smem.equal = wanted - greater;
      }
    }
    __syncthreads();
    return;
  }
  // Many values share a bin (ties, mostly): exact bytes of the key, from the highest down.
  uint32_t prefix = 0, mask = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
      const float value = smem.values[i];
      const uint32_t key = key_of(value);
      if ((key & mask) == prefix && bin_of(value) == bin) atomicAdd(&smem.bins[key >> shift & 255u], 1u);
    }
    find_bin(smem, wanted);
    prefix |= smem.bin << shift;
    mask |= 255u << shift;
    wanted -= smem.above;
    __syncthreads();
  }
  if (threadIdx.x == 0) smem.threshold = prefix, smem.equal = wanted;
  __syncthreads();
}

}  // namespace dsv4
