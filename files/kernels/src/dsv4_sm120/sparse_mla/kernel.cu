// SPDX-License-Identifier: Apache-2.0
// Sparse-MLA decode over the DeepSeek-V4 fp8 latent cache, by portable mma.sync (sm_90 and sm_120). See NOTES.md.
//
// A block of eight warps runs 16 query heads over tiles of 32 cached tokens. Warp w owns latent dimensions
// [64 w, 64 w + 64), as keys and as values: one scale group, the last one the rope dimensions.
//
//  * keys and values stay e4m3 in shared memory; fragments are converted to f16, which is exact and one instruction per
//    pair. A token's ue8m0 scale never touches them: it multiplies the fp32 share of the score that its group makes, and
//    the probability that its group's values are multiplied by, relative to the group's largest scale. So f16 holds all.
//  * the 64 rope dimensions are bf16 in the cache and use bf16 mma.
//  * the warps exchange their shares of the scores through shared memory; each then makes the probabilities of two heads.
//  * the blocks of a cluster share one unit of work (a range of tiles of one row) and merge through distributed shared
//    memory, each block a slice of the output columns. A row of several units is merged from global memory by the last
//    block to arrive, again per slice.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../csrc/common/abi.cuh"

// sm_120's shared memory holds one block an SM, sm_90's two, which then have 128 registers a thread.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define MLA_MIN_BLOCKS 1
#else
#define MLA_MIN_BLOCKS 2
#endif

