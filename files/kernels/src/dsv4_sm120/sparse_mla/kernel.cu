// SPDX-License-Identifier: Apache-2.0
// Sparse-MLA decode over the DeepSeek-V4 fp8 latent cache, by portable mma.sync (sm_90 and sm_120). See NOTES.md.
//
// A block of eight warps runs 16 or 32 query heads over tiles of 32 cached tokens: a step is 16 heads x 64 tokens or 32 x 32.
// For the scores, warp w owns a quarter of the latent dimensions ([128 (w / 2), + 128): two scale groups, the last one the
// rope dimensions) of half the step's tokens; for the values, dimensions [64 w, 64 w + 64) of all of them.
//
//  * keys and values stay e4m3 in shared memory; fragments are converted to f16, which is exact and one instruction per
//    pair. A token's ue8m0 scale never touches them: it multiplies the fp32 share of the score that its group makes, and
//    the probability that its group's values are multiplied by, relative to the group's largest scale. So f16 holds all.
//  * the 64 rope dimensions are bf16 in the cache and use bf16 mma.
//  * the warps exchange their shares of the scores through shared memory; each then makes the probabilities of two heads.
//  * the blocks of a cluster share one unit of work (a range of tiles of one row). Each pushes its sums into the blocks that
//    merge them, a slice of the output columns each, by asynchronous stores that count on the receiver's mbarrier: no fence,
//    no round trip. A row of several units is merged from global memory by the last block to arrive, again per slice.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../csrc/common/abi.cuh"

// the sizes of a cluster that kernels are made for
#define DSV4_CLUSTERS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)

namespace {

constexpr int kWarps = 8;         // one for each value group
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 32;
constexpr int kRing = 4;         // tiles in shared memory
constexpr int kListed = 8;        // tiles whose tokens are looked up ahead
constexpr int kRowBytes = 576;
constexpr int kGroups = 8;        // seven of nope, one of rope
constexpr int kScaleBytes = 8;    // per token, the eighth is padding that nothing wrote
constexpr int kItemInts = 8;
constexpr int kPlanThreads = 1024;
constexpr int kLargestCluster = 8;
// floats of one merged unit in global memory, for 16 heads: 16 x 512 sums, and for each block of a cluster 8 x 16 exponents and 16 sums
constexpr int kRecordSide = kGroups * 16 + 16;
constexpr int kRecordFloats = 16 * 512 + kLargestCluster * kRecordSide;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// stands for "nothing seen": finite, so that the difference of two of them is 0 and not NaN
constexpr float kNothing = -1e30f;
// References move only when they are exceeded by this: a row's maximum by 2^3, a group's largest scale by 2^2. Probabilities
// times scales are kept 2^10 above their reference, so they reach 2^15 in f16 and are normal numbers down to 2^-14.
constexpr float kScoreSlack = 3.f;
constexpr int kScaleSlack = 2;
constexpr int kLift = 10;

// What a block has been given. Kept in shared memory: registers are short in the loop.
struct Work {
  int row, tile, count, tiles0, length0, length1;
  int part, parts;
  long long slot;
};

// What a block tells of its sums beside them: for rows w and w + 8 of each 16 the softmax's reference and sum, and the log2 of
// what a group's sums are to be multiplied by beside the reference.
template <int kHeadTiles>
struct Side {
  float4 rows[kHeadTiles][8];
  float shift[kGroups];
};

// The shape of a step: 16 heads x two tiles, or 32 heads x one. In both, eight slots of 16 heads x 8 tokens.
template <int kHeadTiles>
struct Step {
  static constexpr int kSpan = kHeadTiles == 1 ? 2 : 1;     // tiles
  static constexpr int kAhead = kRing / kSpan - 1;          // steps that travel while one is computed
  static constexpr int kSlots = kHeadTiles == 1 ? 4 : 2;    // groups of 8 tokens that a warp makes scores of
  // the values of a step and the scores of the next have no barrier between them where the ring holds both steps and more
  static constexpr bool kOverlap = kHeadTiles == 2;
};

template <int kHeadTiles>
struct Smem {
  // the ring of gathered rows; in the end the sums that the cluster's blocks send lie here
  alignas(128) unsigned char raw[kRing][kTile * kRowBytes];
  // the quarters' shares of the scores, [quarter][8 tokens or head tile][lane]; the probabilities in bf16 follow them, or take the
  // place of the first; in the end the weights of the merge lie behind the first
  alignas(16) float4 exchange[Step<kHeadTiles>::kOverlap ? 5 : 4][8][32];
  // probabilities as fragments, [head tile and 16 tokens][lane]
  alignas(16) uint4 prob_f16[4][32];
  alignas(16) unsigned char scales[kRing][kTile * kScaleBytes];
  // a step's value scales as factors, for each warp's group, [column quad][8 tokens][low or high column]
  alignas(16) unsigned short value_factor[kWarps][4][8 * Step<kHeadTiles>::kSpan];
  // addresses of the next tiles' rows, and how far behind them their scales lie; in the end the sides of the cluster's blocks
  alignas(16) unsigned long long row_at[kListed][kTile];
  alignas(16) int scale_behind[kListed][kTile];
  unsigned valid[2 * kListed];
  float alpha[32];       // by how much a row's sums shrink at this step
  float sink_log2[32];
  alignas(8) unsigned long long arrived;  // mbarrier of what the cluster sends
  Work work;
  int last;

  __device__ __forceinline__ uint4& prob_bf16(int slot, int lane) {
    return reinterpret_cast<uint4&>(exchange[Step<kHeadTiles>::kOverlap ? 4 : 0][slot][(lane + 4 * slot) & 31]);
  }
};

template <int kHeadTiles>
constexpr int smem_bytes() {
  using S = Smem<kHeadTiles>;
  static_assert(sizeof(float) * (kLargestCluster + 2) * 128 * kHeadTiles <= 3 * sizeof(S::exchange[0]), "weights of eight sources");
  static_assert(sizeof(Side<kHeadTiles>) * kLargestCluster <= sizeof(S::row_at) + sizeof(S::scale_behind), "sides of eight sources");
  static_assert(sizeof(S) <= dsv4::kMaxBlockSmem, "shared memory of a block");
  return sizeof(S);
}

// what a list entry without a token points at: its values and scales take no part, but 0 x NaN would
__device__ const uint4 kZeroRow[kRowBytes / 16] = {};

struct Scope {
  const unsigned char* cache;
  long long pitch;         // bytes from page to page
  const int* indices;
  long long indices_stride;
  const int* lengths;      // may be null: the width then
  int width;
  int page_shift;
};

struct Params {
  const __nv_bfloat16* q;
  long long q_row, q_head;
  Scope scope[2];
  const float* sink;
  __nv_bfloat16* out;
  long long out_row, out_head;
  float* lse;              // [rows, heads], may be null
  const int* items;
  float* partial;
  unsigned* counters;
  int rows, heads;
  float scale_log2;
};

__device__ __forceinline__ unsigned smem_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy_async16(unsigned to, unsigned long long from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async8(unsigned to, unsigned long long from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// two e4m3 of the low or the high half of a word, as f16x2
__device__ __forceinline__ unsigned widen_low(unsigned v) {
  unsigned r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l; }" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ unsigned widen_high(unsigned v) {
  unsigned r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(r) : "r"(v));
  return r;
}

// four floats as e4m3, clamped to the largest
__device__ __forceinline__ unsigned narrow(const float (&x)[4]) {
  unsigned r;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(r) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return r;
}

template <bool kBf16>
__device__ __forceinline__ void mma(float (&d)[4], const unsigned* a, unsigned b0, unsigned b1) {
  if constexpr (kBf16) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

template <bool kBf16>
__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned r;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

__device__ __forceinline__ int tiles_of(int length) { return (length + kTile - 1) / kTile; }

__device__ __forceinline__ int clamped_length(const Scope& s, int row) {
  if (s.cache == nullptr) return 0;
  const int n = s.lengths == nullptr ? s.width : s.lengths[row];
  return min(max(n, 0), s.width);
}

// ---------------------------------------------------------------------------------------------------------------------
// A row of the ring holds a token's 36 chunks of 16 bytes; bit 1 of the chunk's number is flipped in every second pair of
// rows, so that both ways of reading (16 B of 8 rows for keys, 8 B of 4 rows for values) touch all banks evenly.
__device__ __forceinline__ int swizzle(int row, int chunk) { return chunk ^ (row & 2); }

// Which row of a tile stands at column n of its 8-wide mma tile: even columns take rows 0-3, odd columns rows 4-7, with a
// parity that differs within each pair. A thread's two columns 2c and 2c + 1 are then rows c and 4 + (c ^ 1).
__device__ __forceinline__ int row_of_column(int n) { return n & 1 ? 4 + ((n >> 1) ^ 1) : n >> 1; }

struct Lane {
  int lane, warp, g, c;  // g and c: the row and column quad of an mma fragment
};

// A value that the compiler is to keep instead of making it anew at each use.
__device__ __forceinline__ int kept(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Copies a warp's share of a tile: four tokens. A whole warp takes 512 bytes of a row at once: one request and one address
// translation for them, where a warp that fetched its own columns of many rows would need one for each. Lanes 0-15 take the
// last four chunks of each row, lanes 16-19 the scales. What does not change from tile to tile is kept.
struct Gather {
  unsigned rows, rows_swapped, tail, tail_pitch;  // shared-memory addresses in stage 0, and the pitch of stages
  unsigned list, tail_list, behind;               // the same in the lists of tile 0
  unsigned from;                                  // bytes behind a row's address
  int tail_from;
  bool has_row_tail, has_scale;

  template <int kHeadTiles>
  __device__ __forceinline__ Gather(Smem<kHeadTiles>& sm, const Lane& t) {
    const int first = 4 * t.warp, token = first + (t.lane < 16 ? t.g & 3 : t.lane & 3);
    from = kept(t.lane * 16);
    rows = kept(smem_address(sm.raw[0]) + first * kRowBytes + t.lane * 16);
    rows_swapped = kept(smem_address(sm.raw[0]) + (first + 2) * kRowBytes + (t.lane ^ 2) * 16);
    list = kept(smem_address(&sm.row_at[0][first]));
    tail_list = kept(smem_address(&sm.row_at[0][token]));
    behind = kept(smem_address(&sm.scale_behind[0][token]));
    has_row_tail = t.lane < 16;
    has_scale = t.lane >= 16 && t.lane < 20;
    tail = kept(has_row_tail ? smem_address(sm.raw[0]) + token * kRowBytes + swizzle(token, 32 + t.c) * 16
                             : smem_address(sm.scales[0]) + token * kScaleBytes);
    tail_pitch = has_row_tail ? sizeof(sm.raw[0]) : sizeof(sm.scales[0]);
    tail_from = (32 + t.c) * 16;
  }

  __device__ __forceinline__ void operator()(int tile, int stage) const {
    const unsigned at = tile % kListed * (kTile * 8), to = stage * (kTile * kRowBytes);
    unsigned long long a, b, c, d, e;
    int scale;
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "r"(list + at) : "memory");
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(c), "=l"(d) : "r"(list + at + 16) : "memory");
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(e) : "r"(tail_list + at) : "memory");
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(scale) : "r"(behind + at / 2) : "memory");
    copy_async16(rows + to, a + from);
    copy_async16(rows + to + kRowBytes, b + from);
    copy_async16(rows_swapped + to, c + from);
    copy_async16(rows_swapped + to + kRowBytes, d + from);
    const unsigned tail_to = tail + stage * tail_pitch;
    e += has_row_tail ? tail_from : scale;
    if (has_row_tail) copy_async16(tail_to, e);
    if (has_scale) copy_async8(tail_to, e);
  }
};

