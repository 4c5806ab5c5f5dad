// SPDX-License-Identifier: Apache-2.0
// Top-k of each row's actual length, written as page-table-transformed slots in ascending token order.
//
// One launch, work by the lengths that lie on the device: a row of at most 16,384 scores is one unit, selected in
// registers. A longer row is cut into chunks, one unit each; a chunk writes the maximum of every granule of 16 (or 8,
// 32) scores, and whichever block finishes the row's last chunk selects. The k best granules (larger maximum first,
// then lower index) hold the k best scores under the same order: a score outside them has k granules before it, each
// with a score that beats it. So the last block selects k of the maxima, then k of k * granule scores, both in
// registers, whatever the ties are. No block waits for another: no co-residency, no clusters.
#include <algorithm>

#include "abi.cuh"
#include "select.cuh"

namespace dsv4 {
namespace {

constexpr int kMaxScheduledRows = 1024;
constexpr int kPageSlots = 4096;
// launches in flight at once get different counters, as long as there are no more than this
constexpr int kCounterSets = 64;

// Zero when the library is loaded; the block that uses the last count puts zero back.
__device__ unsigned int arrived[kCounterSets * kMaxScheduledRows];

struct TopkParams {
  const float* scores;
  const int* lengths;
  const int* page_table;
  int* slots;
  int* raw;              // may be null
  uint32_t* maxima;      // workspace [rows, maxima_stride] of keys, or the indexer's output
  long long score_stride, table_stride, maxima_stride;
  int rows, k, page_bits, granule_bits, counter_set;
  bool scheduled;  // chunks by length; otherwise one block a row whatever its length
};

struct Smem {
  SelectSmem select;
  int pages[kPageSlots];
  int granules[2048];
  int prefix[kMaxScheduledRows + 1];
  unsigned long long long_total;
  int row, is_last;
};

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ uint32_t load_score(const float* row, int index, int length) {
  return index < length ? key_of(__ldcg(row + index)) : 0u;
}

// Four scores from `index`, a multiple of 4; what lies past the length is never read.
__device__ __forceinline__ uint4 load_four(const float* row, int index, int length) {
  if (index + 4 <= length) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(row + index));
    return make_uint4(key_of(x.x), key_of(x.y), key_of(x.z), key_of(x.w));
  }
  return make_uint4(load_score(row, index, length), load_score(row, index + 1, length),
                    load_score(row, index + 2, length), load_score(row, index + 3, length));
}

__device__ __forceinline__ void prefetch_pages(Smem& smem, const int* table, int pages) {
  for (int i = threadIdx.x; i < min(pages, kPageSlots); i += kSelectThreads) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(&smem.pages[i]));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(table + i) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

struct Writer {
  const TopkParams& p;
  const Smem& smem;
  const int* table;
  long long base;

  __device__ __forceinline__ void operator()(uint32_t position, int index) const {
    const int page = index >> p.page_bits;
    const int physical = page < kPageSlots ? smem.pages[page] : __ldg(table + page);
    p.slots[base + position] = (physical << p.page_bits) | (index & ((1 << p.page_bits) - 1));
    if (p.raw) p.raw[base + position] = index;
  }
};

// Rows of at most k scores: all of them, then -1.
__device__ __forceinline__ void write_identity(const TopkParams& p, int row, int length) {
  const int* table = p.page_table + row * p.table_stride;
  const long long base = static_cast<long long>(row) * p.k;
  for (int i = threadIdx.x; i < p.k; i += kSelectThreads) {
    const bool valid = i < length;
    int slot = -1;
    if (valid) slot = (__ldg(table + (i >> p.page_bits)) << p.page_bits) | (i & ((1 << p.page_bits) - 1));
    p.slots[base + i] = slot;
    if (p.raw) p.raw[base + i] = valid ? i : -1;
  }
}

__device__ __forceinline__ int first_element(int vectors, int j) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  return (warp * vectors + j) * 128 + lane * 4;
}