namespace {

namespace cg = cooperative_groups;

constexpr int kWarps = 8;         // one for each value group
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 32;
constexpr int kStages = 4;
constexpr int kListed = 8;        // tiles whose tokens are looked up ahead
constexpr int kRowBytes = 576;
constexpr int kGroups = 8;        // seven of nope, one of rope
constexpr int kScaleBytes = 8;    // per token, the eighth is padding that nothing wrote
constexpr int kItemInts = 8;
constexpr int kPlanThreads = 1024;
// floats of one merged unit in global memory: 16 x 512 sums, and for each block of a cluster 8 x 16 exponents and 16 sums
constexpr int kRecordSide = kGroups * 16 + 16;
constexpr int kRecordFloats = 16 * 512 + 8 * kRecordSide;

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

struct Smem {
  // the ring of gathered rows; after the last tile the 32 KiB of output sums lie here
  alignas(128) unsigned char raw[kStages][kTile * kRowBytes];
  // each warp's share of the scores, [warp][8 tokens][lane]; after the last tile the weights of the merge
  alignas(16) float4 exchange[kWarps][4][32];
  // probabilities as fragments, [16 tokens][lane]
  alignas(16) uint4 prob_f16[2][32];
  alignas(16) uint4 prob_bf16[2][32];
  alignas(16) unsigned char scales[kStages][kTile * kScaleBytes];
  // a tile's scales as factors, for each warp's group, [column quad][8 tokens][low or high column]
  alignas(16) float score_factor[kWarps][4][8];
  alignas(16) unsigned short value_factor[2][kWarps][4][8];
  // addresses of the next tiles' rows and of their scales
  alignas(16) unsigned long long row_at[kListed][kTile];
  alignas(16) unsigned long long scale_at[kListed][kTile];
  unsigned valid[2 * kListed];
  float query_top[kWarps][16];
  float alpha[16];     // by how much a row's sums shrink at this tile
  float top[16];       // reference of a row's softmax
  float sum[16];
  float shift[kGroups];  // log2 of what a group's sums are to be multiplied by, beside the reference
  float sink_log2[16];
  float scale_log2[16];  // of a row's scores: what its query was multiplied by taken out again
  Work work;
  int last;
};
static_assert(sizeof(float) * 16 * 512 <= sizeof(Smem::raw), "output sums reuse the ring");
static_assert(sizeof(float) * (8 + 2) * 128 <= sizeof(Smem::exchange), "weights of eight sources");
static_assert(sizeof(Smem) <= dsv4::kMaxBlockSmem, "shared memory of a block");

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

// Issues this warp's share of a tile's copies: four tokens. A whole warp takes 512 bytes of a row at once: one request
// and one address translation for them, where a warp that fetched its own columns of many rows would need one for each.
__device__ __forceinline__ void gather(Smem& sm, const Lane& t, int tile, int stage) {
  const int list = tile % kListed, first = 4 * t.warp;
  const unsigned base = smem_address(sm.raw[stage]) + first * kRowBytes;
  const ulonglong2 a = *reinterpret_cast<const ulonglong2*>(&sm.row_at[list][first]);
  const ulonglong2 b = *reinterpret_cast<const ulonglong2*>(&sm.row_at[list][first + 2]);
  const unsigned to = base + t.lane * 16, to_swapped = base + (t.lane ^ 2) * 16;
  copy_async16(to, a.x + t.lane * 16);
  copy_async16(to + kRowBytes, a.y + t.lane * 16);
  copy_async16(to_swapped + 2 * kRowBytes, b.x + t.lane * 16);
  copy_async16(to_swapped + 3 * kRowBytes, b.y + t.lane * 16);
  // the last four chunks of each row, and the scales
  const int token = t.g & 3;
  if (t.lane < 16) {
    copy_async16(base + token * kRowBytes + swizzle(token, 32 + t.c) * 16, sm.row_at[list][first + token] + (32 + t.c) * 16);
  } else if (t.c == 0) {
    copy_async8(smem_address(&sm.scales[stage][(first + token) * kScaleBytes]), sm.scale_at[list][first + token]);
  }
}

__device__ __forceinline__ uint4 load128(const unsigned char* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ uint2 load64(const unsigned char* p) { return *reinterpret_cast<const uint2*>(p); }

// Scores of 16 heads x 16 tokens over one group of 64 dimensions.
template <bool kRope>
__device__ __forceinline__ void scores(float (&acc)[2][4], const unsigned (&q)[16], const unsigned char* stage, const Lane& t, int chunk0) {
  const int r = row_of_column(t.g);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const unsigned char* row = stage + (8 * j + r) * kRowBytes;
    acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
    if constexpr (kRope) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 v = load128(row + swizzle(r, chunk0 + t.c + 4 * h) * 16);
        mma<true>(acc[j], q + 8 * h, v.x, v.y);
        mma<true>(acc[j], q + 8 * h + 4, v.z, v.w);
      }
    } else {
      const uint4 v = load128(row + swizzle(r, chunk0 + t.c) * 16);
      mma<false>(acc[j], q, widen_low(v.x), widen_high(v.x));
      mma<false>(acc[j], q + 4, widen_low(v.y), widen_high(v.y));
      mma<false>(acc[j], q + 8, widen_low(v.z), widen_high(v.z));
      mma<false>(acc[j], q + 12, widen_low(v.w), widen_high(v.w));
    }
  }
}