__device__ __forceinline__ uint4 load128(const unsigned char* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ uint2 load64(const unsigned char* p) { return *reinterpret_cast<const uint2*>(p); }

// A warp's queries as fragments, of the two groups of its quarter; `scales` only where they are block-scaled.
template <int kHeadTiles>
struct Query {
  unsigned part[kHeadTiles][2][16];
  unsigned scales[kHeadTiles][2];
};

// Scores of heads x 8 kTiles tokens over a quarter of the dimensions: `a` its first group's share, `b` its second's, before
// their scales. `keys`: this lane's first chunk. kRope: the last quarter.
template <bool kRope, int kHeadTiles, int kTiles>
__device__ __forceinline__ void scores(float (&a)[kHeadTiles][kTiles][4], float (&b)[kHeadTiles][kTiles][4],
                                       const Query<kHeadTiles>& q, const unsigned char* keys) {
  // [group, or half of the rope dimensions]
  uint4 v[kRope ? 3 : 2][kTiles];
#pragma unroll
  for (int k = 0; k < (kRope ? 3 : 2); ++k)
#pragma unroll
    for (int n = 0; n < kTiles; ++n) v[k][n] = load128(keys + 8 * n * kRowBytes + 64 * k);
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) a[m][n][k] = b[m][n][k] = 0.f;
  auto word = [](const uint4& w, int s) { return s == 0 ? w.x : s == 1 ? w.y : s == 2 ? w.z : w.w; };
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const unsigned x = word(v[0][n], s), low = widen_low(x), high = widen_high(x);
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) mma<false>(a[m][n], q.part[m][0] + 4 * s, low, high);
      if constexpr (kRope) {
        const unsigned y = word(v[1 + s / 2][n], 2 * (s & 1)), z = word(v[1 + s / 2][n], 2 * (s & 1) + 1);
#pragma unroll
        for (int m = 0; m < kHeadTiles; ++m) mma<true>(b[m][n], q.part[m][1] + 4 * s, y, z);
      } else {
        const unsigned y = word(v[1][n], s), low1 = widen_low(y), high1 = widen_high(y);
#pragma unroll
        for (int m = 0; m < kHeadTiles; ++m) mma<false>(b[m][n], q.part[m][1] + 4 * s, low1, high1);
      }
    }
}

#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define DSV4_BLOCK_SCALING 1
#else
#define DSV4_BLOCK_SCALING 0
#endif

// d += (a times its rows' scales) x (b times its columns' scales), e4m3, 32 deep. A lane gives the scale of row g (even lanes) or
// g + 8 (odd ones), and of column g; the template's numbers say in which byte.
template <int kByteA, int kByteB>
__device__ __forceinline__ void mma_scaled(float (&d)[4], const unsigned* a, unsigned b0, unsigned b1, unsigned scale_a, unsigned scale_b) {
#if DSV4_BLOCK_SCALING
  asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, %14}, {%11}, {%13, %14};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b), "n"(kByteA), "n"(kByteB), "n"(0));
#endif
}

// The same scores with block-scaled e4m3 mma: the cache's bytes and scales as they are (a group of 64 is two blocks of 32 with one
// scale), and queries as the sum of two e4m3 parts. Chunk c of a token's group is four k indices of lane c in each of four words:
// block 0 takes the first two words, block 1 the others.
template <bool kRope, int kHeadTiles, int kTiles>
__device__ __forceinline__ void scores_scaled(float (&a)[kHeadTiles][kTiles][4], const Query<kHeadTiles>& q, const unsigned char* keys,
                                              const unsigned char* scales, const Lane& t) {
  uint4 v[kRope ? 3 : 2][kTiles];
  unsigned scale[kTiles];  // byte 0 of the quarter's first group, byte 1 of its second
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    scale[n] = *reinterpret_cast<const unsigned short*>(scales + (8 * n + row_of_column(t.g)) * kScaleBytes);
#pragma unroll
    for (int k = 0; k < (kRope ? 3 : 2); ++k) v[k][n] = load128(keys + 8 * n * kRowBytes + 64 * k);
  }
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float(&d)[4] = a[m][n];
      d[0] = d[1] = d[2] = d[3] = 0.f;
      const unsigned* first = q.part[m][0];
      mma_scaled<0, 0>(d, first, v[0][n].x, v[0][n].y, q.scales[m][0], scale[n]);
      mma_scaled<1, 0>(d, first + 4, v[0][n].x, v[0][n].y, q.scales[m][0], scale[n]);
      mma_scaled<2, 0>(d, first + 8, v[0][n].z, v[0][n].w, q.scales[m][0], scale[n]);
      mma_scaled<3, 0>(d, first + 12, v[0][n].z, v[0][n].w, q.scales[m][0], scale[n]);
      const unsigned* second = q.part[m][1];
      if constexpr (kRope) {
        mma<true>(d, second, v[1][n].x, v[1][n].y);
        mma<true>(d, second + 4, v[1][n].z, v[1][n].w);
        mma<true>(d, second + 8, v[2][n].x, v[2][n].y);
        mma<true>(d, second + 12, v[2][n].z, v[2][n].w);
      } else {
        mma_scaled<0, 1>(d, second, v[1][n].x, v[1][n].y, q.scales[m][1], scale[n]);
        mma_scaled<1, 1>(d, second + 4, v[1][n].x, v[1][n].y, q.scales[m][1], scale[n]);
        mma_scaled<2, 1>(d, second + 8, v[1][n].z, v[1][n].w, q.scales[m][1], scale[n]);
        mma_scaled<3, 1>(d, second + 12, v[1][n].z, v[1][n].w, q.scales[m][1], scale[n]);
      }
    }
}

// A thread's values of 16 tokens in one group: its 8 dimensions of the four tokens of its k indices 2c, 2c+1, 2c+8, 2c+9.
struct Values {
  uint2 v[4];
};
__device__ __forceinline__ Values load_values(const unsigned char* low, const unsigned char* high) {
  return {{load64(low), load64(high), load64(low + 8 * kRowBytes), load64(high + 8 * kRowBytes)}};
}

