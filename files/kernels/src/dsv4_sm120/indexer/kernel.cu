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

#include <cstdint>

#include "abi.cuh"
#include "select.cuh"

// a named namespace: nvcc puts a random mark into the names of an unnamed one, and builds would differ
namespace dsv4::indexer {

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
  int row, token, length, unused;  // read and written as one
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
  float* maxima;            // per tile of 16; null when not wanted
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

__device__ __forceinline__ void unpack(uint32_t four_fp8, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high)
      : "r"(four_fp8));
}

__device__ __forceinline__ void store_query(Query& query, int n, const uint4& low, const uint4& high) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    unpack(words[i], query.low[n][i], query.high[n][i]);
  }
}

__device__ __forceinline__ void multiply(float (&acc)[kHeads / 8][4], const Query& query, const uint32_t (&top)[8],
                                         const uint32_t (&bottom)[8]) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t a0, a1, a2, a3;
    unpack(top[step], a0, a2);
    unpack(bottom[step], a1, a3);
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
#pragma unroll 1
  for (int i = 0; i < p.next_n; ++i) longest = max(longest, __ldg(p.lengths + request * p.next_n + i));
  return longest > max(p.skip, 0) ? (longest + kTile - 1) / kTile : 0;
}

// Prefix sums of the tiles over the requests into smem; returns their number. Ends with a barrier passed.
__device__ __forceinline__ int count_tiles(const IndexerParams& p, Smem& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int each = (p.requests + kThreads - 1) / kThreads;
  const int begin = threadIdx.x * each;
  uint32_t sum = 0;
#pragma unroll 1
  for (int i = begin; i < min(begin + each, p.requests); ++i) sum += request_tiles(p, i);
  const uint32_t inclusive = warp_inclusive_sum(sum);
  if (lane == 31) smem.warp_sums[warp] = inclusive;
  __syncthreads();
  const uint32_t totals = warp_inclusive_sum(lane < kWarps ? smem.warp_sums[lane] : 0);
  uint32_t running = (warp ? __shfl_sync(0xffffffffu, totals, warp - 1) : 0) + inclusive - sum;
#pragma unroll 1
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
  int page, row, token, length;  // length 0: nothing to load
};