// Adds P (16 heads x 16 tokens) times the group's values to `o`.
template <bool kRope>
__device__ __forceinline__ void values(float (&o)[8][4], const unsigned (&p)[4], const unsigned char* stage, const Lane& t, int chunk0) {
  // the four tokens of this thread's k indices 2c, 2c+1, 2c+8, 2c+9
  const int r0 = t.c, r1 = 4 + (t.c ^ 1);
  if constexpr (kRope) {
    const unsigned char* at = stage + swizzle(r0, chunk0 + t.g) * 16;
    const uint4 a = load128(at + r0 * kRowBytes), b = load128(at + r1 * kRowBytes);
    const uint4 e = load128(at + (8 + r0) * kRowBytes), f = load128(at + (8 + r1) * kRowBytes);
    const unsigned aw[4] = {a.x, a.y, a.z, a.w}, bw[4] = {b.x, b.y, b.z, b.w};
    const unsigned ew[4] = {e.x, e.y, e.z, e.w}, fw[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      mma<true>(o[2 * w], p, __byte_perm(aw[w], bw[w], 0x5410), __byte_perm(ew[w], fw[w], 0x5410));
      mma<true>(o[2 * w + 1], p, __byte_perm(aw[w], bw[w], 0x7632), __byte_perm(ew[w], fw[w], 0x7632));
    }
  } else {
    const unsigned char* at = stage + swizzle(r0, chunk0 + (t.g >> 1)) * 16 + (t.g & 1) * 8;
    const uint2 a = load64(at + r0 * kRowBytes), b = load64(at + r1 * kRowBytes);
    const uint2 e = load64(at + (8 + r0) * kRowBytes), f = load64(at + (8 + r1) * kRowBytes);
    const unsigned aw[2] = {a.x, a.y}, bw[2] = {b.x, b.y}, ew[2] = {e.x, e.y}, fw[2] = {f.x, f.y};
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned x = __byte_perm(aw[w], bw[w], h ? 0x7362 : 0x5140);
        const unsigned y = __byte_perm(ew[w], fw[w], h ? 0x7362 : 0x5140);
        mma<false>(o[4 * w + 2 * h], p, widen_low(x), widen_low(y));
        mma<false>(o[4 * w + 2 * h + 1], p, widen_high(x), widen_high(y));
      }
    }
  }
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

// The block's tiles, for a warp of one value group; kRope: the last one. `look_up` and `list` keep the list of tokens filled.
//
// Two barriers a tile. Behind the first, warp w adds the eight shares of the scores of rows w and w + 8 and makes their
// probabilities. Behind the second, every warp multiplies its group's values of this tile and makes its share of the next
// tile's scores; the two do not depend on each other and fill each other's latencies.
template <bool kRope>
struct Attend {
  Smem& sm;
  const Lane& t;
  const unsigned (&q)[16];
  float (&o)[8][4];
  int largest_scale = -1000;

  // lane n takes care of token n's scale: at column quad n & 3 for low columns, crosswise for high ones
  __device__ __forceinline__ int quad() const { return t.lane & 4 ? (t.lane & 3) ^ 1 : t.lane & 3; }
  __device__ __forceinline__ int place() const { return 2 * (t.lane >> 3) + (t.lane >> 2 & 1); }

  // The scores of a tile over this warp's dimensions, before their scales.
  __device__ __forceinline__ int begin_scores(float (&s)[4][4], int stage) {
    int byte = 0;
    if constexpr (!kRope) {
      byte = sm.scales[stage][t.lane * kScaleBytes + t.warp];
      // 2^(byte - 127); 2^-127 becomes 0 here, which no score can tell; 255 is NaN and makes its token's scores NaN
      sm.score_factor[t.warp][quad()][place()] = __uint_as_float(byte == 255 ? 0x7fffffffu : static_cast<unsigned>(byte) << 23);
    }
    const int chunk0 = 4 * t.warp;
    scores<kRope>(*reinterpret_cast<float(*)[2][4]>(&s[0]), q, sm.raw[stage], t, chunk0);
    scores<kRope>(*reinterpret_cast<float(*)[2][4]>(&s[2]), q, sm.raw[stage] + 16 * kRowBytes, t, chunk0);
    return byte;
  }

  // Scales them, hands them over, and prepares the scales of the tile's values.
  __device__ __forceinline__ void end_scores(float (&s)[4][4], int byte, int parity) {
    if constexpr (!kRope) {
      if (__any_sync(~0u, byte > largest_scale + kScaleSlack)) {
        const int found = __reduce_max_sync(~0u, byte == 255 ? 0 : byte);
        if (found > largest_scale) {
          const float alpha = exp2_fast(static_cast<float>(largest_scale - found));
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k) o[n][k] *= alpha;
          largest_scale = found;
        }
      }
      // 2^(byte - largest + lift) in f16, 0 below 2^-14
      sm.value_factor[parity][t.warp][quad()][place()] =
          static_cast<unsigned short>(min(max(byte - largest_scale + kLift + 15, 0), 30) << 10);
      __syncwarp();
      const float4* factors = reinterpret_cast<const float4*>(sm.score_factor[t.warp][t.c]);
      const float4 f0 = factors[0], f1 = factors[1];
      const float f[8] = {f0.x, f0.y, f0.z, f0.w, f1.x, f1.y, f1.z, f1.w};
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) s[n][k] *= f[2 * n + (k & 1)];
    }
    // turned by 64 bytes from tile to tile of 8, so that the reads below touch all banks
