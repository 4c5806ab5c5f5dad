// SPDX-License-Identifier: Apache-2.0
// Indexer logits over the paged fp8 cache: logit[t] = scale_k[t] * sum_h weight[h] * relu(q_h . k_t).
//
// A warp takes tiles of 16, 32 or 64 tokens: the largest where there are many, since a fragment of the query read from
// shared memory serves four products then. K goes from device memory by cp.async through a stage of the lane's own
// straight into the operand layout of mma.sync: a thread reads back the very bytes it copied, so the stage needs no
// barrier and has no bank conflicts; it is filled anew once the tile's second half is in registers. The 64 query heads
// lie in shared memory as operands; barriers come only with a new row. The order of the 128 products of a dot product is
// free, so operands are laid out as 16-byte loads find them: thread t of a quad holds bytes 16t..16t+15 and
// 64+16t..64+16t+15 of its token's, and of its head's, 128.
//
// Tiles are counted from the lengths on the device and dealt evenly over the blocks: the work is that of the actual
// lengths, whatever the page table's width, and mixed rows balance. Where no row is long there is nothing to deal: each
// row has as many blocks and each warp its tiles, known before the lengths are, so all that they need is asked for at
// once. Rows of one request (next_n > 1) take turns on stretches of tiles short enough to stay in the L2, so their keys
// come from device memory once.
#include <algorithm>
#include <cstdint>

#include "abi.cuh"
#include "ptx.cuh"
#include "select.cuh"

// a named namespace: nvcc puts a random mark into the names of an unnamed one, and builds would differ
namespace dsv4::indexer {

constexpr int kHeads = 64;
constexpr int kDim = 128;
constexpr int kPage = 64;
constexpr int kMaxTile = 64;
constexpr int kGranule = 16;  // tokens that one maximum stands for
constexpr int kScaleOffset = kPage * kDim;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kThreads == kHeads * 4, "a thread holds a quarter of a head's query");
constexpr int kMaxRequests = 1024;
constexpr int kMaxNext = 8;
// tiles that one row of a request takes before the next row's turn
constexpr int kStretch = 48;
// what a row's beginning costs a block that has many tiles, in tiles: two barriers, a query, warps without a tile
constexpr int kRowCost = 8;

struct IndexerParams {
  const uint8_t* q;         // [rows, 64, 128] e4m3
  const uint8_t* pages;     // page p at p * page_pitch: 64 x 128 e4m3, 64 fp32 scales
  const float* weights;     // [rows, 64]
  const int* lengths;       // [rows]
  const int* page_table;    // [rows, *]; rows of one request have the same
  float* logits;            // [rows, *]
  float* maxima;            // one for 16 tokens; null when not wanted
  uint32_t page_pitch;
  long long weight_stride, table_stride, logit_stride, maxima_stride, q_stride;
  int requests, next_n, table_width;
  int skip;        // rows of at most `skip` tokens are left alone
  int row_blocks;  // blocks of a row where each has as many
  float row_blocks_inverse, blocks_inverse;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
// fp8 operands go into the tensor cores as they are.
constexpr int kSteps = 4;

__device__ __forceinline__ uint2 query_operand(const uint32_t (&words)[8], int step) {
  return make_uint2(words[2 * step], words[2 * step + 1]);
}

struct KeyOperand {
  uint32_t a[4];
  __device__ __forceinline__ KeyOperand(const uint32_t (&top)[4], const uint32_t (&bottom)[4], int step)
      : a{top[2 * step], bottom[2 * step], top[2 * step + 1], bottom[2 * step + 1]} {}
};

__device__ __forceinline__ void multiply(float (&acc)[4], const uint32_t (&k)[4], uint2 q) {
  multiply_e4m3(acc, k, q);
}

struct HeadWeights {
  float2 pairs[kHeads / 2];
  static constexpr float scale = 1.0f;

  // own: of the heads 2 lane and 2 lane + 1
  __device__ __forceinline__ void store(float2 own) {
    if (threadIdx.x < 32) pairs[threadIdx.x] = own;
  }