__device__ void select_short_row(const TopkParams& p, Smem& smem, int row, int length) {
  const float* scores = p.scores + row * p.score_stride;
  const int* table = p.page_table + row * p.table_stride;
  const int vectors = (length + 4 * kSelectThreads - 1) / (4 * kSelectThreads);
  uint32_t keys[4 * kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    uint4 four = make_uint4(0, 0, 0, 0);
    if (j < vectors) four = load_four(scores, first_element(vectors, j), length);
    keys[4 * j] = four.x, keys[4 * j + 1] = four.y, keys[4 * j + 2] = four.z, keys[4 * j + 3] = four.w;
  }
  prefetch_pages(smem, table, (length >> p.page_bits) + 1 - !(length & ((1 << p.page_bits) - 1)));
  const Threshold threshold = find_threshold(smem.select, keys, vectors, p.k);
  asm volatile("cp.async.wait_all;" ::: "memory");
  const Writer write{p, smem, table, static_cast<long long>(row) * p.k};
  emit_selected(smem.select, keys, vectors, threshold,
                [&](uint32_t position, int j, int c) { write(position, first_element(vectors, j) + c); });
}

// The row's granule maxima are in p.maxima.
__device__ void select_long_row(const TopkParams& p, Smem& smem, int row, int length) {
  const float* scores = p.scores + row * p.score_stride;
  const int* table = p.page_table + row * p.table_stride;
  const uint32_t* maxima = p.maxima + row * p.maxima_stride;
  const int granules = (length + (1 << p.granule_bits) - 1) >> p.granule_bits;
  const int granule_mask = (1 << p.granule_bits) - 1;
  prefetch_pages(smem, table, (length >> p.page_bits) + 1 - !(length & ((1 << p.page_bits) - 1)));
  uint32_t keys[4 * kVectors];
  const int chosen = min(granules, p.k);
  if (granules > p.k) {
    const int vectors = (granules + 4 * kSelectThreads - 1) / (4 * kSelectThreads);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) keys[4 * j + c] = 0;
      if (j < vectors) {
        const int first = first_element(vectors, j);
        if (first + 4 <= granules) {
          const uint4 four = __ldcg(reinterpret_cast<const uint4*>(maxima + first));
          keys[4 * j] = four.x, keys[4 * j + 1] = four.y, keys[4 * j + 2] = four.z, keys[4 * j + 3] = four.w;
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (first + c < granules) keys[4 * j + c] = __ldcg(maxima + first + c);
        }
      }
    }
    const Threshold threshold = find_threshold(smem.select, keys, vectors, p.k);
    emit_selected(smem.select, keys, vectors, threshold, [&](uint32_t position, int j, int c) {
      smem.granules[position] = first_element(vectors, j) + c;
    });
  } else {
    for (int i = threadIdx.x; i < granules; i += kSelectThreads) smem.granules[i] = i;
  }
  __syncthreads();
  const int total = chosen << p.granule_bits;
  const int vectors = (total + 4 * kSelectThreads - 1) / (4 * kSelectThreads);
  const auto index_of = [&](int element) {
    return (smem.granules[element >> p.granule_bits] << p.granule_bits) | (element & granule_mask);
  };
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    uint4 four = make_uint4(0, 0, 0, 0);
    if (j < vectors) {
      const int element = first_element(vectors, j);
      if (element < total) four = load_four(scores, index_of(element), length);
    }
    keys[4 * j] = four.x, keys[4 * j + 1] = four.y, keys[4 * j + 2] = four.z, keys[4 * j + 3] = four.w;
  }
  const Threshold threshold = find_threshold(smem.select, keys, vectors, p.k);
  asm volatile("cp.async.wait_all;" ::: "memory");
  const Writer write{p, smem, table, static_cast<long long>(row) * p.k};
  emit_selected(smem.select, keys, vectors, threshold, [&](uint32_t position, int j, int c) {
    write(position, index_of(first_element(vectors, j)) + c);
  });
}