// Adds P (heads x 16 tokens) times the group's values to `o`.
template <int kHeadTiles>
__device__ __forceinline__ void multiply(float (&o)[kHeadTiles][8][4], const unsigned (&p)[kHeadTiles][4], const Values& from) {
  const unsigned a[2] = {from.v[0].x, from.v[0].y}, b[2] = {from.v[1].x, from.v[1].y};
  const unsigned e[2] = {from.v[2].x, from.v[2].y}, f[2] = {from.v[3].x, from.v[3].y};
#pragma unroll
  for (int w = 0; w < 2; ++w)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned x = __byte_perm(a[w], b[w], h ? 0x7362 : 0x5140);
      const unsigned y = __byte_perm(e[w], f[w], h ? 0x7362 : 0x5140);
      const unsigned x0 = widen_low(x), y0 = widen_low(y), x1 = widen_high(x), y1 = widen_high(y);
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        mma<false>(o[m][4 * w + 2 * h], p[m], x0, y0);
        mma<false>(o[m][4 * w + 2 * h + 1], p[m], x1, y1);
      }
    }
}

// The same for the rope dimensions, P in two parts.
template <int kHeadTiles>
__device__ __forceinline__ void multiply_rope(float (&o)[kHeadTiles][8][4], const unsigned (&upper)[kHeadTiles][4],
                                              const unsigned (&rest)[kHeadTiles][4], const unsigned char* low, const unsigned char* high) {
  const uint4 a = load128(low), b = load128(high), e = load128(low + 8 * kRowBytes), f = load128(high + 8 * kRowBytes);
  const unsigned aw[4] = {a.x, a.y, a.z, a.w}, bw[4] = {b.x, b.y, b.z, b.w};
  const unsigned ew[4] = {e.x, e.y, e.z, e.w}, fw[4] = {f.x, f.y, f.z, f.w};
  unsigned x[8], y[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    x[n] = __byte_perm(aw[n / 2], bw[n / 2], n & 1 ? 0x7632 : 0x5410);
    y[n] = __byte_perm(ew[n / 2], fw[n / 2], n & 1 ? 0x7632 : 0x5410);
  }
  // one part after the other: a sum's two mma wait for each other
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n) mma<true>(o[m][n], upper[m], x[n], y[n]);
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n) mma<true>(o[m][n], rest[m], x[n], y[n]);
}

// What `from` points at, or `otherwise` for null: a predicated load, so that the loads around it need not wait for it.
__device__ __forceinline__ int load_or(const int* from, int otherwise) {
  int r;
  asm volatile("{ .reg .pred p; setp.ne.u64 p, %1, 0; mov.s32 %0, %2; @p ld.global.nc.s32 %0, [%1]; }" : "=r"(r) : "l"(from), "r"(otherwise));
  return r;
}

// Eight bf16 of a query row, or zeros for a head that does not exist.
__device__ __forceinline__ uint4 load_query(const __nv_bfloat16* row, int dim) {
  return row == nullptr ? make_uint4(0, 0, 0, 0) : __ldg(reinterpret_cast<const uint4*>(row + dim));
}

__device__ __forceinline__ __nv_bfloat162 as_bf16x2(unsigned v) { return *reinterpret_cast<__nv_bfloat162*>(&v); }
__device__ __forceinline__ unsigned as_bits(__nv_bfloat162 v) { return *reinterpret_cast<unsigned*>(&v); }

// One row's 16 values of a group as fragment halves, times a power of two that brings the row's largest value to
// [2^11, 2^12): exact in f16 but for values 2^25 times smaller than that one.
template <bool kRope>
__device__ __forceinline__ void query_fragments(unsigned (&q)[16], const uint4 (&raw)[2], __nv_bfloat162 factor, int h) {
  const unsigned w[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const unsigned v = as_bits(__hmul2(as_bf16x2(w[2 * s + k]), factor));
      q[4 * s + 2 * k + h] = kRope ? v : pack<false>(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
    }
}

__device__ __forceinline__ float largest(const uint4 (&a)[2]) {
  const unsigned w[8] = {a[0].x, a[0].y, a[0].z, a[0].w, a[1].x, a[1].y, a[1].z, a[1].w};
  __nv_bfloat162 m = as_bf16x2(0);
#pragma unroll
  for (int i = 0; i < 8; ++i) m = __hmax2(m, __habs2(as_bf16x2(w[i])));
  return fmaxf(__low2float(m), __high2float(m));
}

// A group of a row's query as two e4m3 parts with a ue8m0 scale for each block of 32: the upper four bits of each bf16 value and
// what they leave, 2^4 times finer. Exact but for values 2^13 times smaller than their block's largest, which lose what lies 2^-21
// below that. `raw` is [row half][block]; bytes 2k and 2k + 1 of `scales` are block k's, of row g in even lanes and g + 8 in odd ones.
[[maybe_unused]] __device__ __forceinline__ void split_query(unsigned (&q)[16], unsigned& scales, const uint4 (&raw)[2][2], const Lane& t) {
  unsigned bytes[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const unsigned w[4] = {raw[h][k].x, raw[h][k].y, raw[h][k].z, raw[h][k].w};
      __nv_bfloat162 pair = as_bf16x2(0);
#pragma unroll
      for (int i = 0; i < 4; ++i) pair = __hmax2(pair, __habs2(as_bf16x2(w[i])));
      float most = fmaxf(__low2float(pair), __high2float(pair));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      // the smallest power of two that brings it to 448 or below; an infinity makes the block NaN
      const int bits = __float_as_uint(most) >> 16, exponent = max((bits >> 7) - 127 - ((bits & 0x7f) > 0x60 ? 7 : 8), -120);
      const float factor = __uint_as_float(static_cast<unsigned>(127 - exponent) << 23);
      bytes[h] |= (bits >= 0x7f80 ? 0xffffu : static_cast<unsigned>(exponent + 127) | static_cast<unsigned>(exponent + 123) << 8) << (16 * k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) x[n] = __uint_as_float(n & 1 ? w[2 * i + n / 2] & 0xffff0000u : w[2 * i + n / 2] << 16) * factor;
        const unsigned upper = narrow(x);
        const unsigned low = widen_low(upper), high = widen_high(upper);
        const float2 u0 = __half22float2(*reinterpret_cast<const __half2*>(&low)), u1 = __half22float2(*reinterpret_cast<const __half2*>(&high));
        const float rest[4] = {(x[0] - u0.x) * 16.f, (x[1] - u0.y) * 16.f, (x[2] - u1.x) * 16.f, (x[3] - u1.y) * 16.f};
        q[8 * k + 2 * i + h] = upper;
        q[8 * k + 4 + 2 * i + h] = narrow(rest);
      }
    }
  scales = t.c & 1 ? bytes[1] : bytes[0];
}

// The block's barrier, also where warps reach it in different code.
__device__ __forceinline__ void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
__device__ __forceinline__ bool barrier_any(bool mine) {
  unsigned any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 0, p; selp.u32 %0, 1, 0, q; }"
      : "=r"(any) : "r"(static_cast<unsigned>(mine)) : "memory");
  return any != 0;
}

__device__ __forceinline__ unsigned multiply_f16(unsigned a, unsigned b) {
  const __half2 r = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const unsigned*>(&r);
}

// What a warp carries from step to step: its group's output sums, and of the two rows that a lane's probabilities belong to
// (w and w + 8 of the head tile) the softmax's reference and this lane's part of its sum.
template <int kHeadTiles>
struct State {
  float o[kHeadTiles][8][4] = {};
  float top[2] = {kNothing, kNothing}, sum[2] = {};
  int largest_scale = -1000;
};