  // The weighted sums over the heads of the tokens that a lane ends up with; Tile::place() says which.
  template <int kBands, int kOwn>
  __device__ __forceinline__ void weigh(const float (&acc)[kBands][kHeads / 8][4], float (&logit)[kOwn]) const {
    const int quad = threadIdx.x & 3;
    float sums[2 * kBands] = {};  // tokens group + 8 i
#pragma unroll
    for (int n = 0; n < kHeads / 8; ++n) {
      const float2 weight = pairs[n * 4 + quad];
#pragma unroll
      for (int m = 0; m < kBands; ++m) {
        sums[2 * m] = fmaf(fmaxf(acc[m][n][0], 0.0f), weight.x, sums[2 * m]);
        sums[2 * m + 1] = fmaf(fmaxf(acc[m][n][2], 0.0f), weight.x, sums[2 * m + 1]);
        sums[2 * m] = fmaf(fmaxf(acc[m][n][1], 0.0f), weight.y, sums[2 * m]);
        sums[2 * m + 1] = fmaf(fmaxf(acc[m][n][3], 0.0f), weight.y, sums[2 * m + 1]);
      }
    }
    // the lanes of a quad share out the sums: each step one half goes to the lane across
    const bool odd = quad & 1, high = quad & 2;
    if constexpr (kBands == 4) {
      // bit 0 of quad says band 1 or 3, bit 1 band 2 or 3
      float pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float even_sum = sums[4 * (i / 2) + i % 2], odd_sum = sums[4 * (i / 2) + 2 + i % 2];
        pair[i] = (odd ? odd_sum : even_sum) + __shfl_xor_sync(0xffffffffu, odd ? even_sum : odd_sum, 1);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        logit[i] = (high ? pair[2 + i] : pair[i]) + __shfl_xor_sync(0xffffffffu, high ? pair[i] : pair[2 + i], 2);
    } else if constexpr (kBands == 2) {
      // bit 0 of quad says the band, bit 1 says + 8
      const float near = (odd ? sums[2] : sums[0]) + __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[2], 1);
      const float far = (odd ? sums[3] : sums[1]) + __shfl_xor_sync(0xffffffffu, odd ? sums[1] : sums[3], 1);
      logit[0] = (high ? far : near) + __shfl_xor_sync(0xffffffffu, high ? near : far, 2);
    } else {
      const float half = (odd ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1);
      logit[0] = half + __shfl_xor_sync(0xffffffffu, half, 2);
    }
  }
};
#else
// sm_90 would unpack fp8 at each mma; K is unpacked to fp16 once a tile here and the query once a row, both exactly.
constexpr int kSteps = 8;
// makes every dot product of 128 e4m3 values one that fp16 can hold, and every query value still exact
constexpr float kQueryScale = 0x1p-9f;

__device__ __forceinline__ uint2 query_operand(const uint32_t (&words)[8], int step) {
  const uint32_t factor = halves(kQueryScale, kQueryScale);
  return make_uint2(multiply_halves(halves_of_low_e4m3(words[step]), factor),
                    multiply_halves(halves_of_high_e4m3(words[step]), factor));
}

struct KeyOperand {
  uint32_t a[4];
  __device__ __forceinline__ KeyOperand(const uint32_t (&top)[4], const uint32_t (&bottom)[4], int step)
      : a{halves_of_low_e4m3(top[step]), halves_of_low_e4m3(bottom[step]), halves_of_high_e4m3(top[step]),
          halves_of_high_e4m3(bottom[step])} {}
};

__device__ __forceinline__ void multiply(float (&acc)[4], const uint32_t (&k)[4], uint2 q) {
  multiply_f16(acc, k, q);
}

// The tensor cores, which are what is busy here, also weigh the heads and add them up: what the products left becomes an
// operand, rounded to fp16, with half of the instructions that fp32 takes and no exchange between lanes. The weights are
// as good as exact, as the operand's even columns hold them rounded and the odd ones what rounding took away.
struct HeadWeights {
  alignas(16) uint32_t operand[2][32][4];  // [head group / 4][lane][head group % 4]
  float scale;