// Writes the maximum of every granule of [begin, end); begin is a multiple of 4 * kSelectThreads.
__device__ __forceinline__ void write_maxima(const TopkParams& p, int row, int begin, int end, int length) {
  const float* scores = p.scores + row * p.score_stride;
  uint32_t* maxima = p.maxima + row * p.maxima_stride;
  const int lanes = (1 << p.granule_bits) / 4;
  constexpr int kAtOnce = 4;
  for (int start = begin; start < end; start += kAtOnce * 4 * kSelectThreads) {
    uint4 four[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = start + (i * kSelectThreads + threadIdx.x) * 4;
      four[i] = index < end ? load_four(scores, index, length) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = start + (i * kSelectThreads + threadIdx.x) * 4;
      uint32_t most = max(max(four[i].x, four[i].y), max(four[i].z, four[i].w));
      for (int step = 1; step < lanes; step *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
      if (index < end && (threadIdx.x & (lanes - 1)) == 0) __stcg(maxima + (index >> p.granule_bits), most);
    }
  }
}

// Chunk length and each row's first unit, from the lengths; returns the number of units. Every block finds the same.
__device__ int make_schedule(const TopkParams& p, Smem& smem, int& chunk) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int length = thread < p.rows ? max(0, __ldg(p.lengths + thread)) : 0;
  constexpr int kStep = 4 * kSelectThreads;
  if (thread == 0) smem.long_total = 0;
  __syncthreads();
  if (length > kMaxSelect) atomicAdd(&smem.long_total, static_cast<unsigned long long>(length));
  __syncthreads();
  const long long per_block = (static_cast<long long>(smem.long_total) + gridDim.x - 1) / gridDim.x;
  chunk = static_cast<int>(max(1ll, (per_block + kStep - 1) / kStep)) * kStep;
  const uint32_t units = thread < p.rows ? (length > kMaxSelect ? (length + chunk - 1) / chunk : 1) : 0;
  const uint32_t inclusive = warp_inclusive_sum(units);
  if (lane == 31) smem.select.warp_sums[warp] = inclusive;
  __syncthreads();
  const uint32_t totals = warp_inclusive_sum(smem.select.warp_sums[lane]);
  const uint32_t before = warp ? __shfl_sync(0xffffffffu, totals, warp - 1) : 0;
  smem.prefix[thread + 1] = before + inclusive;
  if (thread == 0) smem.prefix[0] = 0;
  const int all = __shfl_sync(0xffffffffu, totals, 31);
  __syncthreads();
  return all;
}

__device__ __forceinline__ void do_row_alone(const TopkParams& p, Smem& smem, int row, bool maxima_ready) {
  const int length = max(0, __ldg(p.lengths + row));
  if (length <= p.k) {
    write_identity(p, row, length);
  } else if (length <= kMaxSelect) {
    select_short_row(p, smem, row, length);
  } else {
    if (!maxima_ready) {
      write_maxima(p, row, 0, length, length);
      __syncthreads();
    }
    select_long_row(p, smem, row, length);
  }
}

__global__ __launch_bounds__(kSelectThreads, 1) void topk_kernel(const __grid_constant__ TopkParams p) {
  __shared__ Smem smem;
  if (!p.scheduled) return do_row_alone(p, smem, blockIdx.x, false);
  int chunk;
  const int units = make_schedule(p, smem, chunk);
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    if (threadIdx.x < p.rows && smem.prefix[threadIdx.x] <= unit && unit < smem.prefix[threadIdx.x + 1])
      smem.row = threadIdx.x;
    __syncthreads();
    const int row = smem.row;
    const int length = max(0, __ldg(p.lengths + row));
    if (length <= kMaxSelect) {
      do_row_alone(p, smem, row, false);
    } else {
      const int first = smem.prefix[row], count = smem.prefix[row + 1] - first;
      const int begin = (unit - first) * chunk;
      write_maxima(p, row, begin, min(begin + chunk, length), length);
      __syncthreads();
      if (threadIdx.x == 0) {
        unsigned int* counter = &arrived[p.counter_set * kMaxScheduledRows + row];
        __threadfence();
        smem.is_last = atomicAdd(counter, 1u) == count - 1u;
        if (smem.is_last) {
          *counter = 0;
          __threadfence();
        }
      }
      __syncthreads();
      if (smem.is_last) select_long_row(p, smem, row, length);
    }
    __syncthreads();  // smem is used again
  }
}