#pragma unroll
    for (int n = 0; n < 4; ++n) sm.exchange[t.warp][n][(t.lane + 4 * n) & 31] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
  }

  template <class LookUp, class List>
  __device__ __forceinline__ void run(int count, LookUp look_up, List list) {
    const int chunk0 = 4 * t.warp;
    // this lane's part of the softmax: row warp + 8 (lane & 1), columns 2c and 2c + 1 of tokens 8j ... 8j + 7
    const int h = t.lane & 1, c = t.lane >> 1 & 3, j = t.lane >> 3;
    float top = kNothing, sum = 0.f;
    int index = -1;
    // i modulo kStages, and the stages before and behind it
    int now = 0, before = kStages - 1, next = 1;
    if (count > 0) {
      float s[4][4];
      const int byte = begin_scores(s, 0);
      end_scores(s, byte, 0);
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      barrier();
      float2 x;
      {
        float2 w[kWarps];
#pragma unroll
        for (int n = 0; n < kWarps; ++n) w[n] = reinterpret_cast<const float2*>(&sm.exchange[n][j][(4 * t.warp + c + 4 * j) & 31])[h];
        x.x = ((w[0].x + w[1].x) + (w[2].x + w[3].x)) + ((w[4].x + w[5].x) + (w[6].x + w[7].x));
        x.y = ((w[0].y + w[1].y) + (w[2].y + w[3].y)) + ((w[4].y + w[5].y) + (w[6].y + w[7].y));
      }
      const float scale_log2 = sm.scale_log2[t.warp + 8 * h];
      const unsigned valid = sm.valid[i % (2 * kListed)];
      x.x = valid >> (8 * j + c) & 1 ? x.x * scale_log2 : -INFINITY;
      x.y = valid >> (8 * j + 4 + (c ^ 1)) & 1 ? x.y * scale_log2 : -INFINITY;
      float alpha = 1.f;
      const bool moved = __any_sync(~0u, fmaxf(x.x, x.y) > top + kScoreSlack);
      if (moved) {
        float m = fmaxf(x.x, x.y);
#pragma unroll
        for (int d = 2; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
        if (m > top + kScoreSlack) {
          alpha = exp2_fast(top - m);
          top = m;
          sum *= alpha;
        }
      }
      x.x = exp2_fast(x.x - top);
      x.y = exp2_fast(x.y - top);
      sum += x.x + x.y;
      const int to = 2 * (j & 1) + h;
      reinterpret_cast<unsigned*>(&sm.prob_f16[j >> 1][4 * t.warp + c])[to] = pack<false>(x.x, x.y);
      reinterpret_cast<unsigned*>(&sm.prob_bf16[j >> 1][4 * t.warp + c])[to] = pack<true>(x.x, x.y);
      if (t.lane < 2) sm.alpha[t.warp + 8 * h] = alpha;
      // the next tile's rows have to be there for all warps behind the barrier
      copy_wait<kStages - 3>();
      if (barrier_any(moved)) {
        const float shrink[2] = {sm.alpha[t.g], sm.alpha[t.g + 8]};
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int k = 0; k < 4; ++k) o[n][k] *= shrink[k >> 1];
      }
      // every warp has left the last tile's values behind since the first barrier: its stage is free
      if (i + kStages - 1 < count) gather(sm, t, i + kStages - 1, before);
      copy_commit();
      // every fourth tile four more are listed: looked up at one tile, written at the next
      if (!kRope && t.warp < 4 && i + kListed - 2 < count) {
        if (i % 4 == 1) index = look_up(sm.work, i - 1 + kListed);
        if (i % 4 == 2) list(sm.work, i - 2 + kListed, index);
      }
      // past the end: a stage that holds something old, and nobody reads the result
      float s[4][4];
      const int byte = begin_scores(s, next);
      uint4 f = make_uint4(0, 0, 0, 0);
      if constexpr (!kRope) f = *reinterpret_cast<const uint4*>(sm.value_factor[i & 1][t.warp][t.c]);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 v = kRope ? sm.prob_bf16[k][t.lane] : sm.prob_f16[k][t.lane];
        unsigned p[4] = {v.x, v.y, v.z, v.w};
        if constexpr (!kRope) {
          const unsigned f0 = k ? f.z : f.x, f1 = k ? f.w : f.y;
          p[0] = multiply_f16(p[0], f0), p[1] = multiply_f16(p[1], f0), p[2] = multiply_f16(p[2], f1), p[3] = multiply_f16(p[3], f1);
        }
        values<kRope>(o, p, sm.raw[now] + 16 * k * kRowBytes, t, chunk0);
      }
      if (i + 1 < count) end_scores(s, byte, (i + 1) & 1);
      before = now, now = next;
      next = next == kStages - 1 ? 0 : next + 1;
    }