// Goes through the block's tiles. Three barriers a step: before the scores its rows have to be there for all warps; behind
// the scores warp w adds the four shares of rows w and w + 8 and makes their probabilities; behind these every warp multiplies
// its group's values. `look_up` and `list` keep the list of tokens filled; `last` is called once, when half of the ring
// (16 heads) or all of it (32) is not needed any more.
template <bool kScaled, int kHeadTiles, class LookUp, class List, class Last>
__device__ __forceinline__ void attend(Smem<kHeadTiles>& sm, const Lane& t, const Query<kHeadTiles>& q, State<kHeadTiles>& state,
                                       const float (&row_scale)[2], int count, int base, const Gather& gather,
                                       LookUp look_up, List list, Last last) {
  using S = Step<kHeadTiles>;
  const int steps = (count + S::kSpan - 1) / S::kSpan, quarter = t.warp >> 1, half = t.warp & 1;
  // lane n takes care of token n's value scale: at column quad n & 3 for low columns, crosswise for high ones
  const int quad = t.lane & 4 ? (t.lane & 3) ^ 1 : t.lane & 3, column = 2 * (t.lane >> 3) + (t.lane >> 2 & 1);
  // this lane's part of the softmax: columns 2c and 2c + 1 of a slot
  const int slot = t.lane >> 2, head_tile = kHeadTiles == 1 ? 0 : slot >> 2;
  // where this lane's keys, values and scores begin: rows have their chunks swapped in twos
  const int key_row = row_of_column(t.g);
  const int keys = kept(key_row * kRowBytes + swizzle(key_row, 8 * quarter + t.c) * 16);
  const int value_at = t.warp < 7 ? swizzle(t.c, 4 * t.warp + (t.g >> 1)) * 16 + (t.g & 1) * 8 : swizzle(t.c, 28 + t.g) * 16;
  const int low_values = kept(value_at + t.c * kRowBytes), high_values = kept(value_at + (4 + (t.c ^ 1)) * kRowBytes);
  const int low_scales = kept(t.c * kScaleBytes + 2 * quarter), high_scales = kept((4 + (t.c ^ 1)) * kScaleBytes + 2 * quarter);
  const int place = kept((4 * t.warp + t.c + 4 * slot) & 31);
  float(&o)[kHeadTiles][8][4] = state.o;
  float(&top)[2] = state.top;
  int index = -1;
  bool refill = false;

  auto values = [&](int i) {
    const int tile = i * S::kSpan;
    auto stage_of = [&](int n) { return (tile + n + base) & (kRing - 1); };
    // rows that were never gathered may hold NaN
    const bool whole = S::kSpan == 1 || tile + 1 < count;
    auto fragment_of = [](int m, int s) { return kHeadTiles == 1 ? s : 2 * m + s; };
    auto tokens_of = [&](int s) { return sm.raw[stage_of(s >> 1)] + 16 * (s & 1) * kRowBytes; };
    if (t.warp < 7) {
      Values v[2 * S::kSpan];
#pragma unroll
      for (int s = 0; s < 2 * S::kSpan; ++s) v[s] = load_values(tokens_of(s) + low_values, tokens_of(s) + high_values);
      const uint4* factors = reinterpret_cast<const uint4*>(sm.value_factor[t.warp][t.c]);
#pragma unroll
      for (int s = 0; s < 2 * S::kSpan; ++s) {
        if (s == 2 && !whole) break;
        unsigned p[kHeadTiles][4];
        const uint4 f = factors[s >> 1];
        const unsigned f0 = s & 1 ? f.z : f.x, f1 = s & 1 ? f.w : f.y;
#pragma unroll
        for (int m = 0; m < kHeadTiles; ++m) {
          const int fragment = fragment_of(m, s);
          const uint4 v = sm.prob_f16[fragment][(t.lane + 4 * fragment) & 31];
          p[m][0] = multiply_f16(v.x, f0), p[m][1] = multiply_f16(v.y, f0);
          p[m][2] = multiply_f16(v.z, f1), p[m][3] = multiply_f16(v.w, f1);
        }
        multiply(o, p, v[s]);
      }
    } else {
#pragma unroll
      for (int s = 0; s < 2 * S::kSpan; ++s) {
        if (s == 2 && !whole) break;
        unsigned upper[kHeadTiles][4], rest[kHeadTiles][4];
#pragma unroll
        for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const uint4 v = sm.prob_bf16(2 * fragment_of(m, s) + k, t.lane);
            upper[m][2 * k] = v.x, upper[m][2 * k + 1] = v.y, rest[m][2 * k] = v.z, rest[m][2 * k + 1] = v.w;
          }
        multiply_rope(o, upper, rest, tokens_of(s) + low_values, tokens_of(s) + high_values);
      }
    }
  };

#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const int tile = i * S::kSpan;
    auto stage_of = [&](int n) { return (tile + n + base) & (kRing - 1); };
    // the copies of a later step, once the rows of the step before are free
    auto copy_ahead = [&] {
      if (i == 0) return;
#pragma unroll
      for (int n = 0; n < S::kSpan; ++n) {
        const int next = tile + S::kAhead * S::kSpan + n;
        if (next < count) gather(next, stage_of(S::kAhead * S::kSpan + n));
      }
      copy_commit();
    };
    if (kHeadTiles == 1 && i == steps - 1) last();
    if constexpr (S::kOverlap) {
      if (refill) list(sm.work, tile - S::kSpan + kListed, index);
    } else {
      copy_ahead();
    }
    // every fourth tile four more are listed: looked up here, written behind the barriers that follow the rows' last use
    refill = t.warp < 4 && (tile & 3) == 0 && tile + kListed < count;
    if (refill) index = look_up(sm.work, tile + kListed);

    if (S::kOverlap && i > 0) {
      values(i - 1);
      // the factors are all read
      __syncwarp();
    }

    // --- scores ---
    const int own = S::kSpan == 2 ? half : 0;  // this warp's tile of the step
    if (S::kSpan == 1 || tile + own < count) {
      const int skip = S::kSpan == 2 ? 0 : 16 * half;
      const unsigned char* tokens = sm.raw[stage_of(own)] + skip * kRowBytes;
      const unsigned char* scale = sm.scales[stage_of(own)] + skip * kScaleBytes;
      float a[kHeadTiles][S::kSlots][4], b[kHeadTiles][S::kSlots][4];
      if constexpr (kScaled) {
        if (quarter < 3) {
          scores_scaled<false>(a, q, tokens + keys, scale + 2 * quarter, t);
        } else {
          scores_scaled<true>(a, q, tokens + keys, scale + 2 * quarter, t);
        }
      } else {
        unsigned pairs[S::kSlots][2];
#pragma unroll
        for (int n = 0; n < S::kSlots; ++n) {
          pairs[n][0] = *reinterpret_cast<const unsigned short*>(scale + 8 * n * kScaleBytes + low_scales);
          pairs[n][1] = *reinterpret_cast<const unsigned short*>(scale + 8 * n * kScaleBytes + high_scales);
        }
        // 2^(byte - 127) times 1 + 2^-23, which all tokens share; so 255 is NaN, and 2^-127 becomes 0, which no score can tell
        auto shifted = [](unsigned v, unsigned by) {
          unsigned r;
          asm("mad.lo.u32 %0, %1, %2, 1;" : "=r"(r) : "r"(v), "r"(by));
          return __uint_as_float(r);
        };
        // the sign that the second byte leaves goes with fabsf, which costs nothing
        auto low = [&](unsigned v) { return fabsf(shifted(v, 1u << 23)); };
        auto high = [&](unsigned v) { return shifted(v & 0xff00u, 1u << 15); };
        if (quarter < 3) {
          scores<false>(a, b, q, tokens + keys);
#pragma unroll
          for (int n = 0; n < S::kSlots; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
              for (int m = 0; m < kHeadTiles; ++m) a[m][n][k] = fmaf(b[m][n][k], high(pairs[n][k & 1]), a[m][n][k] * low(pairs[n][k & 1]));
        } else {
          scores<true>(a, b, q, tokens + keys);
#pragma unroll
          for (int n = 0; n < S::kSlots; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
              for (int m = 0; m < kHeadTiles; ++m) a[m][n][k] = a[m][n][k] * low(pairs[n][k & 1]) + b[m][n][k];
        }
      }
      // turned by 64 bytes from slot to slot, so that the reads below touch all banks
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
        for (int n = 0; n < S::kSlots; ++n) {
          const int to = 4 * (S::kSpan == 2 ? half : m) + (S::kSpan == 2 ? n : 2 * half + n);
          sm.exchange[quarter][to][(t.lane + 4 * to) & 31] = make_float4(a[m][n][0], a[m][n][1], a[m][n][2], a[m][n][3]);
        }
    }
    // the scales of this warp's values
    if (t.warp < 7) {
      int byte[S::kSpan];
      bool above = false;
#pragma unroll
      for (int n = 0; n < S::kSpan; ++n) {
        byte[n] = tile + n < count ? sm.scales[stage_of(n)][t.lane * kScaleBytes + t.warp] : 0;
        above |= byte[n] > state.largest_scale + kScaleSlack;
      }
      if (__any_sync(~0u, above)) {
        int most = 0;
#pragma unroll
        for (int n = 0; n < S::kSpan; ++n) most = max(most, byte[n] == 255 ? 0 : byte[n]);
        most = __reduce_max_sync(~0u, most);
        if (most > state.largest_scale) {
          const float alpha = exp2_fast(static_cast<float>(state.largest_scale - most));
#pragma unroll
          for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
              for (int k = 0; k < 4; ++k) o[m][n][k] *= alpha;
          state.largest_scale = most;
        }
      }
      // 2^(byte - largest + lift) in f16, 0 below 2^-14
#pragma unroll
      for (int n = 0; n < S::kSpan; ++n)
        sm.value_factor[t.warp][quad][column + 8 * n] =
            static_cast<unsigned short>(min(max(byte[n] - state.largest_scale + kLift + 15, 0), 30) << 10);
    }
    barrier();
    if constexpr (S::kOverlap) copy_ahead();

    // --- probabilities ---
    float4 x;
    {
      float4 w[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) w[n] = sm.exchange[n][slot][place];
      x.x = (w[0].x + w[1].x) + (w[2].x + w[3].x);
      x.y = (w[0].y + w[1].y) + (w[2].y + w[3].y);
      x.z = (w[0].z + w[1].z) + (w[2].z + w[3].z);
      x.w = (w[0].w + w[1].w) + (w[2].w + w[3].w);
    }
    const int listed = S::kSpan == 2 ? tile + (slot >> 2) : tile;
    const unsigned valid = listed < count ? sm.valid[listed % (2 * kListed)] >> (8 * (slot & 3)) : 0;
    const bool low = valid >> t.c & 1, high = valid >> (4 + (t.c ^ 1)) & 1;
    x.x = low ? x.x * row_scale[0] : -INFINITY;
    x.y = high ? x.y * row_scale[0] : -INFINITY;
    x.z = low ? x.z * row_scale[1] : -INFINITY;
    x.w = high ? x.w * row_scale[1] : -INFINITY;
    float m0 = fmaxf(x.x, x.y), m1 = fmaxf(x.z, x.w), alpha0 = 1.f, alpha1 = 1.f;
    const bool moved = __any_sync(~0u, m0 > top[0] + kScoreSlack || m1 > top[1] + kScoreSlack);
    if (moved) {
#pragma unroll
      for (int d = 1; d < (kHeadTiles == 1 ? 32 : 16); d *= 2) {
        m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, d));
        m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, d));
      }
      // whole numbers: blocks that see other maxima then differ by powers of two, which f16 probabilities do not round
      m0 = ceilf(m0), m1 = ceilf(m1);
      if (m0 > top[0] + kScoreSlack) {
        alpha0 = exp2_fast(top[0] - m0);
        top[0] = m0;
      }
      if (m1 > top[1] + kScoreSlack) {
        alpha1 = exp2_fast(top[1] - m1);
        top[1] = m1;
      }
    }
    x.x = exp2_fast(x.x - top[0]);
    x.y = exp2_fast(x.y - top[0]);
    x.z = exp2_fast(x.z - top[1]);
    x.w = exp2_fast(x.w - top[1]);
    state.sum[0] = state.sum[0] * alpha0 + (x.x + x.y);
    state.sum[1] = state.sum[1] * alpha1 + (x.z + x.w);
    {
      const int fragment = slot >> 1, at = (4 * t.warp + t.c + 4 * fragment) & 31;
      reinterpret_cast<uint2*>(&sm.prob_f16[fragment][at])[slot & 1] = make_uint2(pack<false>(x.x, x.y), pack<false>(x.z, x.w));
      // bf16 and what it leaves: no value of one token may be off by 2^-9. Scores that they replace were this lane's to read.
      const unsigned upper0 = pack<true>(x.x, x.y), upper1 = pack<true>(x.z, x.w);
      const unsigned rest0 = pack<true>(x.x - __uint_as_float(upper0 << 16), x.y - __uint_as_float(upper0 & 0xffff0000u));
      const unsigned rest1 = pack<true>(x.z - __uint_as_float(upper1 << 16), x.w - __uint_as_float(upper1 & 0xffff0000u));
      sm.prob_bf16(slot, 4 * t.warp + t.c) = make_uint4(upper0, upper1, rest0, rest1);
    }
    if ((t.lane & (kHeadTiles == 1 ? 31 : 15)) == 0) {
      sm.alpha[16 * head_tile + t.warp] = alpha0;
      sm.alpha[16 * head_tile + t.warp + 8] = alpha1;
    }
    if (S::kOverlap && i + 1 < steps) copy_wait<S::kAhead - 1>();
    if (barrier_any(moved)) {
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        const float shrink[2] = {sm.alpha[16 * m + t.g], sm.alpha[16 * m + t.g + 8]};
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int k = 0; k < 4; ++k) o[m][n][k] *= shrink[k >> 1];
      }
    }

    if constexpr (!S::kOverlap) {
      if (refill) list(sm.work, tile + kListed, index);
      values(i);
      if (i + 1 < steps) {
        copy_wait<S::kAhead - 1>();
        barrier();
      }
    }
  }
  if (S::kOverlap && steps > 0) values(steps - 1);
