// SPDX-License-Identifier: Apache-2.0
// Exact selection of the k largest of up to 16,384 values that one block of 1,024 threads holds in registers.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace dsv4 {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;
// values a thread: four vectors of four
constexpr int kVectors = 4;
constexpr int kMaxSelect = kSelectThreads * 4 * kVectors;
constexpr int kBins = 4096;
// past this many values in the threshold bin, ranking all pairs costs more than radix passes
constexpr int kMaxRank = 512;

// Orders as the floats do; -0 equals +0. No number maps to 0, which stands for "no value".
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The high 12 bits of the value rounded to fp16, in order: scores of one row spread over few exponents, and this keeps
// six mantissa bits where the high bits of fp32 would keep three. Never falls as the key rises.
__device__ __forceinline__ uint32_t bin_of(uint32_t key) {
  const uint32_t half = __half_as_ushort(__float2half_rn(value_of(key)));
  return (half & 0x8000u ? ~half & 0xffffu : half | 0x8000u) >> 4;
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
  union {
    uint32_t bins[kBins];
    uint32_t list[kMaxRank + 4];
  };
  uint32_t warp_sums[kSelectWarps];
  uint32_t bin, above, count;  // threshold bin, values above it, values in it
  uint32_t listed;
  uint32_t threshold, equal;
};

struct Threshold {
  uint32_t key;    // of the k-th largest value
  uint32_t equal;  // how many values with just this key belong to the k largest
};

// Finds the bin in which the running count, from the highest bin down, reaches k. Leaves bin, above and count in smem
// for every thread. bins[] must be complete (a barrier passed); width is a multiple of 4, at most kBins.
__device__ __forceinline__ void find_bin(SelectSmem& smem, uint32_t k, int width) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int group = width / 4 - 1 - thread;
  uint4 counts = make_uint4(0, 0, 0, 0);
  if (group >= 0) counts = reinterpret_cast<const uint4*>(smem.bins)[group];
  const uint32_t sum = counts.x + counts.y + counts.z + counts.w;
  const uint32_t inclusive = warp_inclusive_sum(sum);
  if (lane == 31) smem.warp_sums[warp] = inclusive;
  __syncthreads();
  const uint32_t totals = warp_inclusive_sum(smem.warp_sums[lane]);
  const uint32_t before = warp ? __shfl_sync(0xffffffffu, totals, warp - 1) : 0;
  uint32_t above = before + inclusive - sum;
  if (above < k && above + sum >= k) {
    const uint32_t ordered[4] = {counts.w, counts.z, counts.y, counts.x};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (above < k && above + ordered[i] >= k) {
        smem.bin = group * 4 + 3 - i;
        smem.above = above;
        smem.count = ordered[i];
        above += k;  // found: no later bin matches
      }
      above += ordered[i];
    }
    smem.listed = 0;
  }
  __syncthreads();
}

// Returns the k-th largest of all keys in the block and how many of its equals are in. More than k keys are not 0;
// vectors beyond `vectors` (the same in all threads) are not looked at. Ends with a barrier passed.
__device__ __forceinline__ Threshold find_threshold(SelectSmem& smem, const uint32_t (&keys)[4 * kVectors], int vectors,
                                                    uint32_t k) {
  const int thread = threadIdx.x;
  reinterpret_cast<uint4*>(smem.bins)[thread] = make_uint4(0, 0, 0, 0);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (j < vectors) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (keys[4 * j + c]) atomicAdd(&smem.bins[bin_of(keys[4 * j + c])], 1u);
    }
  }
  __syncthreads();
  find_bin(smem, k, kBins);
  const uint32_t bin = smem.bin, count = smem.count;
  uint32_t wanted = k - smem.above;
  if (count <= kMaxRank) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (j < vectors) {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (keys[4 * j + c] && bin_of(keys[4 * j + c]) == bin) smem.list[atomicAdd(&smem.listed, 1u)] = keys[4 * j + c];
      }
    }
    if (thread >= count && thread < count + 4) smem.list[thread] = 0;
    __syncthreads();
    if (thread < count) {
      const uint32_t own = smem.list[thread];
      uint32_t greater = 0, not_less = 0;
      for (uint32_t i = 0; i < count; i += 4) {
        const uint4 other = *reinterpret_cast<const uint4*>(&smem.list[i]);
        greater += (other.x > own) + (other.y > own) + (other.z > own) + (other.w > own);
        not_less += (other.x >= own) + (other.y >= own) + (other.z >= own) + (other.w >= own);
      }
      if (greater < wanted && wanted <= not_less) {  // all threads of that key write the same
        smem.threshold = own;
        smem.equal = wanted - greater;
      }
    }
    __syncthreads();
    return {smem.threshold, smem.equal};
  }
  // Many values share a bin (ties at zero, mostly): exact bytes of the key, from the highest down.
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (thread < 256) smem.bins[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (j < vectors) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const uint32_t key = keys[4 * j + c];
          if (key && (key & mask) == prefix && bin_of(key) == bin) atomicAdd(&smem.bins[(key >> shift) & 255u], 1u);
        }
      }
    }
    __syncthreads();
    find_bin(smem, wanted, 256);
    prefix |= smem.bin << shift;
    mask |= 255u << shift;
    wanted -= smem.above;
    __syncthreads();
  }
  return {prefix, wanted};
}

// Calls emit(position, j, c) for each selected key, positions ascending in element order: warp, then vector, lane and
// component. Values equal to the threshold are taken in that order, so the lower index wins a tie.
template <typename Emit>
__device__ __forceinline__ void emit_selected(SelectSmem& smem, const uint32_t (&keys)[4 * kVectors], int vectors,
                                              Threshold threshold, const Emit& emit) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t greater = 0, equal = 0;  // a byte a vector: at most 128 in a warp
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (j < vectors) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        greater += (keys[4 * j + c] > threshold.key ? 1u : 0u) << (8 * j);
        equal += (keys[4 * j + c] == threshold.key ? 1u : 0u) << (8 * j);
      }
    }
  }
  const uint32_t greater_upto = warp_inclusive_sum(greater), equal_upto = warp_inclusive_sum(equal);
  const uint32_t greater_all = __shfl_sync(0xffffffffu, greater_upto, 31);
  const uint32_t equal_all = __shfl_sync(0xffffffffu, equal_upto, 31);
  if (lane == 0) {
    // sums of the four bytes
    smem.warp_sums[warp] = __dp4a(greater_all, 0x01010101u, 0u) | __dp4a(equal_all, 0x01010101u, 0u) << 16;
  }
  __syncthreads();
  const uint32_t totals = warp_inclusive_sum(smem.warp_sums[lane]);
  const uint32_t before = warp ? __shfl_sync(0xffffffffu, totals, warp - 1) : 0;
  uint32_t greater_base = before & 0xffffu, equal_base = before >> 16;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (j < vectors) {
      uint32_t g = greater_base + ((greater_upto - greater) >> (8 * j) & 255u);
      uint32_t e = equal_base + ((equal_upto - equal) >> (8 * j) & 255u);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const bool is_greater = keys[4 * j + c] > threshold.key, is_equal = keys[4 * j + c] == threshold.key;
        if (is_greater || (is_equal && e < threshold.equal)) emit(g + min(e, threshold.equal), j, c);
        g += is_greater;
        e += is_equal;
      }
      greater_base += greater_all >> (8 * j) & 255u;
      equal_base += equal_all >> (8 * j) & 255u;
    }
  }
}

}  // namespace dsv4