#pragma unroll
    for (int d = 2; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (t.lane < 2) {
      sm.top[t.warp + 8 * h] = top;
      sm.sum[t.warp + 8 * h] = sum;
    }
    if (t.lane == 0) sm.shift[t.warp] = kRope ? 0.f : static_cast<float>(largest_scale - 127 - kLift);
  }
};

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

// The blocks of a cluster share a unit of work.
template <int kCluster>
__global__ void __launch_bounds__(kThreads, MLA_MIN_BLOCKS) sparse_mla_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Smem& sm = *reinterpret_cast<Smem*>(memory);
  Lane t;
  t.lane = threadIdx.x & 31;
  // broadcast, so that the compiler knows it uniform
  t.warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  t.g = t.lane >> 2;
  t.c = t.lane & 3;
  const int rank = kCluster == 1 ? 0 : blockIdx.x % kCluster;
  const int head0 = 16 * blockIdx.y;
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
    sm.scale_at[j % kListed][t.lane] = reinterpret_cast<unsigned long long>(scale);
    const unsigned mask = __ballot_sync(~0u, index >= 0);
    if (t.lane == 0) sm.valid[j % (2 * kListed)] = mask;
  };
  share();
  int index = look_up(work, 0);
  int actual0 = load_or(p.scope[0].lengths == nullptr ? nullptr : p.scope[0].lengths + row, p.scope[0].width);
  int actual1 = load_or(p.scope[1].lengths == nullptr ? nullptr : p.scope[1].lengths + row, p.scope[1].width);
  const int sink_head = head0 + threadIdx.x % 16;
  const int sink = load_or(reinterpret_cast<const int*>(p.sink == nullptr || sink_head >= p.heads ? nullptr : p.sink + sink_head),
                           __float_as_int(-INFINITY));

  uint4 raw[2][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head0 + t.g + 8 * h;
    const __nv_bfloat16* from = head < p.heads ? p.q + row * p.q_row + head * p.q_head + 64 * t.warp : nullptr;
    raw[h][0] = load_query(from, t.warp < 7 ? 16 * t.c : 8 * t.c);
    raw[h][1] = load_query(from, t.warp < 7 ? 16 * t.c + 8 : 8 * t.c + 32);
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
  if (threadIdx.x < 16) sm.sink_log2[threadIdx.x] = __int_as_float(sink) * kLog2e;
  if (threadIdx.x == 0) sm.work = work;
  const int count = work.count;
  barrier();
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < count) gather(sm, t, i, i);
    // an empty group keeps the count of groups
    copy_commit();
  }

  // Query fragments, while the first tiles travel.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float m = largest(raw[h]);
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    if (t.c == 0) sm.query_top[t.warp][t.g + 8 * h] = m;
  }
  barrier();
  unsigned q[16];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float m = 0.f, own = 0.f;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      m = fmaxf(m, sm.query_top[n][t.g + 8 * h]);
      own = fmaxf(own, sm.query_top[n][t.warp + 8 * h]);
    }
    // zeros, infinities and the far ends keep the factor a normal number; an infinity stays one
    auto exponent = [](float v) { return min(max(static_cast<int>(__float_as_uint(v) >> 23) - 127, -100), 100); };
    const __nv_bfloat162 factor = as_bf16x2(static_cast<unsigned>(11 - exponent(m) + 127) * 0x00800080u);
    if (t.warp < 7) {
      query_fragments<false>(q, raw[h], factor, h);
    } else {
      query_fragments<true>(q, raw[h], factor, h);
    }
    // of the rows whose softmax this warp works on
    if (t.lane == 0) sm.scale_log2[t.warp + 8 * h] = p.scale_log2 * __uint_as_float(static_cast<unsigned>(exponent(own) - 11 + 127) << 23);
  }

  float o[8][4] = {};
  copy_wait<kStages - 2>();
  barrier();
  if (t.warp < 7) {
    Attend<false>{sm, t, q, o}.run(count, look_up, list);
  } else {
    Attend<true>{sm, t, q, o}.run(count, look_up, list);
  }
  copy_wait<0>();

  // --- merge ---------------------------------------------------------------------------------------------------------
  // Sums in fragment order: [group][2 rows x 4 pieces of 4 dimensions][lane]. Piece k of lane (g, c) and half h holds head
  // g + 8 h and dimensions 16 c + 4 k ... + 3 of the group.
  barrier();
  float4* sums = reinterpret_cast<float4*>(&sm.raw[0][0]);
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int n = 4 * (k & 1), r = 2 * h + (k >> 1);
      sums[(t.warp * 8 + 4 * h + k) * 32 + t.lane] = make_float4(o[n][r], o[n + 1][r], o[n + 2][r], o[n + 3][r]);
    }
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    cg::this_cluster().sync();
  }

  row = sm.work.row, part = sm.work.part, parts = sm.work.parts, slot = sm.work.slot;
  // the same place in the memory of the cluster's block i
  auto peer = [&](auto* mine, int i) {
    if constexpr (kCluster == 1) {
      return mine;
    } else {
      return cg::this_cluster().map_shared_rank(mine, i);
    }
  };
  float* weights = reinterpret_cast<float*>(sm.exchange);
  auto record = [&](int n) -> float* { return p.partial + ((slot + n) * gridDim.y + blockIdx.y) * kRecordFloats; };
  // each block keeps a copy of exponents and sums, so that a slice depends on blocks of its own rank alone
  const int side = 16 * 512 + rank * kRecordSide;

  constexpr int kPieces = 16 * 512 / 4;
  constexpr int kShare = kPieces / (kCluster * kThreads);
  auto piece_of = [&](int n) { return rank * kThreads + static_cast<int>(threadIdx.x) + n * kCluster * kThreads; };
  // the first of this thread's pieces travels before its weights are known
  float4 ahead[kCluster];