  // own: of the heads 2 lane and 2 lane + 1
  __device__ __forceinline__ void store(float2 own) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // a power of two brings the largest of the row's weights to [1, 2)
    const uint32_t larger = max(__float_as_uint(fabsf(own.x)), __float_as_uint(fabsf(own.y)));
    const uint32_t largest = __reduce_max_sync(0xffffffffu, larger);
    const uint32_t exponent = min(max(largest >> 23, 1u), 253u);
    const float down = __uint_as_float((254u - exponent) << 23);
    const int from = 4 * warp + (lane & 3);
    const float x = __shfl_sync(0xffffffffu, own.x, from) * down, y = __shfl_sync(0xffffffffu, own.y, from) * down;
    const uint32_t rounded = halves(x, y);
    const uint32_t rest = halves(x - low_half(rounded), y - high_half(rounded));
    operand[warp / 4][lane][warp % 4] = lane & 4 ? rest : rounded;
    if (threadIdx.x == 0) scale = __uint_as_float(exponent << 23) / kQueryScale;
  }

  // The weighted sums over the heads of the tokens that a lane ends up with; Tile::place() says which.
  template <int kBands, int kOwn>
  __device__ __forceinline__ void weigh(const float (&acc)[kBands][kHeads / 8][4], float (&logit)[kOwn]) const {
    const int lane = threadIdx.x & 31;
    const uint4 low = *reinterpret_cast<const uint4*>(operand[0][lane]);
    const uint4 high = *reinterpret_cast<const uint4*>(operand[1][lane]);
    const uint2 weights[4] = {make_uint2(low.x, low.y), make_uint2(low.z, low.w), make_uint2(high.x, high.y),
                              make_uint2(high.z, high.w)};
    float sums[2 * kBands];  // tokens group + 8 i
#pragma unroll
    for (int m = 0; m < kBands; ++m) {
      float both[4] = {};
#pragma unroll
      for (int n = 0; n < kHeads / 8; n += 2) {
        const float(&even)[4] = acc[m][n], (&odd)[4] = acc[m][n + 1];
        const uint32_t heads[4] = {relu_halves(even[0], even[1]), relu_halves(even[2], even[3]), relu_halves(odd[0], odd[1]),
                                   relu_halves(odd[2], odd[3])};
        multiply_f16(both, heads, weights[n / 2]);
      }
      sums[2 * m] = both[0] + both[1], sums[2 * m + 1] = both[2] + both[3];
    }
    // all lanes of a quad have all sums
    const bool odd = lane & 1, upper = lane & 2;
    if constexpr (kBands == 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) logit[i] = upper ? (odd ? sums[6 + i] : sums[4 + i]) : (odd ? sums[2 + i] : sums[i]);
    } else if constexpr (kBands == 2) {
      logit[0] = upper ? (odd ? sums[3] : sums[1]) : (odd ? sums[2] : sums[0]);
    } else {
      logit[0] = odd ? sums[1] : sums[0];
    }
  }
};
#endif

struct Smem {
  uint4 keys[kWarps][kMaxTile / 4][32];  // [warp][16-byte piece][lane]
  float scales[kWarps][2][32];           // [warp][token of the lane, or tile][lane]
  uint4 query[kHeads / 16][8][32];       // [two head groups][step][lane]; sm_120 uses four of the steps
  HeadWeights weights;
  int first_tile[kMaxRequests + 1];
  uint32_t warp_sums[kWarps];
};

// A thread's part of one row's query and weights, on its way from device to shared memory.
struct Query {
  uint4 low, high;
  float2 weights;

  __device__ __forceinline__ Query(const IndexerParams& p, int row) {
    const uint8_t* q = p.q + row * p.q_stride + (threadIdx.x >> 2) * kDim + (threadIdx.x & 3) * 16;
    low = __ldg(reinterpret_cast<const uint4*>(q)), high = __ldg(reinterpret_cast<const uint4*>(q + 64));
    weights = __ldg(reinterpret_cast<const float2*>(p.weights + row * p.weight_stride) + (threadIdx.x & 31));
  }

  // A barrier before it is used.
  __device__ __forceinline__ void store(Smem& smem) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      reinterpret_cast<uint2*>(&smem.query[warp / 2][step][lane])[warp & 1] = query_operand(words, step);
    smem.weights.store(weights);
  }
};

// Where a row's results go.
struct Output {
  float* logits;
  float* maxima;

  __device__ __forceinline__ Output(const IndexerParams& p, int row)
      : logits(p.logits + row * p.logit_stride), maxima(p.maxima ? p.maxima + row * p.maxima_stride : nullptr) {}
};

// One warp's tile of 16 kBands tokens.
template <int kBands>
struct Tile {
  static constexpr int kTokens = 16 * kBands;
  static constexpr int kOwn = kBands == 4 ? 2 : 1;  // tokens whose logits a lane ends up with, 8 apart

  float acc[kBands][kHeads / 8][4];