#pragma unroll
  for (int d = 1; d < (kHeadTiles == 1 ? 32 : 16); d *= 2) {
    state.sum[0] += __shfl_xor_sync(~0u, state.sum[0], d);
    state.sum[1] += __shfl_xor_sync(~0u, state.sum[1], d);
  }
}

__device__ __forceinline__ float4 weighted(float4 acc, float w, float4 v) {
  return make_float4(acc.x + w * v.x, acc.y + w * v.y, acc.z + w * v.z, acc.w + w * v.w);
}

// The factor of a row's merged sums, and its lse. The sink enters here and nowhere else, once a row.
__device__ __forceinline__ float finish(const Params& p, float sink_log2, int row, int head, float top, float softmax_top, float sum,
                                        bool with_lse) {
  if (head >= p.heads) return 0.f;
  const float denominator = sum + exp2_fast(sink_log2 - softmax_top);
  if (with_lse && p.lse != nullptr)
    p.lse[static_cast<long long>(row) * p.heads + head] = sum == 0.f ? -INFINITY : (softmax_top + __log2f(sum)) * kLn2;
  // not `sum > 0`: a NaN has to come out
  return sum == 0.f ? 0.f : exp2_fast(top - softmax_top) / denominator;
}

__device__ __forceinline__ void store_output(const Params& p, float4 v, int row, int head, int dim) {
  if (head >= p.heads) return;
  const uint2 packed = make_uint2(pack<true>(v.x, v.y), pack<true>(v.z, v.w));
  *reinterpret_cast<uint2*>(p.out + row * p.out_row + head * p.out_head + dim) = packed;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ unsigned peer_address(unsigned mine, int rank) {
  unsigned r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(mine), "r"(rank));
  return r;
}
// Stores into a peer's shared memory that count on the peer's mbarrier.
__device__ __forceinline__ void push(unsigned to, unsigned barrier, float4 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void push(unsigned to, unsigned barrier, float v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "f"(v), "r"(barrier) : "memory");
}

// The blocks of a cluster share a unit of work.
// kScaled: scores by block-scaled mma.
template <bool kScaled, int kCluster, int kHeadTiles>
__device__ __forceinline__ void decode(const Params& p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Smem<kHeadTiles>& sm = *reinterpret_cast<Smem<kHeadTiles>*>(memory);
  constexpr int kHeads = 16 * kHeadTiles;
  Lane t;
  t.lane = threadIdx.x & 31;
  // broadcast, so that the compiler knows it uniform
  t.warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  t.g = t.lane >> 2;
  t.c = t.lane & 3;
  const int rank = kCluster == 1 ? 0 : blockIdx.x % kCluster;
  const int head0 = kHeads * blockIdx.y;
  const long long unit = blockIdx.x / kCluster;

  // Without a plan a unit is a row, and taken for full until its lengths are known: its first indices travel meanwhile.
  int row = static_cast<int>(unit), part = 0, parts = 1, begin = 0, length0 = p.scope[0].width, length1 = p.scope[1].width;
  int end = tiles_of(length0) + tiles_of(length1);
  long long slot = 0;
  if (p.items != nullptr) {
    // {row, first tile, end tile, part | parts << 16}, {length 0, length 1, slot of part 0, unused}
    const int4 work = __ldg(reinterpret_cast<const int4*>(p.items) + 2 * unit);
    const int4 planned = __ldg(reinterpret_cast<const int4*>(p.items) + 2 * unit + 1);
    row = work.x;
    begin = work.y, end = work.z;
    part = work.w & 0xffff, parts = work.w >> 16;
    length0 = planned.x, length1 = planned.y, slot = planned.z;
  }
  // the whole cluster leaves together
  if (row < 0 || row >= p.rows) return;

  Work work;
  auto share = [&] {
    const int tiles0 = tiles_of(length0), tile = begin + (end - begin) * rank / kCluster;
    work = {row, tile, begin + (end - begin) * (rank + 1) / kCluster - tile, tiles0, length0, length1, part, parts, slot};
  };
  // this lane's token of the block's tile j + warp, -1 for none
  auto look_up = [&](const Work& w, int j) -> int {
    j += t.warp;
    const int at = w.tile + j;
    const bool first = at < w.tiles0;
    const int position = (first ? at : at - w.tiles0) * kTile + t.lane;
    const int* from = (first ? p.scope[0].indices : p.scope[1].indices) + w.row * (first ? p.scope[0].indices_stride : p.scope[1].indices_stride);
    return load_or(j >= w.count || position >= (first ? w.length0 : w.length1) ? nullptr : from + position, -1);
  };
  auto list = [&](const Work& w, int j, int index) {
    j += t.warp;
    const bool first = w.tile + j < w.tiles0;
    const int shift = first ? p.scope[0].page_shift : p.scope[1].page_shift;
    const unsigned char* cache = first ? p.scope[0].cache : p.scope[1].cache;
    const int offset = index & ((1 << shift) - 1);
    const unsigned char* page = cache + (index >> shift) * (first ? p.scope[0].pitch : p.scope[1].pitch);
    const unsigned char* at = page + offset * kRowBytes;
    const unsigned char* scale = page + (static_cast<long long>(kRowBytes) << shift) + offset * kScaleBytes;
    if (index < 0) at = scale = reinterpret_cast<const unsigned char*>(kZeroRow);
    sm.row_at[j % kListed][t.lane] = reinterpret_cast<unsigned long long>(at);
    sm.scale_behind[j % kListed][t.lane] = static_cast<int>(scale - at);
    const unsigned mask = __ballot_sync(~0u, index >= 0);
    if (t.lane == 0) sm.valid[j % (2 * kListed)] = mask;
  };
  share();
  int index = look_up(work, 0);
  int actual0 = load_or(p.scope[0].lengths == nullptr ? nullptr : p.scope[0].lengths + row, p.scope[0].width);
  int actual1 = load_or(p.scope[1].lengths == nullptr ? nullptr : p.scope[1].lengths + row, p.scope[1].width);
  const int sink_head = head0 + threadIdx.x % kHeads;
  const int sink = load_or(reinterpret_cast<const int*>(p.sink == nullptr || sink_head >= p.heads ? nullptr : p.sink + sink_head),
                           __float_as_int(-INFINITY));

  const int quarter = t.warp >> 1;
  uint4 raw[kHeadTiles][2][2][2];  // [head tile][group of the quarter][row half][16 bytes]
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = head0 + 16 * m + t.g + 8 * h;
      const __nv_bfloat16* from = head < p.heads ? p.q + row * p.q_row + head * p.q_head + 128 * quarter : nullptr;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const bool rope = k == 1 && quarter == 3;
        raw[m][k][h][0] = load_query(from, 64 * k + (rope ? 8 * t.c : 16 * t.c));
        raw[m][k][h][1] = load_query(from, 64 * k + (rope ? 8 * t.c + 32 : 16 * t.c + 8));
      }
    }
  // the slices: units of 64 pieces of 4 sums each, dealt out to the blocks in turn
  constexpr int kUnits = 32 * kHeadTiles, kMost = (kUnits + kCluster - 1) / kCluster;
  const int mine = (kUnits - rank + kCluster - 1) / kCluster;
  float4* received = reinterpret_cast<float4*>(&sm.raw[0][0]);
  Side<kHeadTiles>* sides = reinterpret_cast<Side<kHeadTiles>*>(&sm.row_at[0][0]);
  static_assert(kCluster * kMost * 1024 <= sizeof(sm.raw) / (kHeadTiles == 1 ? 2 : 1), "sums of the cluster's blocks reuse the ring");
  const unsigned arrived = smem_address(&sm.arrived);
  if (kCluster > 1 && threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  actual0 = min(max(actual0, 0), p.scope[0].width), actual1 = min(max(actual1, 0), p.scope[1].width);
  if (actual0 != length0 || actual1 != length1) {
    // A plan of other lengths stays right, and slow: the row's first unit takes all of it.
    if (part != 0) return;
    parts = 1;
    length0 = actual0, length1 = actual1;
    begin = 0, end = tiles_of(length0) + tiles_of(length1);
    share();
    index = look_up(work, 0);
  }
  list(work, 0, index);
  if (threadIdx.x < kHeads) sm.sink_log2[threadIdx.x] = __int_as_float(sink) * kLog2e;
  if (threadIdx.x == 0) sm.work = work;
  const int count = work.count;
  // With 16 heads the last step lies in the ring's second half: the first one then receives.
  const int base = kHeadTiles == 1 ? (count + 1 & 2) : 0;
  const Gather gather(sm, t);
  barrier();
  if (kCluster > 1 && threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                 "r"(kCluster * (mine * 1024 + static_cast<int>(sizeof(Side<kHeadTiles>))))
                 : "memory");
  }
