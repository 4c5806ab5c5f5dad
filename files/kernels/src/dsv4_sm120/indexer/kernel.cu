// SPDX-License-Identifier: Apache-2.0
// Indexer logits over the paged fp8 cache: logit[t] = scale_k[t] * sum_h weight[h] * relu(q_h . k_t).
//
// A warp owns tiles of 16 tokens and shares nothing with other warps: K goes from device memory through a private
// ring of cp.async stages straight into the operand layout of mma.sync (a thread reads back the very bytes it copied,
// so the ring needs no barrier and has no bank conflicts), and the 64 query heads stay in registers for the whole row.
// The order of the 128 products in a dot product is free, so the operands are laid out as 16-byte loads find them:
// thread t of a quad holds bytes 16t..16t+15 and 64+16t..64+16t+15 of its token's, and of its head's, 128.
// Tiles are counted from the lengths on the device and dealt evenly over the blocks: the work is that of the actual
// lengths, whatever the page table's width, and mixed rows balance. Rows of one request (next_n > 1) walk the same
// tiles in neighbouring warps, so K comes from device memory once.
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "abi.cuh"
#include "select.cuh"

namespace dsv4 {
namespace {

constexpr int kHeads = 64;
constexpr int kDim = 128;
constexpr int kPage = 64;
constexpr int kTile = 16;
constexpr int kTilesPerPage = kPage / kTile;
constexpr int kScaleOffset = kPage * kDim;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 4;
constexpr int kMaxRequests = 2048;
constexpr int kMaxNext = 8;

struct Stage {
  uint4 k[4][32];       // [16-byte piece][lane]
  float scale[kTile];
  int row, token, length, unused;
};

struct Smem {
  Stage ring[kWarps][kStages];
  float2 weights[kWarps][kHeads / 2];
  int first_tile[kMaxRequests + 1];
  uint32_t warp_sums[kWarps];
};

struct IndexerParams {
  const uint8_t* q;         // [rows, 64, 128] e4m3
  const uint8_t* pages;     // page p at p * page_pitch: 64 x 128 e4m3, 64 fp32 scales
  const float* weights;     // [rows, 64]
  const int* lengths;       // [rows]
  const int* page_table;    // [rows, *]; rows of one request have the same
  float* logits;            // [rows, *]
  uint32_t* maxima;         // per tile of 16, keys of select.cuh; null when not wanted
  long long page_pitch, weight_stride, table_stride, logit_stride, maxima_stride, q_stride;
  int requests, next_n, skip;  // rows of at most `skip` tokens are left alone
};

__device__ __forceinline__ void copy16(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
// fp8 operands go into the tensor cores as they are.
struct Query {
  uint32_t words[kHeads / 8][8];
};

__device__ __forceinline__ void store_query(Query& query, int n, const uint4& low, const uint4& high) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) query.words[n][i] = words[i];
}

__device__ __forceinline__ void multiply(float (&acc)[kHeads / 8][4], const Query& query, const uint32_t (&top)[8],
                                         const uint32_t (&bottom)[8]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int n = 0; n < kHeads / 8; ++n) {
      asm volatile(
          "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])
          : "r"(top[2 * step]), "r"(bottom[2 * step]), "r"(top[2 * step + 1]), "r"(bottom[2 * step + 1]),
            "r"(query.words[n][2 * step]), "r"(query.words[n][2 * step + 1]));
    }
  }
}
#else
// sm_90 would unpack fp8 at each mma; unpack K once a tile and the query once a row instead. e4m3 to fp16 is exact.
struct Query {
  uint32_t low[kHeads / 8][8], high[kHeads / 8][8];
};

__device__ __forceinline__ uint32_t unpack(uint32_t two_fp8) {
  uint32_t halves;
  asm("{.reg .b16 pair; mov.b16 pair, %1; cvt.rn.f16x2.e4m3x2 %0, pair;}"
      : "=r"(halves)
      : "h"(static_cast<uint16_t>(two_fp8)));
  return halves;
}

__device__ __forceinline__ void store_query(Query& query, int n, const uint4& low, const uint4& high) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    query.low[n][i] = unpack(words[i] & 0xffffu);
    query.high[n][i] = unpack(words[i] >> 16);
  }
}

__device__ __forceinline__ void multiply(float (&acc)[kHeads / 8][4], const Query& query, const uint32_t (&top)[8],
                                         const uint32_t (&bottom)[8]) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t a0 = unpack(top[step] & 0xffffu), a1 = unpack(bottom[step] & 0xffffu);
    const uint32_t a2 = unpack(top[step] >> 16), a3 = unpack(bottom[step] >> 16);
#pragma unroll
    for (int n = 0; n < kHeads / 8; ++n) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(query.low[n][step]), "r"(query.high[n][step]));
    }
  }
}
#endif

// Tiles of one request: of its longest row that is scored at all.
__device__ __forceinline__ int request_tiles(const IndexerParams& p, int request) {
  int longest = 0;
  for (int i = 0; i < p.next_n; ++i) longest = max(longest, __ldg(p.lengths + request * p.next_n + i));
  return longest > max(p.skip, 0) ? (longest + kTile - 1) / kTile : 0;
}