  // where in the tile the first of them is
  static __device__ __forceinline__ int place() {
    const int group = (threadIdx.x & 31) >> 2, quad = threadIdx.x & 3;
    if (kBands == 4) return quad * 16 + group;
    return (kBands == 2 ? (quad & 1) * 16 + (quad >> 1) * 8 : (quad & 1) * 8) + group;
  }

  // Copies what this lane needs of a tile's keys and scales to its places in the stage; `keys` and `scales` are the first
  // of them, 32 apart. `token`: the tile's first.
  static __device__ __forceinline__ void copy(const IndexerParams& p, uint4* keys, float* scales, uint32_t page, int token) {
    const int lane = threadIdx.x & 31;
    const uint8_t* base = p.pages + static_cast<uint64_t>(page) * p.page_pitch;
    const uint32_t in_page = static_cast<uint32_t>(token) % kPage;
    const uint8_t* k = base + (in_page + (lane >> 2)) * kDim + (lane & 3) * 16;
#pragma unroll
    for (int i = 0; i < 4 * kBands; ++i) copy_async16(keys + i * 32, k + (i >> 1) * 8 * kDim + (i & 1) * 64);
    const float* from = reinterpret_cast<const float*>(base + kScaleOffset) + in_page + place();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) copy_async4(scales + i * 32, from + 8 * i);
  }

  // Reads back one half of the dimensions, of the tokens group + 8 i.
  static __device__ __forceinline__ void take(const uint4* stage, int half, uint4 (&keys)[2 * kBands]) {
#pragma unroll
    for (int i = 0; i < 2 * kBands; ++i) keys[i] = stage[(2 * i + half) * 32];
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kBands; ++m)
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
  }

  // Adds the products of one half of the 128 dimensions; keys: of the tokens group + 8 i.
  __device__ __forceinline__ void multiply_half(const Smem& smem, const uint4 (&keys)[2 * kBands], int half) {
    const int lane = threadIdx.x & 31;
    uint32_t words[2 * kBands][4];
#pragma unroll
    for (int i = 0; i < 2 * kBands; ++i)
      words[i][0] = keys[i].x, words[i][1] = keys[i].y, words[i][2] = keys[i].z, words[i][3] = keys[i].w;
#pragma unroll
    for (int step = 0; step < kSteps / 2; ++step) {
      uint32_t operands[kBands][4];
#pragma unroll
      for (int m = 0; m < kBands; ++m) {
        const KeyOperand operand(words[2 * m], words[2 * m + 1], step);
#pragma unroll
        for (int i = 0; i < 4; ++i) operands[m][i] = operand.a[i];
      }
#pragma unroll
      for (int n = 0; n < kHeads / 8; n += 2) {
        const uint4 q = smem.query[n / 2][half * (kSteps / 2) + step][lane];
#pragma unroll
        for (int m = 0; m < kBands; ++m) {
          multiply(acc[m][n], operands[m], make_uint2(q.x, q.y));
          multiply(acc[m][n + 1], operands[m], make_uint2(q.z, q.w));
        }
      }
    }
  }

  // Writes the logits of the tile that begins at `token`, and the maxima of its granules.
  __device__ __forceinline__ void write(const Smem& smem, const float (&scale)[kOwn], const Output& to, int token,
                                        int length) const {
    const int lane = threadIdx.x & 31;
    float logit[kOwn];
    smem.weights.weigh(acc, logit);
    const int index = token + place();
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      logit[i] *= scale[i];
      if (index + 8 * i < length) {
        to.logits[index + 8 * i] = logit[i];
        key = max(key, key_of(logit[i]));
      }
    }
    if (to.maxima) {
#pragma unroll
      for (int delta = kBands; delta < 32; delta *= 2)
        key = max(key, __shfl_xor_sync(0xffffffffu, key, delta));
      // lane i has band i's
      if (lane < kBands && token + lane * kGranule < length) to.maxima[token / kGranule + lane] = value_of(key);
    }
  }
};

// The request that is the block's where each has as many blocks, and the warp's tiles in it then.
struct Guess {
  int request, block;  // block: of the request's

  __device__ __forceinline__ Guess(const IndexerParams& p) {
    const int number = blockIdx.x;
    request = static_cast<int>(number * p.row_blocks_inverse);
    request += (request + 1) * p.row_blocks <= number;  // the product may be one too low
    request = min(request, p.requests - 1);
    block = number - request * p.row_blocks;
  }