#pragma unroll 1
  for (int j = 0; j < kRing; ++j) {
    if (j < count) gather(j, (j + base) & (kRing - 1));
    // an empty group keeps the count of groups
    if (kHeadTiles == 2 || (j & 1)) copy_commit();
  }

  // Query fragments, while the first tiles travel.
  Query<kHeadTiles> q;
  float row_scale[2];  // of the rows whose softmax this lane works on: what scores are multiplied by
  if constexpr (kScaled) {
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
      split_query(q.part[m][0], q.scales[m][0], raw[m][0], t);
      if (quarter < 3) {
        split_query(q.part[m][1], q.scales[m][1], raw[m][1], t);
      } else {
        query_fragments<true>(q.part[m][1], raw[m][1][0], as_bf16x2(0x3f803f80u), 0);
        query_fragments<true>(q.part[m][1], raw[m][1][1], as_bf16x2(0x3f803f80u), 1);
      }
    }
    row_scale[0] = row_scale[1] = p.scale_log2;
  } else {
    // the exchange is not in use yet
    float(*query_top)[kHeads] = reinterpret_cast<float(*)[kHeads]>(&sm.exchange[0][0][0]);
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float v = fmaxf(largest(raw[m][0][h]), largest(raw[m][1][h]));
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 2));
        if (t.c == 0 && t.warp % 2 == 0) query_top[quarter][16 * m + t.g + 8 * h] = v;
      }
    barrier();
    // zeros, infinities and the far ends keep the factor a normal number; an infinity stays one
    auto exponent_of = [&](int r) {
      float v = 0.f;
#pragma unroll
      for (int n = 0; n < 4; ++n) v = fmaxf(v, query_top[n][r]);
      return min(max(static_cast<int>(__float_as_uint(v) >> 23) - 127, -100), 100);
    };
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const __nv_bfloat162 factor = as_bf16x2(static_cast<unsigned>(11 - exponent_of(16 * m + t.g + 8 * h) + 127) * 0x00800080u);
        query_fragments<false>(q.part[m][0], raw[m][0][h], factor, h);
        if (quarter < 3) {
          query_fragments<false>(q.part[m][1], raw[m][1][h], factor, h);
        } else {
          query_fragments<true>(q.part[m][1], raw[m][1][h], factor, h);
        }
      }
    // what the query was multiplied by taken out again
#pragma unroll
    for (int h = 0; h < 2; ++h)
      row_scale[h] = p.scale_log2 *
                     __uint_as_float(static_cast<unsigned>(exponent_of((kHeadTiles == 1 ? 0 : t.lane & 16) + t.warp + 8 * h) - 11 + 127) << 23);
  }

  State<kHeadTiles> state;
  copy_wait<Step<kHeadTiles>::kAhead>();
  barrier();
  if (kCluster > 1 && kHeadTiles == 1 && count == 0) cluster_arrive();
  attend<kScaled, kHeadTiles>(sm, t, q, state, row_scale, count, base, gather, look_up, list, [] {
    if constexpr (kCluster > 1 && kHeadTiles == 1) cluster_arrive();
  });

  // --- merge ---------------------------------------------------------------------------------------------------------
  // Sums in fragment order: [head tile][group][2 rows x 4 pieces of 4 dimensions][lane]. Piece k of lane (g, c) and half h
  // holds head g + 8 h and dimensions 16 c + 4 k ... + 3 of the group.
  if constexpr (kHeadTiles == 2 || kCluster == 1) barrier();
  if constexpr (kCluster > 1) {
    if constexpr (kHeadTiles == 2) cluster_arrive();
    cluster_wait();
  }
  const float shift = t.warp < 7 ? static_cast<float>(state.largest_scale - 127 - kLift) : 0.f;
  const float4 softmax = make_float4(state.top[0], state.sum[0], state.top[1], state.sum[1]);
  if constexpr (kCluster == 1) {
    if (t.lane % 16 == 0 && t.lane < 16 * kHeadTiles) sides->rows[t.lane >> 4][t.warp] = softmax;
    if (t.lane == 0) sides->shift[t.warp] = shift;
  } else if (t.lane % 16 < kCluster && t.lane < 16 * kHeadTiles) {
    const unsigned to = peer_address(smem_address(&sides[rank].rows[t.lane >> 4][t.warp]), t.lane % 16);
    const unsigned counter = peer_address(arrived, t.lane % 16);
    push(to, counter, softmax);
    if (t.lane < 16) push(peer_address(smem_address(&sides[rank].shift[t.warp]), t.lane), counter, shift);
  }
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int n = 4 * (j & 1), r = 2 * (j >> 2) + (j >> 1 & 1), u = 4 * (8 * m + t.warp) + (j >> 1);
      const float4 v = make_float4(state.o[m][n][r], state.o[m][n + 1][r], state.o[m][n + 2][r], state.o[m][n + 3][r]);
      float4* to = received + (rank * kMost + u / kCluster) * 64 + 32 * (j & 1) + t.lane;
      if constexpr (kCluster == 1) {
        *to = v;
      } else {
        push(peer_address(smem_address(to), u % kCluster), peer_address(arrived, u % kCluster), v);
      }
    }
  row = sm.work.row, part = sm.work.part, parts = sm.work.parts, slot = sm.work.slot;
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    asm volatile("{ .reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra wait; }" ::"r"(arrived) : "memory");
  }

  constexpr int kPairs = kGroups * kHeads;
  float* weights = reinterpret_cast<float*>(sm.exchange[1]);
  auto record = [&](int n) -> float* { return p.partial + ((slot + n) * gridDim.y + blockIdx.y) * (kHeadTiles * kRecordFloats); };
  // each block keeps a copy of exponents and sums, so that a slice depends on blocks of its own rank alone
  const int side = kHeads * 512 + rank * (kHeadTiles * kRecordSide);
  // one thread for each head and group
  const int pair_head = 16 * (threadIdx.x >> 7) + threadIdx.x % 16, pair_group = threadIdx.x / 16 % kGroups;
  if (threadIdx.x < kPairs) {
    float e[kCluster], m[kCluster], l[kCluster];
#pragma unroll
    for (int i = 0; i < kCluster; ++i) {
      const float* rows = reinterpret_cast<const float*>(&sides[i].rows[pair_head >> 4][pair_head & 7]) + (pair_head >> 2 & 2);
      m[i] = rows[0];
      l[i] = rows[1];
      e[i] = m[i] + sides[i].shift[pair_group];
    }
    float top = kNothing, softmax_top = kNothing, total = 0.f;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) top = fmaxf(top, e[i]), softmax_top = fmaxf(softmax_top, m[i]);