#pragma unroll
  for (int i = 0; i < kCluster; ++i) ahead[i] = *peer(sums + piece_of(0), i);

  // one thread for each group and head
  if (threadIdx.x < kGroups * 16) {
    const int head = threadIdx.x % 16, group = threadIdx.x / 16;
    float e[kCluster], m[kCluster], l[kCluster];
#pragma unroll
    for (int i = 0; i < kCluster; ++i) {
      m[i] = *peer(&sm.top[head], i);
      l[i] = *peer(&sm.sum[head], i);
      e[i] = m[i] + *peer(&sm.shift[group], i);
    }
    float top = kNothing, softmax_top = kNothing, total = 0.f;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) top = fmaxf(top, e[i]), softmax_top = fmaxf(softmax_top, m[i]);
#pragma unroll
    for (int i = 0; i < kCluster; ++i) total += exp2_fast(m[i] - softmax_top) * l[i];
    float factor = 1.f;
    if (parts == 1) {
      factor = finish(p, sm.sink_log2[head], row, head0 + head, top, softmax_top, total, rank == 0 && group == 0);
    } else {
      float* to = record(part) + side;
      to[threadIdx.x] = group == kGroups - 1 ? softmax_top : top;
      if (group == 0) to[kGroups * 16 + head] = total;
    }