  __device__ __forceinline__ int tile(const IndexerParams& p, int round) const {
    return (round * kWarps + static_cast<int>(threadIdx.x >> 5)) * p.row_blocks + block;
  }
};

// The warp's tiles of a row that has so few that each has its warp at once, or in two rounds. All are asked for at once;
// through shared memory, as what waits for loads to registers would wait for these with them.
template <int kBands, int kRounds>
__device__ __forceinline__ void score_few(const IndexerParams& p, Smem& smem, const Query& query, const Guess& guess, int length,
                                          const uint32_t (&pages)[kRounds]) {
  using Tile = Tile<kBands>;
  static_assert(kRounds * Tile::kTokens <= kMaxTile);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto stage = [&](int round) { return &smem.keys[warp][round * 4 * kBands][lane]; };
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int token = guess.tile(p, round) * Tile::kTokens;
    if (token < length) Tile::copy(p, stage(round), &smem.scales[warp][round][lane], pages[round], token);
    commit_copies();
  }
  query.store(smem);
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int token = guess.tile(p, round) * Tile::kTokens;
    if (token >= length) break;
    if (round + 1 < kRounds) committed_copies_arrived<kRounds - 1>();
    else copies_arrived();
    Tile work;
    uint4 keys[2 * kBands];
    work.clear();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Tile::take(stage(round), half, keys);
      work.multiply_half(smem, keys, half);
    }
    const float scale[Tile::kOwn] = {smem.scales[warp][round][lane] * smem.weights.scale};
    work.write(smem, scale, Output(p, guess.request), token, length);
  }
  copies_arrived();
}

// The lengths of up to 64 rows, two a lane.
struct Lengths {
  int own[2] = {};

  __device__ __forceinline__ explicit Lengths(const IndexerParams& p) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (lane + 32 * i < p.requests) own[i] = __ldg(p.lengths + lane + 32 * i);
  }

  __device__ __forceinline__ int longest() const { return __reduce_max_sync(0xffffffffu, max(own[0], own[1])); }
};

// The value that the lanes hold for one of 64 rows.
__device__ __forceinline__ int of_row(const int (&two)[2], int row) {
  return __shfl_sync(0xffffffffu, row < 32 ? two[0] : two[1], row & 31);
}

// The block's share of the tiles. A request takes `pad` places more than it has tiles, in front of them: what its
// beginning costs a block.
struct Share {
  int places, begin, end;                  // of the whole batch: all, and the block's
  int request, first, next_first, length;  // where begin lies: its places, and the length of its first row
  int pad = 0;
  bool small = false;                      // tiles of 32 tokens in place of 64

  // Each warp by itself; smem.first_tile is there after the next barrier.
  __device__ __forceinline__ Share(const IndexerParams& p, Smem& smem, const Lengths& lengths) {
    const int lane = threadIdx.x & 31;
    int tiles[2], cost[2], upto[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) tiles[i] = lengths.own[i] > max(p.skip, 0) ? (lengths.own[i] + 31) / 32 : 0;
    const int all = __reduce_add_sync(0xffffffffu, tiles[0] + tiles[1]), round = gridDim.x * kWarps;
    // small tiles share out evenly, large ones are quicker
    small = all <= 8 * round;
    if (all >= 2 * round) pad = kRowCost;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!small) tiles[i] = (tiles[i] + 1) / 2;
      cost[i] = tiles[i] ? tiles[i] + pad : 0;
    }
    upto[0] = warp_inclusive_sum(cost[0]);
    upto[1] = warp_inclusive_sum(cost[1]) + __shfl_sync(0xffffffffu, upto[0], 31);
    deal(p, __shfl_sync(0xffffffffu, upto[1], 31));
    request = __popc(__ballot_sync(0xffffffffu, upto[0] <= begin)) + __popc(__ballot_sync(0xffffffffu, upto[1] <= begin));
    next_first = of_row(upto, request);
    first = next_first - of_row(cost, request);
    length = of_row(lengths.own, request);
    if (threadIdx.x < 32) {
#pragma unroll
      for (int i = 0; i < 2; ++i) smem.first_tile[lane + 32 * i] = upto[i] - cost[i];
      if (lane == 0) smem.first_tile[64] = places;
    }
  }

  // Any number of rows, several a request too. Passes a barrier.
  __device__ __forceinline__ Share(const IndexerParams& p, Smem& smem);

  __device__ __forceinline__ void deal(const IndexerParams& p, int all) {
    places = all;
    // Few are spread thin, for latency; counts of four are what the warps can share evenly, and fall together with the
    // ends of rows more often. The product may be one too low where it is nearly whole.
    int each = static_cast<int>(all * p.blocks_inverse);
    each += each * static_cast<int>(gridDim.x) < all;
    each = (each + 3) & ~3;
    begin = blockIdx.x * each;
    end = min(begin + each, all);
  }
};