// Prefix sums of the tiles over the requests into smem; returns their number. Ends with a barrier passed.
__device__ __forceinline__ int count_tiles(const IndexerParams& p, Smem& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int each = (p.requests + kThreads - 1) / kThreads;
  const int begin = threadIdx.x * each;
  uint32_t sum = 0;
  for (int i = begin; i < min(begin + each, p.requests); ++i) sum += request_tiles(p, i);
  const uint32_t inclusive = warp_inclusive_sum(sum);
  if (lane == 31) smem.warp_sums[warp] = inclusive;
  __syncthreads();
  const uint32_t totals = warp_inclusive_sum(lane < kWarps ? smem.warp_sums[lane] : 0);
  uint32_t running = (warp ? __shfl_sync(0xffffffffu, totals, warp - 1) : 0) + inclusive - sum;
  for (int i = begin; i < min(begin + each, p.requests); ++i) {
    smem.first_tile[i] = running;
    running += request_tiles(p, i);
  }
  const int all = __shfl_sync(0xffffffffu, totals, kWarps - 1);
  if (threadIdx.x == 0) smem.first_tile[p.requests] = all;
  __syncthreads();
  return all;
}

// Where a tile lies; found by each lane for its own tile of the next 32.
struct Place {
  const uint8_t* page;  // null: nothing to load, length is 0
  int row, token, length;
};

__device__ __forceinline__ Place find_tile(const IndexerParams& p, const Smem& smem, int tile, int end, int member) {
  if (tile >= end) return {nullptr, 0, 0, 0};
  int low = 0, high = p.requests;  // first_tile[low] <= tile < first_tile[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (smem.first_tile[middle] <= tile) low = middle;
    else high = middle;
  }
  const int row = low * p.next_n + member;
  const int in_row = tile - smem.first_tile[low];
  const int length = __ldg(p.lengths + row);
  // the request's other rows may be longer; past its length a row's table entries are padding
  if (length <= p.skip || in_row * kTile >= length) return {nullptr, row, in_row * kTile, 0};
  const int page = __ldg(p.page_table + row * p.table_stride + in_row / kTilesPerPage);
  return {p.pages + page * p.page_pitch, row, in_row * kTile, length};
}