#pragma unroll
    for (int i = 0; i < kCluster; ++i) weights[i * 128 + threadIdx.x] = exp2_fast(e[i] - top) * factor;
  }
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < kShare; ++n) {
    const int at = piece_of(n), group = at >> 8, piece = at >> 5 & 7, head = (at >> 2 & 7) + 8 * (piece >> 2);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kCluster; ++i) v = weighted(v, weights[i * 128 + group * 16 + head], ahead[i]);
    if (n + 1 < kShare) {
#pragma unroll
      for (int i = 0; i < kCluster; ++i) ahead[i] = *peer(sums + piece_of(n + 1), i);
    }
    if (parts == 1) {
      store_output(p, v, row, head0 + head, 64 * group + 16 * (at & 3) + 4 * (piece & 3));
    } else {
      reinterpret_cast<float4*>(record(part))[at] = v;
    }
  }
  // A block's shared memory has to outlive its peers' reads. Those are done: what is stored above needed their values.
  if constexpr (kCluster > 1) asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
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
  float* factors = weights + 128;
  if (threadIdx.x < kGroups * 16) {
    const int head = threadIdx.x % 16, group = threadIdx.x / 16;
    float top = kNothing, softmax_top = kNothing, total = 0.f;
#pragma unroll 8
    for (int i = 0; i < parts; ++i) {
      top = fmaxf(top, __ldcg(record(i) + side + threadIdx.x));
      softmax_top = fmaxf(softmax_top, __ldcg(record(i) + side + (kGroups - 1) * 16 + head));
    }
#pragma unroll 8
    for (int i = 0; i < parts; ++i)
      total += exp2_fast(__ldcg(record(i) + side + (kGroups - 1) * 16 + head) - softmax_top) * __ldcg(record(i) + side + kGroups * 16 + head);
    tops[threadIdx.x] = top;
    factors[threadIdx.x] = finish(p, sm.sink_log2[head], row, head0 + head, top, softmax_top, total, rank == 0 && group == 0);
  }
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < kShare; ++n) {
    const int at = piece_of(n), group = at >> 8, piece = at >> 5 & 7, head = (at >> 2 & 7) + 8 * (piece >> 2), pair = group * 16 + head;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int i = 0; i < parts; ++i)
      v = weighted(v, exp2_fast(__ldcg(record(i) + side + pair) - tops[pair]), __ldcg(reinterpret_cast<const float4*>(record(i)) + at));
    const float f = factors[pair];
    store_output(p, make_float4(v.x * f, v.y * f, v.z * f, v.w * f), row, head0 + head, 64 * group + 16 * (at & 3) + 4 * (piece & 3));
  }
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

// A launch's configuration; the attribute has to live as long.
template <int kCluster>
cudaLaunchConfig_t configuration(int units, int head_blocks, cudaStream_t stream, cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(units) * kCluster, head_blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Smem);
  config.stream = stream;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kCluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = kCluster > 1 ? 1 : 0;
  return config;
}

template <int kCluster>
cudaError_t allow_shared_memory() {
  static bool ready[64] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || (device < 64 && ready[device])) return error;
  error = cudaFuncSetAttribute(sparse_mla_decode<kCluster>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  if (error == cudaSuccess && device < 64) ready[device] = true;
  return error;
}