// Largest tiles of one request: of its longest row that is scored at all.
__device__ __forceinline__ int request_tiles(const IndexerParams& p, int request) {
  int longest = 0;
#pragma unroll 1
  for (int i = 0; i < p.next_n; ++i) longest = max(longest, __ldg(p.lengths + request * p.next_n + i));
  return longest > max(p.skip, 0) ? (longest + kMaxTile - 1) / kMaxTile : 0;
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

__device__ __forceinline__ Share::Share(const IndexerParams& p, Smem& smem) {
  deal(p, count_tiles(p, smem));
  if (begin >= places) return;
  int low = 0, high = p.requests;  // first_tile[low] <= begin < first_tile[high]
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (smem.first_tile[middle] <= begin) low = middle;
    else high = middle;
  }
  request = low;
  first = smem.first_tile[low], next_first = smem.first_tile[low + 1];
  length = __ldg(p.lengths + low * p.next_n);
}

// The block's way through its tiles, the same in all warps: stretch by stretch, in each one row after the other.
template <int kTile>
struct Walk {
  const IndexerParams& p;
  const Smem& smem;
  const int end, pad;
  int request, from, to;   // stretch, in tiles of the request
  int member, row, length;
  const int* table;        // the row's
  int tile, limit, past;   // this warp's tile, the first that is not wanted, and the first past its rounds
  int none = 0;            // -1 past the end

  __device__ __forceinline__ Walk(const IndexerParams& p, const Smem& smem, const Share& share)
      : p(p), smem(smem), end(share.end), pad(share.pad), request(share.request) {
    begin_stretch(max(share.begin - share.first - pad, 0), share.first, share.next_first);
    begin_row(share.length);
  }

  __device__ __forceinline__ void begin_stretch(int begin, int first, int next_first) {
    from = begin;
    to = min(next_first, end) - first - pad;
    if (p.next_n > 1) to = min(to, from + kStretch);
    member = 0;
  }

  __device__ __forceinline__ void begin_row(int its_length) {
    const int warp = threadIdx.x >> 5;
    row = request * p.next_n + member;
    length = its_length;
    table = p.page_table + row * p.table_stride;
    tile = from + warp, past = to + warp;
    limit = length > p.skip ? min(to, (length + kTile - 1) / kTile) : 0;
  }

  // Tokens that are wanted of this warp's tile, counted from the row's start; 0: none, -1: past the end.
  __device__ __forceinline__ int wanted() const { return tile < limit ? length : none; }

  __device__ __forceinline__ void next() {
    tile += kWarps;
    if (tile >= past) next_row();
  }

  __device__ __forceinline__ void next_row() {
    if (++member == p.next_n) {
      int first = to;
#pragma unroll 1
      while (request < p.requests - 1 && smem.first_tile[request] + pad + first >= smem.first_tile[request + 1]) {
        ++request;
        first = 0;
      }
      if (smem.first_tile[request] + pad + first >= end) {
        limit = 0, none = -1;
        return;
      }
      begin_stretch(first, smem.first_tile[request], smem.first_tile[request + 1]);
    }
    begin_row(__ldg(p.lengths + request * p.next_n + member));
    // the block will be there in a round
    if (threadIdx.x < kHeads) prefetch(p.q + row * p.q_stride + threadIdx.x * kDim);
    else if (threadIdx.x < kHeads + 2) prefetch(p.weights + row * p.weight_stride + (threadIdx.x - kHeads) * 32);
  }
};