__global__ __launch_bounds__(kThreads, 1) void indexer_kernel(const __grid_constant__ IndexerParams p) {
  extern __shared__ __align__(16) uint8_t raw_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(raw_smem);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = lane >> 2, quad = lane & 3;

  const int tiles = count_tiles(p, smem);
  // a kernel that follows may start its prologue; it waits for this one's end before it reads
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int streams = kWarps / p.next_n;
  const int member = warp % p.next_n, stream = warp / p.next_n;
  if (stream >= streams) return;
  // few tiles: as many blocks as give each stream one
  const int blocks = min(static_cast<int>(gridDim.x), (tiles + streams - 1) / streams);
  if (static_cast<int>(blockIdx.x) >= blocks) return;
  const int begin = static_cast<int>(static_cast<long long>(tiles) * blockIdx.x / blocks);
  const int end = static_cast<int>(static_cast<long long>(tiles) * (blockIdx.x + 1) / blocks);
  const int count = (end - begin - stream + streams - 1) / streams;  // of this warp

  Stage* ring = smem.ring[warp];
  Place places = find_tile(p, smem, begin + stream + lane * streams, end, member);
  Place next_places = find_tile(p, smem, begin + stream + (32 + lane) * streams, end, member);
  const auto issue = [&](int i) {
    if (i < count) {
      const int from = i & 31;
      const uint64_t page = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(places.page), from);
      const int row = __shfl_sync(0xffffffffu, places.row, from), token = __shfl_sync(0xffffffffu, places.token, from);
      const int length = __shfl_sync(0xffffffffu, places.length, from);
      Stage& stage = ring[i % kStages];
      if (page) {
        const uint8_t* base = reinterpret_cast<const uint8_t*>(page);
        const uint8_t* k = base + (token % kPage + group) * kDim + quad * 16;
        copy16(&stage.k[0][lane], k);
        copy16(&stage.k[1][lane], k + 64);
        copy16(&stage.k[2][lane], k + 8 * kDim);
        copy16(&stage.k[3][lane], k + 8 * kDim + 64);
        if (lane < 4) copy16(&stage.scale[lane * 4], base + kScaleOffset + (token % kPage + lane * 4) * 4);
      }
      if (lane == 0) stage.row = row, stage.token = token, stage.length = length;
      if (from == 31) {
        places = next_places;
        next_places = find_tile(p, smem, begin + stream + (i + 33 + lane) * streams, end, member);
      }
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) issue(i);

  Query query;
  int query_row = -1;
  const auto load_query = [&](int row) {
    const uint8_t* q = p.q + row * p.q_stride + group * kDim + quad * 16;
#pragma unroll
    for (int n = 0; n < kHeads / 8; ++n) {
      const uint4 low = __ldg(reinterpret_cast<const uint4*>(q + n * 8 * kDim));
      const uint4 high = __ldg(reinterpret_cast<const uint4*>(q + n * 8 * kDim + 64));
      store_query(query, n, low, high);
    }
    __syncwarp();
    const float* weights = p.weights + row * p.weight_stride;
    smem.weights[warp][lane] = make_float2(__ldg(weights + 2 * lane), __ldg(weights + 2 * lane + 1));
    query_row = row;
  };
  // the first row's query travels beside its first tiles
  if (count > 0) load_query(__shfl_sync(0xffffffffu, places.row, 0));
  for (int i = 0; i < count; ++i) {
    // the slot that this fills was read one turn ago
    issue(i + kStages - 1);
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    __syncwarp();
    const Stage& stage = ring[i % kStages];
    const int row = stage.row, token = stage.token, length = stage.length;
    uint32_t top[8], bottom[8];
    {
      const uint4 a = stage.k[0][lane], b = stage.k[1][lane], c = stage.k[2][lane], d = stage.k[3][lane];
      top[0] = a.x, top[1] = a.y, top[2] = a.z, top[3] = a.w, top[4] = b.x, top[5] = b.y, top[6] = b.z, top[7] = b.w;
      bottom[0] = c.x, bottom[1] = c.y, bottom[2] = c.z, bottom[3] = c.w;
      bottom[4] = d.x, bottom[5] = d.y, bottom[6] = d.z, bottom[7] = d.w;
    }
    const float scale = quad == 0 ? stage.scale[group] : stage.scale[group + 8];
    if (row != query_row && length > 0) load_query(row);
    __syncwarp();
    if (length > 0) {
      float acc[kHeads / 8][4];
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
      multiply(acc, query, top, bottom);
      float upper = 0.0f, lower = 0.0f;
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) {
        const float2 weight = smem.weights[warp][n * 4 + quad];
        upper = fmaf(fmaxf(acc[n][0], 0.0f), weight.x, upper);
        upper = fmaf(fmaxf(acc[n][1], 0.0f), weight.y, upper);
        lower = fmaf(fmaxf(acc[n][2], 0.0f), weight.x, lower);
        lower = fmaf(fmaxf(acc[n][3], 0.0f), weight.y, lower);
      }
      upper += __shfl_xor_sync(0xffffffffu, upper, 1);
      lower += __shfl_xor_sync(0xffffffffu, lower, 1);
      upper += __shfl_xor_sync(0xffffffffu, upper, 2);
      lower += __shfl_xor_sync(0xffffffffu, lower, 2);
      // lanes with quad 0 hold token `group`, lanes with quad 1 token `group + 8`
      const float logit = (quad == 0 ? upper : lower) * scale;
      const int index = token + group + quad * 8;
      const bool valid = quad < 2 && index < length;
      if (valid) p.logits[row * p.logit_stride + index] = logit;
      if (p.maxima) {
        uint32_t most = valid ? key_of(logit) : 0u;
        most = __reduce_max_sync(0xffffffffu, most);
        if (lane == 0) p.maxima[row * p.maxima_stride + token / kTile] = most;
      }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace
}  // namespace dsv4

DSV4_KERNELS(dsv4::limit<dsv4::kThreads, sizeof(dsv4::Smem)>("indexer_kernel"))

// rows = requests * next_n; every row's page-table entries up to its length must be pages of the pool. Strides in
// elements, page_pitch in bytes (a multiple of 16). skip: rows of at most so many tokens are left alone (0: none).
DSV4_EXPORT int dsv4_indexer(const void* q, long long q_stride, const void* pages, long long page_pitch,
                             const float* weights, long long weight_stride, const int* lengths, const int* page_table,
                             long long table_stride, float* logits, long long logit_stride, unsigned* maxima,
                             long long maxima_stride, int requests, int next_n, int skip, int sms, void* stream) {
  using namespace dsv4;
  if (requests < 1 || requests > kMaxRequests || next_n < 1 || next_n > kMaxNext || page_pitch % 16 || q_stride % 16 ||
      reinterpret_cast<uintptr_t>(q) % 16 || reinterpret_cast<uintptr_t>(pages) % 16)
    return kBadArgument;
  static bool opted_in[64] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < 64 && !opted_in[device]) {
    error = cudaFuncSetAttribute(indexer_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
    if (error != cudaSuccess) return error;
    opted_in[device] = true;
  }
  const IndexerParams p{static_cast<const uint8_t*>(q), static_cast<const uint8_t*>(pages), weights, lengths,
                        page_table, logits, maxima, page_pitch, weight_stride, table_stride, logit_stride,
                        maxima_stride, q_stride, requests, next_n, skip};
  indexer_kernel<<<sms, kThreads, sizeof(Smem), static_cast<cudaStream_t>(stream)>>>(p);
  return cudaPeekAtLastError();
}