// The indexer has written the granule maxima: one block a row.
__global__ __launch_bounds__(kSelectThreads, 1) void topk_finish_kernel(const __grid_constant__ TopkParams p) {
  __shared__ Smem smem;
  wait_for_previous_kernel();
  do_row_alone(p, smem, blockIdx.x, true);
}

}  // namespace
}  // namespace dsv4

DSV4_KERNELS(dsv4::limit<dsv4::kSelectThreads, 0>("topk_kernel"),
             dsv4::limit<dsv4::kSelectThreads, 0>("topk_finish_kernel"))

// Granule of the maxima for k and the widest row: a power of two so that k granules and all maxima fit one selection.
// Returns its base-2 logarithm, or a negative code when no granule does.
DSV4_EXPORT int dsv4_topk_granule_bits(int k, int width) {
  if (k < 1 || k > 2048 || width < 1) return dsv4::kBadArgument;
  for (int bits = 3; bits <= 5; ++bits) {
    const bool fits_values = (k << bits) <= dsv4::kMaxSelect;
    const bool fits_maxima = ((width + (1 << bits) - 1) >> bits) <= dsv4::kMaxSelect;
    // 16 is also what the indexer writes: a smaller one only where k needs it
    if (bits == 3 && k <= 1024) continue;
    if (fits_values && (fits_maxima || width <= dsv4::kMaxSelect)) return bits;
  }
  return dsv4::kBadArgument;
}

// scores [rows, width] fp32, row stride in floats; lengths [rows]; page_table [rows, *]; slots and raw [rows, k] dense;
// maxima: workspace of rows * maxima_stride words, 16-byte aligned. maxima_ready: the indexer wrote them (granule 16).
DSV4_EXPORT int dsv4_topk(const float* scores, long long score_stride, int width, const int* lengths,
                          const int* page_table, long long table_stride, int* slots, int* raw, unsigned* maxima,
                          long long maxima_stride, int rows, int k, int page_size, int counter_set, int maxima_ready,
                          int sms, void* stream) {
  using namespace dsv4;
  const int granule_bits = dsv4_topk_granule_bits(k, width);
  if (rows < 1 || granule_bits < 0 || page_size < 1 || (page_size & (page_size - 1)) || score_stride % 4 ||
      reinterpret_cast<uintptr_t>(scores) % 16 || reinterpret_cast<uintptr_t>(maxima) % 16 || maxima_stride % 4 ||
      (maxima_ready && granule_bits != 4))
    return kBadArgument;
  TopkParams p{scores, lengths, page_table, slots, raw, maxima, score_stride, table_stride, maxima_stride, rows, k,
               __builtin_ctz(page_size), granule_bits, counter_set % kCounterSets, rows <= kMaxScheduledRows};
  if (!maxima_ready) {
    // at most one block an SM runs at a time; a row needs no more blocks than it has steps
    const long long steps = (width + 4ll * kSelectThreads - 1) / (4ll * kSelectThreads);
    const long long most = width > kMaxSelect ? rows * steps : rows;
    const int grid = p.scheduled ? static_cast<int>(std::min<long long>(sms, most)) : rows;
    topk_kernel<<<grid, kSelectThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaPeekAtLastError();
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(rows);
  config.blockDim = dim3(kSelectThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, topk_finish_kernel, p);
}