__device__ __noinline__ Place find_tile(const IndexerParams& p, const Smem& smem, int tile, int end, int member) {
  if (tile >= end) return {0, 0, 0, 0};
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
  if (length <= p.skip || in_row * kTile >= length) return {0, row, in_row * kTile, 0};
  return {__ldg(p.page_table + row * p.table_stride + in_row / kTilesPerPage), row, in_row * kTile, length};
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
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
  const int each = tiles / blocks, rest = tiles - each * blocks, block = blockIdx.x;
  const int begin = block * each + min(block, rest), end = begin + each + (block < rest);
  const int count = (end - begin - stream + streams - 1) / streams;  // of this warp
  if (count <= 0) return;

  Stage* ring = smem.ring[warp];
  Place places, next_places = find_tile(p, smem, begin + stream + lane * streams, end, member);
  {
    // the query travels beside the first keys
    const int row = __shfl_sync(0xffffffffu, next_places.row, 0);
    const uint8_t* q = p.q + row * p.q_stride;
    prefetch(q + lane * 128);
    prefetch(q + 4096 + lane * 128);
    if (lane < 2) prefetch(p.weights + row * p.weight_stride + lane * 32);
  }
  Query query;
  int query_row = -1;
#pragma unroll 1
  for (int i = 1 - kStages; i < count; ++i) {
    // the slot that this fills was read one turn ago
    const int filled = i + kStages - 1, from = filled & 31;
    if (from == 0) {
      places = next_places;
      next_places = find_tile(p, smem, begin + stream + (filled + 32 + lane) * streams, end, member);
    }
    {
      const int page = __shfl_sync(0xffffffffu, places.page, from), row = __shfl_sync(0xffffffffu, places.row, from);
      const int token = __shfl_sync(0xffffffffu, places.token, from);
      const int length = __shfl_sync(0xffffffffu, places.length, from);
      Stage& stage = ring[filled % kStages];
      if (length > 0 && filled < count) {
        const uint8_t* base = p.pages + page * p.page_pitch + token % kPage * kDim;
        const uint8_t* k = base + group * kDim + quad * 16;
        copy16(&stage.k[0][lane], k);
        copy16(&stage.k[1][lane], k + 64);
        copy16(&stage.k[2][lane], k + 8 * kDim);
        copy16(&stage.k[3][lane], k + 8 * kDim + 64);
        if (lane < 4) copy16(&stage.scale[lane * 4], base + kScaleOffset - token % kPage * (kDim - 4) + lane * 16);
      }
      if (lane == 0) *reinterpret_cast<int4*>(&stage.row) = make_int4(row, token, length, 0);
    }
    commit();
    if (i < 0) continue;
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    __syncwarp();
    const Stage& stage = ring[i % kStages];
    const int4 place = *reinterpret_cast<const int4*>(&stage.row);
    const int row = place.x, token = place.y, length = place.z;
    if (length > 0 && row != query_row) {
      const uint8_t* q = p.q + row * p.q_stride + group * kDim + quad * 16;
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) {
        const uint4 low = __ldg(reinterpret_cast<const uint4*>(q + n * 8 * kDim));
        const uint4 high = __ldg(reinterpret_cast<const uint4*>(q + n * 8 * kDim + 64));
        store_query(query, n, low, high);
      }
      const float* weights = p.weights + row * p.weight_stride;
      smem.weights[warp][lane] = make_float2(__ldg(weights + 2 * lane), __ldg(weights + 2 * lane + 1));
      query_row = row;
      __syncwarp();
    }
    if (length > 0) {
      uint32_t top[8], bottom[8];
      const uint4 a = stage.k[0][lane], b = stage.k[1][lane], c = stage.k[2][lane], d = stage.k[3][lane];
      top[0] = a.x, top[1] = a.y, top[2] = a.z, top[3] = a.w, top[4] = b.x, top[5] = b.y, top[6] = b.z, top[7] = b.w;
      bottom[0] = c.x, bottom[1] = c.y, bottom[2] = c.z, bottom[3] = c.w;
      bottom[4] = d.x, bottom[5] = d.y, bottom[6] = d.z, bottom[7] = d.w;
      const float scale = stage.scale[group + (quad & 1) * 8];
      float acc[kHeads / 8][4];
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
      multiply(acc, query, top, bottom);
      float upper = 0.0f, lower = 0.0f;
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) {
        const float2 weight = smem.weights[warp][n * 4 + quad];
        upper = fmaf(fmaxf(acc[n][0], 0.0f), weight.x, upper);
        lower = fmaf(fmaxf(acc[n][2], 0.0f), weight.x, lower);
        upper = fmaf(fmaxf(acc[n][1], 0.0f), weight.y, upper);
        lower = fmaf(fmaxf(acc[n][3], 0.0f), weight.y, lower);
      }
      // lanes with an even quad end up with token `group`, those with an odd one with token `group + 8`
      const float kept = quad & 1 ? lower : upper, given = quad & 1 ? upper : lower;
      float logit = kept + __shfl_xor_sync(0xffffffffu, given, 1);
      logit += __shfl_xor_sync(0xffffffffu, logit, 2);
      logit *= scale;
      const int index = token + group + (quad & 1) * 8;
      const bool valid = index < length;
      if (valid && quad < 2) p.logits[row * p.logit_stride + index] = logit;
      if (p.maxima) {
        const uint32_t most = __reduce_max_sync(0xffffffffu, valid ? key_of(logit) : 0u);
        if (lane == 0) p.maxima[row * p.maxima_stride + token / kTile] = value_of(most);
      }
    }
    __syncwarp();  // the slot and the weights may be written again
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace dsv4::indexer

DSV4_KERNELS(dsv4::limit<dsv4::indexer::kThreads, sizeof(dsv4::indexer::Smem)>("indexer_kernel"))

// rows = requests * next_n; every row's page-table entries up to its length must be pages of the pool. Strides in
// elements, page_pitch in bytes (a multiple of 16). skip: rows of at most so many tokens are left alone (0: none).
DSV4_EXPORT int dsv4_indexer(const void* q, long long q_stride, const void* pages, long long page_pitch,
                             const float* weights, long long weight_stride, const int* lengths, const int* page_table,
                             long long table_stride, float* logits, long long logit_stride, float* maxima,
                             long long maxima_stride, int requests, int next_n, int skip, int sms, void* stream) {
  using namespace dsv4;
  using namespace dsv4::indexer;
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