#pragma unroll
    for (int i = 0; i < kCluster; ++i) total += exp2_fast(m[i] - softmax_top) * l[i];
    float factor = 1.f;
    if (parts == 1) {
      factor = finish(p, sm.sink_log2[pair_head], row, head0 + pair_head, top, softmax_top, total, rank == 0 && pair_group == 0);
    } else {
      float* to = record(part) + side;
      to[threadIdx.x] = pair_group == kGroups - 1 ? softmax_top : top;
      if (pair_group == 0) to[kPairs + pair_head] = total;
    }
#pragma unroll
    for (int i = 0; i < kCluster; ++i) weights[i * kPairs + threadIdx.x] = exp2_fast(e[i] - top) * factor;
  }
  __syncthreads();
  // a piece of this block's slice: where in its list, where in fragment order, of which pair, head and dimension
  struct Piece {
    int at, pair, head, dim;
  };
  auto piece_of = [&](int n) -> Piece {
    const int at = ((n >> 6) * kCluster + rank) * 64 + (n & 63), group = at >> 8 & 7, piece = at >> 5 & 7;
    const int head = (at >> 2 & 7) + 8 * (piece >> 2), tile = at >> 11;
    return {at, kGroups * 16 * tile + 16 * group + head, 16 * tile + head, 64 * group + 16 * (at & 3) + 4 * (piece & 3)};
  };
#pragma unroll 1
  for (int n = threadIdx.x; n < 64 * mine; n += kThreads) {
    const Piece piece = piece_of(n);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kCluster; ++i) v = weighted(v, weights[i * kPairs + piece.pair], received[i * kMost * 64 + n]);
    if (parts == 1) {
      store_output(p, v, row, head0 + piece.head, piece.dim);
    } else {
      reinterpret_cast<float4*>(record(part))[piece.at] = v;
    }
  }
  if (parts == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    // wraps to 0 at the last arrival: ready for the next launch
    unsigned* counter = p.counters + (slot * gridDim.y + blockIdx.y) * kCluster + rank;
    sm.last = atomicInc(counter, parts - 1) == static_cast<unsigned>(parts - 1);
  }
  __syncthreads();
  if (!sm.last) return;
  __threadfence();
  float* tops = weights;
  float* factors = weights + kPairs;
  if (threadIdx.x < kPairs) {
    float top = kNothing, softmax_top = kNothing, total = 0.f;
    const int softmax_at = side + kGroups * 16 * (pair_head >> 4) + (kGroups - 1) * 16 + pair_head % 16;
#pragma unroll 8
    for (int i = 0; i < parts; ++i) {
      top = fmaxf(top, __ldcg(record(i) + side + threadIdx.x));
      softmax_top = fmaxf(softmax_top, __ldcg(record(i) + softmax_at));
    }
#pragma unroll 8
    for (int i = 0; i < parts; ++i) total += exp2_fast(__ldcg(record(i) + softmax_at) - softmax_top) * __ldcg(record(i) + side + kPairs + pair_head);
    tops[threadIdx.x] = top;
    factors[threadIdx.x] = finish(p, sm.sink_log2[pair_head], row, head0 + pair_head, top, softmax_top, total, rank == 0 && pair_group == 0);
  }
  __syncthreads();
#pragma unroll 1
  for (int n = threadIdx.x; n < 64 * mine; n += kThreads) {
    const Piece piece = piece_of(n);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int i = 0; i < parts; ++i)
      v = weighted(v, exp2_fast(__ldcg(record(i) + side + piece.pair) - tops[piece.pair]),
                   __ldcg(reinterpret_cast<const float4*>(record(i)) + piece.at));
    const float f = factors[piece.pair];
    store_output(p, make_float4(v.x * f, v.y * f, v.z * f, v.w * f), row, head0 + piece.head, piece.dim);
  }
}

template <int kCluster, int kHeadTiles>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_decode(const __grid_constant__ Params p) {
  decode<false, kCluster, kHeadTiles>(p);
}

// The launcher refuses it where it is empty.
template <int kCluster>
__global__ void __launch_bounds__(kThreads, 1) sparse_mla_decode_scaled(const __grid_constant__ Params p) {
#if DSV4_BLOCK_SCALING
  decode<true, kCluster, 1>(p);
#endif
}

// Divides the rows' tiles into at most `budget` units (budget >= rows): every row at least one, no unit more than the
// smallest number of tiles with which that fits, but never fewer than `least`. One block; once a step.
__global__ void __launch_bounds__(kPlanThreads) sparse_mla_plan(
    const Scope s0, const Scope s1, int rows, int budget, int least, int* items, unsigned* counters, int n_counters) {
  __shared__ int warp_a[32], warp_b[32];
  __shared__ int total_a, total_b;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto tiles = [&](int r) { return tiles_of(clamped_length(s0, r)) + tiles_of(clamped_length(s1, r)); };
  const int mine = threadIdx.x < rows ? tiles(threadIdx.x) : 0;
  auto tiles_cached = [&](int r) { return r == static_cast<int>(threadIdx.x) ? mine : tiles(r); };

  // an aborted launch can leave a counter off zero
  for (int i = threadIdx.x; i < n_counters; i += kPlanThreads) counters[i] = 0;

  auto reduce = [&](int v, bool maximum) {
    __syncthreads();
    v = maximum ? __reduce_max_sync(~0u, v) : __reduce_add_sync(~0u, v);
    if (lane == 0) warp_a[warp] = v;
    __syncthreads();
    v = maximum ? __reduce_max_sync(~0u, warp_a[lane]) : __reduce_add_sync(~0u, warp_a[lane]);
    return v;
  };
  int longest = 1;
  for (int r = threadIdx.x; r < rows; r += kPlanThreads) longest = max(longest, tiles_cached(r));
  longest = reduce(longest, true);
  int low = min(least, longest), high = longest;
  while (low < high) {
    const int middle = (low + high) / 2;
    int units = 0;
    for (int r = threadIdx.x; r < rows; r += kPlanThreads) units += max(1, (tiles_cached(r) + middle - 1) / middle);
    units = reduce(units, false);
    if (units <= budget) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }

  int unit_base = 0, slot_base = 0;
  for (int first = 0; first < rows; first += kPlanThreads) {
    const int r = first + threadIdx.x;
    const int n = r < rows ? tiles_cached(r) : 0;
    const int parts = r < rows ? max(1, (n + low - 1) / low) : 0;
    const int slots = parts > 1 ? parts : 0;
    int a = parts, b = slots;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int x = __shfl_up_sync(~0u, a, d), y = __shfl_up_sync(~0u, b, d);
      if (lane >= d) a += x, b += y;
    }
    __syncthreads();
    if (lane == 31) warp_a[warp] = a, warp_b[warp] = b;
    __syncthreads();
    if (warp == 0) {
      int x = warp_a[lane], y = warp_b[lane];
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int u = __shfl_up_sync(~0u, x, d), v = __shfl_up_sync(~0u, y, d);
        if (lane >= d) x += u, y += v;
      }
      warp_a[lane] = x, warp_b[lane] = y;
      if (lane == 31) total_a = x, total_b = y;
    }
    __syncthreads();
    const int unit = unit_base + a - parts + (warp ? warp_a[warp - 1] : 0);
    const int slot = slot_base + b - slots + (warp ? warp_b[warp - 1] : 0);
    if (r < rows) {
      const int l0 = clamped_length(s0, r), l1 = clamped_length(s1, r);
      for (int i = 0; i < parts; ++i) {
        int4* to = reinterpret_cast<int4*>(items) + 2 * static_cast<long long>(unit + i);
        const long long wide = n;
        to[0] = make_int4(r, static_cast<int>(wide * i / parts), static_cast<int>(wide * (i + 1) / parts), i | parts << 16);
        to[1] = make_int4(l0, l1, slot, 0);
      }
    }
    unit_base += total_a, slot_base += total_b;
    __syncthreads();
  }
  for (int i = unit_base + threadIdx.x; i < budget; i += kPlanThreads)
    reinterpret_cast<int4*>(items)[2 * static_cast<long long>(i)] = make_int4(-1, 0, 0, 0);
}