// The block's tiles of 16 kBands tokens. `query` is that of `query_row`.
template <int kBands>
__device__ __forceinline__ void score(const IndexerParams& p, Smem& smem, const Share& share, const Query& query,
                                      int query_row) {
  using Tile = Tile<kBands>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint4* own_keys = &smem.keys[warp][0][lane];
  float* own_scales = &smem.scales[warp][0][lane];

  // Three positions on one way: the leading one asks for page numbers, then keys are copied, then used.
  Walk<Tile::kTokens> lead(p, smem, share);
  uint32_t page = 0;
  int3 ahead;  // what is in the stage: row, token, length
  const auto look = [&]() {
    if (lead.tile < lead.limit) page = __ldg(lead.table + lead.tile * Tile::kTokens / kPage);
  };
  const auto copy = [&]() {
    ahead = make_int3(lead.row, lead.tile * Tile::kTokens, lead.wanted());
    if (ahead.z > 0) Tile::copy(p, own_keys, own_scales, page, ahead.y);
  };
  look();
  copy();
  query.store(smem);
  __syncthreads();  // the query and first_tile are there
  lead.next();
  look();
  Output to(p, query_row);
#pragma unroll 1
  while (ahead.z >= 0) {
    const int3 now = ahead;
    if (now.x != query_row) {
      // all warps come to a new row at the same turn
      query_row = now.x;
      to = Output(p, query_row);
      const Query next(p, query_row);
      __syncthreads();
      next.store(smem);
      __syncthreads();
    }
    copies_arrived();
    Tile work;
    uint4 keys[2 * kBands];
    float scale[Tile::kOwn];
    if (now.z > 0) {
      work.clear();
      Tile::take(own_keys, 0, keys);
      work.multiply_half(smem, keys, 0);
      Tile::take(own_keys, 1, keys);
#pragma unroll
      for (int i = 0; i < Tile::kOwn; ++i) scale[i] = own_scales[i * 32] * smem.weights.scale;
    }
    // the stage is free again
    copy();
    if (ahead.z >= 0) {
      lead.next();
      look();
    }
    if (now.z > 0) {
      work.multiply_half(smem, keys, 1);
      work.write(smem, scale, to, now.y, now.z);
    }
  }
}

// What the block does with its share. `query` is that of `query_row`.
__device__ __forceinline__ void score_share(const IndexerParams& p, Smem& smem, const Share& share, const Query& query,
                                            int query_row) {
  // a kernel that follows may start its prologue; it waits for this one's end before it reads
  launch_dependents();
  if (share.begin >= share.places) return;
  if (share.small) score<2>(p, smem, share, query, query_row);
  else score<4>(p, smem, share, query, query_row);
}

__global__ __launch_bounds__(kThreads, 1) void indexer_kernel(const __grid_constant__ IndexerParams p) {
  DSV4_SHARED_MEMORY(Smem, smem);
  if (p.requests > 64 || p.next_n > 1) {
    const int row = Guess(p).request * p.next_n;
    const Query query(p, row);
    score_share(p, smem, Share(p, smem), query, row);
    return;
  }
  const Lengths lengths(p);
  // All that the block will need if the guess is right is asked for before the lengths say so.
  const Guess guess(p);
  const int* table = p.page_table + guess.request * p.table_stride;
  const auto page_of = [&](int token) -> uint32_t { return token / kPage < p.table_width ? __ldg(table + token / kPage) : 0; };
  const uint32_t once[1] = {page_of(guess.tile(p, 0) * 16)};
  const uint32_t twice[2] = {page_of(guess.tile(p, 0) * 32), page_of(guess.tile(p, 1) * 32)};
  const Query query(p, guess.request);
  const int longest = lengths.longest(), round = p.row_blocks * kWarps * 16;
  if (longest > 4 * round) {
    score_share(p, smem, Share(p, smem, lengths), query, guess.request);
    return;
  }
  launch_dependents();
  const int length = of_row(lengths.own, guess.request);
  if (guess.block >= p.row_blocks || length <= max(p.skip, 0)) return;
  if (longest <= round) score_few<1>(p, smem, query, guess, length, once);
  else score_few<2>(p, smem, query, guess, length, twice);
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
  if (requests < 1 || requests > kMaxRequests || next_n < 1 || next_n > kMaxNext || q_stride % 16 || page_pitch % 16 ||
      page_pitch < 0 || page_pitch > UINT32_MAX || weight_stride % 2 || reinterpret_cast<uintptr_t>(weights) % 8 ||
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
                        page_table, logits, maxima, static_cast<uint32_t>(page_pitch), weight_stride, table_stride,
                        logit_stride, maxima_stride, q_stride, requests, next_n, table_width, skip, sms / requests,
                        1.0f / std::max(sms / requests, 1), 1.0f / sms};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(sms);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Smem);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, indexer_kernel, p);
}
