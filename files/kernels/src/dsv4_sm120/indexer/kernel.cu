// SPDX-License-Identifier: Apache-2.0
// Indexer logits over the paged fp8 cache: logit[t] = scale_k[t] * sum_h weight[h] * relu(q_h . k_t).
//
// A warp takes tiles of 32 tokens. K goes from device memory through a private ring of cp.async stages straight into the
// operand layout of mma.sync: a thread reads back the very bytes it copied, so the ring needs no block barrier and has
// no bank conflicts. The 64 query heads lie in shared memory as operands; barriers come only with a new row. The order
// of the 128 products of a dot product is free, so operands are laid out as 16-byte loads find them: thread t of a quad
// holds bytes 16t..16t+15 and 64+16t..64+16t+15 of its token's, and of its head's, 128.
//
// Tiles are counted from the lengths on the device and dealt evenly over the blocks: the work is that of the actual
// lengths, whatever the page table's width, and mixed rows balance. Rows of one request (next_n > 1) take turns on
// stretches of tiles short enough to stay in the L2, so their keys come from device memory once.
#include <cuda_fp16.h>

#include <cstdint>

#include "abi.cuh"
#include "ptx.cuh"
#include "select.cuh"

// a named namespace: nvcc puts a random mark into the names of an unnamed one, and builds would differ
namespace dsv4::indexer {

constexpr int kHeads = 64;
constexpr int kDim = 128;
constexpr int kPage = 64;
constexpr int kTile = 32;
constexpr int kGranule = 16;  // tokens that one maximum stands for
constexpr int kScaleOffset = kPage * kDim;
constexpr int kThreads = 384;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 1;
constexpr int kMaxRequests = 1024;
constexpr int kMaxNext = 8;
// tiles that one row of a request takes before the next row's turn
constexpr int kStretch = 96;

struct Stage {
  uint4 k[8][32];  // [16-byte piece][lane]
  float scale[kTile];
};

struct Smem {
  Stage ring[kWarps][kStages];
  uint2 query[kHeads / 8][8][32];  // [head group][step][lane]; sm_120 uses four of the steps
  float2 weights[kHeads / 2];
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
  float* maxima;            // one for 16 tokens; null when not wanted
  long long page_pitch, weight_stride, table_stride, logit_stride, maxima_stride, q_stride;
  int requests, next_n, table_width;
  int skip;  // rows of at most `skip` tokens are left alone
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
// fp8 operands go into the tensor cores as they are.
constexpr int kSteps = 4;
constexpr float kProductScale = 1.0f;

__device__ __forceinline__ uint2 query_operand(const uint32_t (&words)[8], int step) {
  return make_uint2(words[2 * step], words[2 * step + 1]);
}

struct KeyOperand {
  uint32_t a[4];
  __device__ __forceinline__ KeyOperand(const uint32_t (&top)[8], const uint32_t (&bottom)[8], int step)
      : a{top[2 * step], bottom[2 * step], top[2 * step + 1], bottom[2 * step + 1]} {}
};

__device__ __forceinline__ void multiply(float (&acc)[4], const KeyOperand& k, uint2 q) {
  multiply_e4m3(acc, k.a, q);
}
#else
// sm_90 would unpack fp8 at each mma; K is unpacked to fp16 once a tile here and the query once a row, both exactly. One
// pair of each four bytes goes through the conversion unit, the other through integer instructions, which shift the
// bits into place and give the value times 2^-8; the query's pairs are scaled the other way round, so that every
// product carries 2^-8.
constexpr int kSteps = 8;
constexpr float kProductScale = 256.0f;

// selector 0x3424 takes the high two bytes, 0x1404 the low two
__device__ __forceinline__ uint32_t shift_in(uint32_t four_fp8, uint32_t selector) {
  const uint32_t spread = __byte_perm(four_fp8, 0, selector);
  return (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
}

__device__ __forceinline__ uint2 query_operand(const uint32_t (&words)[8], int step) {
  return make_uint2(shift_in(words[step], 0x1404), halves_of_low_e4m3(words[step] >> 16));
}

struct KeyOperand {
  uint32_t a[4];
  __device__ __forceinline__ KeyOperand(const uint32_t (&top)[8], const uint32_t (&bottom)[8], int step)
      : a{halves_of_low_e4m3(top[step]), halves_of_low_e4m3(bottom[step]), shift_in(top[step], 0x3424), shift_in(bottom[step], 0x3424)} {}
};

__device__ __forceinline__ void multiply(float (&acc)[4], const KeyOperand& k, uint2 q) {
  multiply_f16(acc, k.a, q);
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

// The block's way through its tiles, the same in all warps: stretch by stretch, in each one row after the other. `place`
// is one warp's tile at the current position.
struct Walk {
  const IndexerParams& p;
  const Smem& smem;
  const int end;             // of the block, in tiles of the whole batch
  int request, from, to;     // stretch, in tiles of the request
  int member, round, length;

  __device__ __forceinline__ Walk(const IndexerParams& p, const Smem& smem, int begin, int end) : p(p), smem(smem), end(end) {
    int low = 0, high = p.requests;  // first_tile[low] <= begin < first_tile[high]
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (smem.first_tile[middle] <= begin) low = middle;
      else high = middle;
    }
    request = low;
    stretch(begin - smem.first_tile[low]);
  }

  __device__ __forceinline__ void stretch(int first) {
    from = first;
    to = min(smem.first_tile[request + 1], end) - smem.first_tile[request];
    if (p.next_n > 1) to = min(to, from + kStretch);
    member = round = 0;
    length = __ldg(p.lengths + request * p.next_n);
  }

  __device__ __forceinline__ bool over() const { return smem.first_tile[request] + from >= end; }
  __device__ __forceinline__ int row() const { return request * p.next_n + member; }
  __device__ __forceinline__ int tile() const { return from + round * kWarps + (threadIdx.x >> 5); }

  // Tokens of this warp's tile that are wanted, counted from the row's start; 0 when there are none.
  __device__ __forceinline__ int wanted() const {
    return tile() < to && length > p.skip && tile() * kTile < length ? length : 0;
  }

  __device__ __forceinline__ void next() {
    ++round;
    if (from + round * kWarps < to) return;
    round = 0;
    if (++member < p.next_n) {
      length = __ldg(p.lengths + row());
      return;
    }
    int first = to;
    member = 0;
#pragma unroll 1
    while (request < p.requests - 1 && smem.first_tile[request] + first >= smem.first_tile[request + 1]) {
      ++request;
      first = 0;
    }
    stretch(first);
  }
};

__global__ __launch_bounds__(kThreads, 1) void indexer_kernel(const __grid_constant__ IndexerParams p) {
  DSV4_SHARED_MEMORY(Smem, smem);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = lane >> 2, quad = lane & 3;
  {
    // what the block will probably need is on its way before the lengths say so
    const int row = static_cast<int>(blockIdx.x * static_cast<unsigned>(p.requests) / gridDim.x) * p.next_n;
    if (threadIdx.x < 64) prefetch(p.q + row * p.q_stride + threadIdx.x * 128);
    else if (threadIdx.x < 66) prefetch(p.weights + row * p.weight_stride + (threadIdx.x - 64) * 32);
    else if (threadIdx.x < 82 && (threadIdx.x - 66) * 32 < p.table_width)
      prefetch(p.page_table + row * p.table_stride + (threadIdx.x - 66) * 32);
  }
  const int tiles = count_tiles(p, smem);
  // a kernel that follows may start its prologue; it waits for this one's end before it reads
  launch_dependents();
  // Few tiles are spread thin, for latency; counts of four fall together with the ends of rows more often.
  const int each = ((tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x) + 3) & ~3;
  const int begin = blockIdx.x * each;
  if (begin >= tiles) return;

  // Three positions on one way: the leading one asks for page numbers, then keys are copied, then used.
  Walk lead(p, smem, begin, min(begin + each, tiles));
  int row = 0, token = 0, length = 0, page = 0;  // of the leading position; length < 0 past the end
  const auto look = [&]() {
    row = lead.row(), token = lead.tile() * kTile;
    length = lead.over() ? -1 : lead.wanted();
    if (length > 0) page = __ldg(p.page_table + row * p.table_stride + token / kPage);
  };
  int3 ahead[kStages];  // what is in the ring: row, token, length
#pragma unroll
  for (int i = 0; i < kStages; ++i) ahead[i] = make_int3(0, 0, 0);
  look();
  Stage* ring = smem.ring[warp];
  int query_row = -1;
#pragma unroll 1
  for (int turn = -kStages;; ++turn) {
    Stage& stage = ring[turn & (kStages - 1)];
    const int3 now = ahead[0];
    if (turn >= 0) {
      if (now.z < 0) break;
      if (now.x != query_row) {
        // all warps come to a new row at the same turn
        query_row = now.x;
        __syncthreads();
        if (warp < kHeads / 8) {
          const uint8_t* q = p.q + query_row * p.q_stride + (threadIdx.x >> 2) * kDim + quad * 16;
          const uint4 low = __ldg(reinterpret_cast<const uint4*>(q)), high = __ldg(reinterpret_cast<const uint4*>(q + 64));
          const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int step = 0; step < kSteps; ++step) smem.query[warp][step][lane] = query_operand(words, step);
        } else if (warp == kHeads / 8) {
          smem.weights[lane] = __ldg(reinterpret_cast<const float2*>(p.weights + query_row * p.weight_stride) + lane);
        }
        __syncthreads();
      }
    }
    committed_copies_arrived<kStages - 1>();
    __syncwarp();
    uint32_t top[2][8], bottom[2][8];
    float scale = 0.0f;
    if (now.z > 0) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint4 a = stage.k[4 * m][lane], b = stage.k[4 * m + 1][lane], c = stage.k[4 * m + 2][lane], d = stage.k[4 * m + 3][lane];
        top[m][0] = a.x, top[m][1] = a.y, top[m][2] = a.z, top[m][3] = a.w;
        top[m][4] = b.x, top[m][5] = b.y, top[m][6] = b.z, top[m][7] = b.w;
        bottom[m][0] = c.x, bottom[m][1] = c.y, bottom[m][2] = c.z, bottom[m][3] = c.w;
        bottom[m][4] = d.x, bottom[m][5] = d.y, bottom[m][6] = d.z, bottom[m][7] = d.w;
      }
      scale = stage.scale[(quad & 1) * 16 + (quad >> 1) * 8 + group] * kProductScale;
    }
    __syncwarp();
    // the stage is free again
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) ahead[i] = ahead[i + 1];
    ahead[kStages - 1] = make_int3(row, token, length);
    if (length > 0) {
      const uint8_t* base = p.pages + page * p.page_pitch;
      const uint8_t* k = base + (token % kPage + group) * kDim + quad * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) copy_async16(&stage.k[i][lane], k + (i >> 1) * 8 * kDim + (i & 1) * 64);
      if (lane < kTile / 4) copy_async16(&stage.scale[lane * 4], base + kScaleOffset + (token % kPage + lane * 4) * 4);
    }
    commit_copies();
    if (length >= 0) lead.next(), look();
    if (now.z <= 0 || turn < 0) continue;

    float acc[2][kHeads / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const KeyOperand first(top[0], bottom[0], step), second(top[1], bottom[1], step);
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) {
        const uint2 q = smem.query[n][step][lane];
        multiply(acc[0][n], first, q);
        multiply(acc[1][n], second, q);
      }
    }
    float sums[4] = {};  // tokens group, group + 8, group + 16, group + 24