template <int kCluster>
cudaError_t launch(const Params& p, int units, int head_blocks, cudaStream_t stream) {
  const cudaError_t error = allow_shared_memory<kCluster>();
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  const cudaLaunchConfig_t config = configuration<kCluster>(units, head_blocks, stream, attribute);
  return cudaLaunchKernelEx(&config, sparse_mla_decode<kCluster>, p);
}

template <int kCluster>
int active_clusters(int* found) {
  const cudaError_t error = allow_shared_memory<kCluster>();
  if (error != cudaSuccess) return error;
  if constexpr (kCluster == 1) {
    int device = 0, sms = 0, blocks = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    const cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, sparse_mla_decode<1>, kThreads, sizeof(Smem));
    *found = sms * blocks;
    return e;
  } else {
    cudaLaunchAttribute attribute = {};
    const cudaLaunchConfig_t config = configuration<kCluster>(1, 1, nullptr, attribute);
    return cudaOccupancyMaxActiveClusters(found, sparse_mla_decode<kCluster>, &config);
  }
}

bool scope_is_sound(const Scope& s) {
  return s.page_shift >= 0 && s.page_shift <= 16 && s.width >= 0 && s.pitch >= (584ll << s.page_shift) && s.pitch % 16 == 0 &&
         reinterpret_cast<uintptr_t>(s.cache) % 16 == 0 && (s.width == 0 || s.indices != nullptr);
}

}  // namespace

// Sizes that the caller needs for its buffers: 0 ints of an item, 1 floats of a record, 2 tokens of a tile.
DSV4_EXPORT int dsv4_sparse_mla_constant(int what) {
  constexpr int values[] = {kItemInts, kRecordFloats, kTile, kThreads, static_cast<int>(sizeof(Smem))};
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

// One layer. All strides are in elements of their tensor but `pitch`, which is in bytes. `cluster`: 1, 2, 4 or 8
// blocks, the same as the one that the counters were sized for. `items` may be null where budget equals rows; partial and counters then
// are not used.
DSV4_EXPORT int dsv4_sparse_mla_decode(
    const void* q, int64_t q_row, int64_t q_head, int rows, int heads,                                                //
    const void* cache0, int64_t pitch0, int shift0, const int* indices0, int64_t stride0, const int* lengths0, int width0,  //
    const void* cache1, int64_t pitch1, int shift1, const int* indices1, int64_t stride1, const int* lengths1, int width1,  //
    const float* sink, float softmax_scale, void* out, int64_t out_row, int64_t out_head, float* lse,                 //
    const int* items, int units, float* partial, unsigned* counters, int cluster, void* stream) {
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
  const int head_blocks = (heads + 15) / 16;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  cudaError_t error;
  switch (cluster) {
    case 1: error = launch<1>(p, units, head_blocks, s); break;
    case 2: error = launch<2>(p, units, head_blocks, s); break;
    case 4: error = launch<4>(p, units, head_blocks, s); break;
    case 8: error = launch<8>(p, units, head_blocks, s); break;
    default: return dsv4::kBadArgument;
  }
  return error == cudaErrorNoKernelImageForDevice ? dsv4::kNoCode : static_cast<int>(error);
}

// Gives how many clusters of a size run at the same time on the current GPU.
DSV4_EXPORT int dsv4_sparse_mla_active_clusters(int cluster, int* found) {
  switch (cluster) {
    case 1: return active_clusters<1>(found);
    case 2: return active_clusters<2>(found);
    case 4: return active_clusters<4>(found);
    case 8: return active_clusters<8>(found);
    default: return dsv4::kBadArgument;
  }
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

#define DECODE_LIMIT(cluster) dsv4::limit<kThreads, sizeof(Smem)>("sparse_mla_decodeILi" #cluster "E")
DSV4_KERNELS(DECODE_LIMIT(1), DECODE_LIMIT(2), DECODE_LIMIT(4), DECODE_LIMIT(8), dsv4::limit<kPlanThreads, 0>("sparse_mla_plan"))