template <bool kScaled, int kCluster, int kHeadTiles>
constexpr auto kernel_of() {
  if constexpr (kScaled) {
    static_assert(kHeadTiles == 1, "block scaling is made for 16 heads a block");
    return sparse_mla_decode_scaled<kCluster>;
  } else {
    return sparse_mla_decode<kCluster, kHeadTiles>;
  }
}

// Calls `what` with the form as constants: scaled, cluster, head tiles. kBadArgument for one that does not exist.
template <class What>
int with_form(int cluster, int head_tiles, bool scaled, What what) {
  using std::integral_constant;
  switch (cluster) {
#define DSV4_FORMS(size)                                                                                                      \
  case size:                                                                                                                  \
    if (scaled && head_tiles == 1) return what(std::true_type(), integral_constant<int, size>(), integral_constant<int, 1>());  \
    if (!scaled && head_tiles == 1) return what(std::false_type(), integral_constant<int, size>(), integral_constant<int, 1>()); \
    if (!scaled && head_tiles == 2) return what(std::false_type(), integral_constant<int, size>(), integral_constant<int, 2>()); \
    return dsv4::kBadArgument;
    DSV4_CLUSTERS(DSV4_FORMS)
#undef DSV4_FORMS
    default: return dsv4::kBadArgument;
  }
}

// A launch's configuration; the attribute has to live as long.
template <int kHeadTiles>
cudaLaunchConfig_t configuration(int cluster, int units, int head_blocks, cudaStream_t stream, cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(units) * cluster, head_blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = smem_bytes<kHeadTiles>();
  config.stream = stream;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return config;
}

// Once for each kernel and device: allows the shared memory, and refuses a kernel that is empty on this architecture.
template <bool kScaled, int kCluster, int kHeadTiles>
cudaError_t prepare() {
  static bool ready[64] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || (device < 64 && ready[device])) return error;
  constexpr auto kernel = kernel_of<kScaled, kCluster, kHeadTiles>();
  if constexpr (kScaled) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess && attributes.binaryVersion < 120) error = cudaErrorNoKernelImageForDevice;
    if (error != cudaSuccess) return error;
  }
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes<kHeadTiles>());
  if (error == cudaSuccess && device < 64) ready[device] = true;
  return error;
}

template <bool kScaled, int kCluster, int kHeadTiles>
cudaError_t launch(const Params& p, int units, cudaStream_t stream) {
  const cudaError_t error = prepare<kScaled, kCluster, kHeadTiles>();
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  const int head_blocks = (p.heads + 16 * kHeadTiles - 1) / (16 * kHeadTiles);
  const cudaLaunchConfig_t config = configuration<kHeadTiles>(kCluster, units, head_blocks, stream, attribute);
  return cudaLaunchKernelEx(&config, kernel_of<kScaled, kCluster, kHeadTiles>(), p);
}

template <int kCluster>
cudaError_t active_clusters(int* found) {
  const cudaError_t error = prepare<false, kCluster, 1>();
  if (error != cudaSuccess) return error;
  constexpr auto kernel = kernel_of<false, kCluster, 1>();
  if constexpr (kCluster == 1) {
    int device = 0, sms = 0, blocks = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    const cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, smem_bytes<1>());
    *found = sms * blocks;
    return e;
  } else {
    cudaLaunchAttribute attribute = {};
    const cudaLaunchConfig_t config = configuration<1>(kCluster, 1, 1, nullptr, attribute);
    return cudaOccupancyMaxActiveClusters(found, kernel, &config);
  }
}

bool scope_is_sound(const Scope& s) {
  return s.page_shift >= 0 && s.page_shift <= 16 && s.width >= 0 && s.pitch >= (584ll << s.page_shift) && s.pitch % 16 == 0 &&
         reinterpret_cast<uintptr_t>(s.cache) % 16 == 0 && (s.width == 0 || s.indices != nullptr);
}

}  // namespace

// Sizes that the caller needs for its buffers: 0 ints of an item, 1 floats of a record, 2 tokens of a tile.
DSV4_EXPORT int dsv4_sparse_mla_constant(int what) {
  constexpr int values[] = {kItemInts, kRecordFloats, kTile, kThreads, smem_bytes<1>()};
  return what >= 0 && what < 5 ? values[what] : dsv4::kBadArgument;
}

// Writes `budget` items of 8 ints and zeroes the counters. lengths1 may be null with width1 0 (no second scope); lengths0
// and lengths1 may be null for rows of full width.
DSV4_EXPORT int dsv4_sparse_mla_plan(const int* lengths0, int width0, int has1, const int* lengths1, int width1, int rows,
                                     int budget, int least, int* items, unsigned* counters, int n_counters, void* stream) {
  if (rows < 1 || budget < rows || least < 1 || width0 < 0 || width1 < 0 || items == nullptr) return dsv4::kBadArgument;
  Scope s0 = {}, s1 = {};
  static const unsigned char present = 0;
  // only told apart from null
  s0.cache = &present, s0.lengths = lengths0, s0.width = width0;
  s1.cache = has1 ? &present : nullptr, s1.lengths = lengths1, s1.width = width1;
  sparse_mla_plan<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(s0, s1, rows, budget, least, items, counters, n_counters);
  return cudaGetLastError();
}

// One layer. All strides are in elements of their tensor but `pitch`, which is in bytes. `cluster`: blocks of a unit, the same as
// the one that the counters were sized for. `head_tiles`: 1 or 2, blocks of 16 or 32 heads. `scaled`: not 0 for scores by block-scaled
// mma, 16 heads a block, code for sm_120a alone. `items` may be null where budget
// equals rows; partial and counters then are not used.
DSV4_EXPORT int dsv4_sparse_mla_decode(
    const void* q, int64_t q_row, int64_t q_head, int rows, int heads,                                                //
    const void* cache0, int64_t pitch0, int shift0, const int* indices0, int64_t stride0, const int* lengths0, int width0,  //
    const void* cache1, int64_t pitch1, int shift1, const int* indices1, int64_t stride1, const int* lengths1, int width1,  //
    const float* sink, float softmax_scale, void* out, int64_t out_row, int64_t out_head, float* lse,                 //
    const int* items, int units, float* partial, unsigned* counters, int cluster, int head_tiles, int scaled, void* stream) {
  Params p = {};
  p.q = static_cast<const __nv_bfloat16*>(q), p.q_row = q_row, p.q_head = q_head;
  p.scope[0] = {static_cast<const unsigned char*>(cache0), pitch0, indices0, stride0, lengths0, width0, shift0};
  p.scope[1] = {static_cast<const unsigned char*>(cache1), pitch1, indices1, stride1, lengths1, width1, shift1};
  p.sink = sink, p.out = static_cast<__nv_bfloat16*>(out), p.out_row = out_row, p.out_head = out_head, p.lse = lse;
  p.items = items, p.partial = partial, p.counters = counters, p.rows = rows, p.heads = heads;
  p.scale_log2 = softmax_scale * kLog2e;
  if (rows < 1 || heads < 1 || units < rows || cache0 == nullptr || !scope_is_sound(p.scope[0])) return dsv4::kBadArgument;
  if (cache1 != nullptr && !scope_is_sound(p.scope[1])) return dsv4::kBadArgument;
  if ((q_row | q_head | out_row | out_head) % 8 != 0) return dsv4::kBadArgument;
  if ((reinterpret_cast<uintptr_t>(q) | reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(items)) % 16 != 0)
    return dsv4::kBadArgument;
  const int error = with_form(cluster, head_tiles, scaled != 0, [&](auto scales, auto size, auto tiles) -> int {
    return launch<decltype(scales)::value, decltype(size)::value, decltype(tiles)::value>(p, units, static_cast<cudaStream_t>(stream));
  });
  return error == cudaErrorNoKernelImageForDevice ? dsv4::kNoCode : error;
}

// Gives how many clusters of a size run at the same time on the current GPU, in any form.
DSV4_EXPORT int dsv4_sparse_mla_active_clusters(int cluster, int* found) {
  return with_form(cluster, 1, false, [&](auto, auto size, auto) -> int { return active_clusters<decltype(size)::value>(found); });
}


// Gives the id of the capture that a stream is part of, 0 when it is not capturing.
DSV4_EXPORT int dsv4_sparse_mla_capture_id(void* stream, unsigned long long* id) {
  cudaStreamCaptureStatus status;
  *id = 0;
  unsigned long long found = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &found);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusActive) *id = found;
  return error;
}

#define DSV4_LIMITS(size)                                                        \
  dsv4::limit<kThreads, smem_bytes<1>()>("sparse_mla_decodeILi" #size "ELi1E"),     \
      dsv4::limit<kThreads, smem_bytes<2>()>("sparse_mla_decodeILi" #size "ELi2E"), \
      dsv4::limit<kThreads, smem_bytes<1>()>("sparse_mla_decode_scaledILi" #size "E"),
DSV4_KERNELS(DSV4_CLUSTERS(DSV4_LIMITS) dsv4::limit<kPlanThreads, 0>("sparse_mla_plan"))