#pragma unroll
    for (int n = 0; n < kHeads / 8; ++n) {
      const float2 weight = smem.weights[n * 4 + quad];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        sums[2 * m] = fmaf(fmaxf(acc[m][n][0], 0.0f), weight.x, sums[2 * m]);
        sums[2 * m + 1] = fmaf(fmaxf(acc[m][n][2], 0.0f), weight.x, sums[2 * m + 1]);
        sums[2 * m] = fmaf(fmaxf(acc[m][n][1], 0.0f), weight.y, sums[2 * m]);
        sums[2 * m + 1] = fmaf(fmaxf(acc[m][n][3], 0.0f), weight.y, sums[2 * m + 1]);
      }
    }
    // each lane of a quad ends up with one token: bit 0 of quad says + 16, bit 1 says + 8
    const bool odd = quad & 1, high = quad & 2;
    const float near = (odd ? sums[2] : sums[0]) + __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[2], 1);
    const float far = (odd ? sums[3] : sums[1]) + __shfl_xor_sync(0xffffffffu, odd ? sums[1] : sums[3], 1);
    const float logit = ((high ? far : near) + __shfl_xor_sync(0xffffffffu, high ? near : far, 2)) * scale;
    const int index = now.y + (quad & 1) * 16 + (quad >> 1) * 8 + group;
    const bool valid = index < now.z;
    if (valid) p.logits[now.x * p.logit_stride + index] = logit;
    if (p.maxima) {
      const uint32_t key = valid ? key_of(logit) : 0u;
      const uint32_t lower = __reduce_max_sync(0xffffffffu, odd ? 0u : key);
      const uint32_t upper = __reduce_max_sync(0xffffffffu, odd ? key : 0u);
      float* maxima = p.maxima + now.x * p.maxima_stride + now.y / kGranule;
      if (lane == 0) maxima[0] = value_of(lower);
      if (lane == 1 && now.y + kGranule < now.z) maxima[1] = value_of(upper);
    }
  }
  copies_arrived();
}

}  // namespace dsv4::indexer

DSV4_KERNELS(dsv4::limit<dsv4::indexer::kThreads, sizeof(dsv4::indexer::Smem)>("indexer_kernel"))

// rows = requests * next_n; every row's page-table entries up to its length must be pages of the pool. Strides in
// elements, page_pitch in bytes (a multiple of 16). skip: rows of at most so many tokens are left alone (0: none).
DSV4_EXPORT int dsv4_indexer(const void* q, long long q_stride, const void* pages, long long page_pitch,
                             const float* weights, long long weight_stride, const int* lengths, const int* page_table,
                             long long table_stride, int table_width, float* logits, long long logit_stride, float* maxima,
                             long long maxima_stride, int requests, int next_n, int skip, int sms, void* stream) {
  using namespace dsv4;
  using namespace dsv4::indexer;
  if (requests < 1 || requests > kMaxRequests || next_n < 1 || next_n > kMaxNext || page_pitch % 16 || q_stride % 16 ||
      weight_stride % 2 || reinterpret_cast<uintptr_t>(weights) % 8 ||
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
                        maxima_stride, q_stride, requests, next_n, table_width, skip};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(sms);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Smem);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, indexer_kernel, p);
}
