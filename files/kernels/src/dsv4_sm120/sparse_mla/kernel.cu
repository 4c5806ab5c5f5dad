// SPDX-License-Identifier: Apache-2.0
// Sparse-MLA decode over the DeepSeek-V4 fp8 latent cache, by portable mma.sync (sm_90 and sm_120). See NOTES.md.
//
// One block of four warps runs 16 query heads over tiles of 16 cached tokens. Warp w owns latent dimensions
// [128 w, 128 w + 128), as keys and as values: the cache bytes that it gathers are read by no other warp, and the only
// thing that the warps of a block exchange is their share of the 16 x 16 scores, once a tile.
//
//  * keys and values stay e4m3 in shared memory; fragments are converted to f16, which is exact and one instruction per
//    pair. A token's ue8m0 scale never touches them: for keys it multiplies the fp32 partial score of its group of 64
//    dimensions, for values it is added to the exponent of the softmax, which each group keeps with a maximum of its
//    own. So nothing overflows f16 and the probabilities are f16 in [0, 1].
//  * the 64 rope dimensions (the last half of warp 3) are bf16 in the cache and use bf16 mma.
//  * the blocks of a cluster share one unit of work (a range of tiles of one row) and merge through distributed shared
//    memory, each block a slice of the output columns. A row of several units is merged from global memory by the last
//    block to arrive, again per slice.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../csrc/common/abi.cuh"

namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 128;
constexpr int kTile = 16;
constexpr int kStages = 4;
constexpr int kRowBytes = 576;
constexpr int kGroups = 8;        // seven of nope, one of rope
constexpr int kScaleBytes = 8;    // per token, the eighth is padding that nothing wrote
constexpr int kItemInts = 8;
constexpr int kPlanThreads = 1024;
// floats of one merged unit in global memory: 16 x 512 sums, 8 x 16 exponents, and (maximum, sum) x 16 per slice
constexpr int kRecordFloats = 16 * 512 + kGroups * 16 + 8 * 32;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// stands for "nothing seen": finite, so that the difference of two of them is 0 and not NaN
constexpr float kNothing = -1e30f;

struct Smem {
  // the ring of gathered rows; after the last tile the 32 KiB of output sums lie here
  alignas(128) unsigned char raw[kStages][kTile * kRowBytes];
  alignas(16) float4 exchange[2][4][2][32];
  alignas(16) unsigned char scales[kStages][4][kTile * kScaleBytes];
  unsigned valid[kStages][4];
  float exponent[kGroups][16];  // running maximum of each value group; the last one is the softmax's own
  float sum[16];
  int last;
};
static_assert(sizeof(float) * 16 * 512 <= sizeof(Smem::raw), "output sums reuse the ring");
// two blocks on an sm_120 SM
static_assert(sizeof(Smem) <= 50176, "shared memory of a block");

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

template <int kBytes>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool valid) {
  // a size of 0 writes zeros and reads nothing
  const int size = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(size) : "memory");
  }
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load128(unsigned from, unsigned (&v)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from));
}

__device__ __forceinline__ void load64(unsigned from, unsigned (&v)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(from));
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
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
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

// 2^(byte - 127): 0 is 2^-127 (a subnormal), 255 is NaN
__device__ __forceinline__ float scale_value(unsigned byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fffffffu : byte << 23);
}
__device__ __forceinline__ float scale_exponent(unsigned byte) {
  return byte == 255 ? __uint_as_float(0x7fffffffu) : static_cast<float>(static_cast<int>(byte) - 127);
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

// Per-thread constants of a warp's work.
struct Lane {
  int lane, warp, g, c;  // g and c: the row and column quad of an mma fragment
};

// Issues the copies of one tile's rows and scales into a ring stage. `index` is this lane's token (lanes 0-15), -1 for none.
__device__ __forceinline__ void gather(Smem& sm, const Lane& t, const Scope& scope, int stage, int index) {
  const bool valid = t.lane < kTile && index >= 0;
  const unsigned mask = __ballot_sync(~0u, valid);
  if (t.lane == 0) sm.valid[stage][t.warp] = mask;
  const int safe = valid ? index : 0;
  const int offset = safe & ((1 << scope.page_shift) - 1);
  const long long page = static_cast<long long>(safe >> scope.page_shift) * scope.pitch;
  const long long row = page + offset * kRowBytes;
  if (t.lane < kTile) {
    const unsigned char* from = scope.cache + page + (static_cast<long long>(kRowBytes) << scope.page_shift) + offset * kScaleBytes;
    copy_async<8>(smem_address(&sm.scales[stage][t.warp][t.lane * kScaleBytes]), from, valid);
  }
  const unsigned base = smem_address(&sm.raw[stage][0]);
  const unsigned char* cache = scope.cache;
  auto chunks = [&](int first, auto log2_width) {
    constexpr int kLog2 = decltype(log2_width)::value;
    constexpr int kWidth = 1 << kLog2;
    const int chunk = first + (t.lane & (kWidth - 1));
#pragma unroll
    for (int i = 0; i < kTile * kWidth / 32; ++i) {
      const int token = (t.lane >> kLog2) + i * (32 / kWidth);
      const long long from = __shfl_sync(~0u, row, token);
      copy_async<16>(base + token * kRowBytes + swizzle(token, chunk) * 16, cache + from + chunk * 16, (mask >> token) & 1);
    }
  };
  if (t.warp < 3) {
    chunks(8 * t.warp, std::integral_constant<int, 3>{});
  } else {
    chunks(24, std::integral_constant<int, 2>{});
    chunks(28, std::integral_constant<int, 3>{});
  }
}

// Scores of 16 heads x 16 tokens over one group of 64 dimensions.
template <bool kRope>
__device__ __forceinline__ void scores(float (&acc)[2][4], const unsigned (&q)[16], unsigned stage, const Lane& t, int chunk0) {
  const int r = row_of_column(t.g);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const unsigned base = stage + (8 * j + r) * kRowBytes;
    acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
    if constexpr (kRope) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned v[4];
        load128(base + swizzle(r, chunk0 + t.c + 4 * h) * 16, v);
        mma<true>(acc[j], q + 8 * h, v[0], v[1]);
        mma<true>(acc[j], q + 8 * h + 4, v[2], v[3]);
      }
    } else {
      unsigned v[4];
      load128(base + swizzle(r, chunk0 + t.c) * 16, v);
#pragma unroll
      for (int s = 0; s < 4; ++s) mma<false>(acc[j], q + 4 * s, widen_low(v[s]), widen_high(v[s]));
    }
  }
}

// Adds P (16 heads x 16 tokens) times the group's values to `o`.
template <bool kRope>
__device__ __forceinline__ void values(float (&o)[8][4], const unsigned (&p)[4], unsigned stage, const Lane& t, int chunk0) {
  // the four tokens of this thread's k indices 2c, 2c+1, 2c+8, 2c+9
  const int r0 = t.c, r1 = 4 + (t.c ^ 1);
  if constexpr (kRope) {
    const unsigned at = swizzle(r0, chunk0 + t.g) * 16;
    unsigned a[4], b[4], e[4], f[4];
    load128(stage + r0 * kRowBytes + at, a);
    load128(stage + r1 * kRowBytes + at, b);
    load128(stage + (8 + r0) * kRowBytes + at, e);
    load128(stage + (8 + r1) * kRowBytes + at, f);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      mma<true>(o[2 * w], p, __byte_perm(a[w], b[w], 0x5410), __byte_perm(e[w], f[w], 0x5410));
      mma<true>(o[2 * w + 1], p, __byte_perm(a[w], b[w], 0x7632), __byte_perm(e[w], f[w], 0x7632));
    }
  } else {
    const unsigned at = swizzle(r0, chunk0 + (t.g >> 1)) * 16 + (t.g & 1) * 8;
    unsigned a[2], b[2], e[2], f[2];
    load64(stage + r0 * kRowBytes + at, a);
    load64(stage + r1 * kRowBytes + at, b);
    load64(stage + (8 + r0) * kRowBytes + at, e);
    load64(stage + (8 + r1) * kRowBytes + at, f);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned x = __byte_perm(a[w], b[w], h ? 0x7362 : 0x5140);
        const unsigned y = __byte_perm(e[w], f[w], h ? 0x7362 : 0x5140);
        mma<false>(o[4 * w + 2 * h], p, widen_low(x), widen_low(y));
        mma<false>(o[4 * w + 2 * h + 1], p, widen_high(x), widen_high(y));
      }
    }
  }
}

// Probabilities of one value group, relative to the group's own running maximum `top`; rescales `o` when it moved.
template <bool kBf16>
__device__ __forceinline__ void probabilities(unsigned (&p)[4], const float (&x)[2][4], float (&top)[2], float (&o)[8][4], float* sum) {
  float alpha[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float m = fmaxf(fmaxf(x[0][2 * h], x[0][2 * h + 1]), fmaxf(x[1][2 * h], x[1][2 * h + 1]));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    m = fmaxf(m, top[h]);
    alpha[h] = exp2_fast(top[h] - m);
    top[h] = m;
  }
  float e[2][4];
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) e[j][i] = exp2_fast(x[j][i] - top[i >> 1]);
  if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= alpha[i >> 1];
  }
  if (sum != nullptr) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      sum[h] = sum[h] * alpha[h] + ((e[0][2 * h] + e[0][2 * h + 1]) + (e[1][2 * h] + e[1][2 * h + 1]));
  }
  p[0] = pack<kBf16>(e[0][0], e[0][1]);
  p[1] = pack<kBf16>(e[0][2], e[0][3]);
  p[2] = pack<kBf16>(e[1][0], e[1][1]);
  p[3] = pack<kBf16>(e[1][2], e[1][3]);
}

// Eight bf16 of a query row, or zeros for a head that does not exist.
__device__ __forceinline__ uint4 load_query(const __nv_bfloat16* row, int dim) {
  return row == nullptr ? make_uint4(0, 0, 0, 0) : __ldg(reinterpret_cast<const uint4*>(row + dim));
}

__device__ __forceinline__ float bf16_low(unsigned v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float bf16_high(unsigned v) { return __uint_as_float(v & 0xffff0000u); }

// The query fragments of a nope group as f16, times a power of two that brings the row's largest value of the warp to
// [2^11, 2^12): exact but for values 2^25 times smaller than that one.
__device__ __forceinline__ void query_f16(unsigned (&q)[16], const uint4 (&raw)[2][2], const float (&factor)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const unsigned w[8] = {raw[h][0].x, raw[h][0].y, raw[h][0].z, raw[h][0].w, raw[h][1].x, raw[h][1].y, raw[h][1].z, raw[h][1].w};
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        q[4 * s + 2 * k + h] = pack<false>(bf16_low(w[2 * s + k]) * factor[h], bf16_high(w[2 * s + k]) * factor[h]);
  }
}

__device__ __forceinline__ float largest(const uint4 (&raw)[2]) {
  float m = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int k = 0; k < 4; ++k) m = fmaxf(m, fmaxf(fabsf(bf16_low(w[k])), fabsf(bf16_high(w[k]))));
  }
  return m;
}

// Sums of one output slice over the units or blocks that hold a part of the row.
struct Merged {
  float acc[8];
  float top, softmax_top, sum;
};

template <int kCount, class Exponent, class Softmax, class Sum, class Value>
__device__ __forceinline__ void merge(Merged& r, int count, Exponent exponent, Softmax softmax, Sum sum, Value value) {
  const int n = kCount ? kCount : count;
  r.top = r.softmax_top = kNothing;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    r.top = fmaxf(r.top, exponent(i));
    r.softmax_top = fmaxf(r.softmax_top, softmax(i));
  }
  r.sum = 0.f;
#pragma unroll
  for (int k = 0; k < 8; ++k) r.acc[k] = 0.f;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float w = exp2_fast(exponent(i) - r.top);
    r.sum += exp2_fast(softmax(i) - r.softmax_top) * sum(i);
    const float4 a = value(i, 0), b = value(i, 1);
    r.acc[0] += w * a.x, r.acc[1] += w * a.y, r.acc[2] += w * a.z, r.acc[3] += w * a.w;
    r.acc[4] += w * b.x, r.acc[5] += w * b.y, r.acc[6] += w * b.z, r.acc[7] += w * b.w;
  }
}

// The sink enters here and nowhere else, once a row.
__device__ __forceinline__ void store_output(const Params& p, const Merged& r, int row, int head, int dim, bool with_lse) {
  if (head >= p.heads) return;
  float denominator = r.sum;
  if (p.sink != nullptr) denominator += exp2f(p.sink[head] * kLog2e - r.softmax_top);
  // not `sum > 0`: a NaN has to come out
  const float f = r.sum == 0.f ? 0.f : exp2f(r.top - r.softmax_top) / denominator;
  uint4 packed;
  packed.x = pack<true>(r.acc[0] * f, r.acc[1] * f);
  packed.y = pack<true>(r.acc[2] * f, r.acc[3] * f);
  packed.z = pack<true>(r.acc[4] * f, r.acc[5] * f);
  packed.w = pack<true>(r.acc[6] * f, r.acc[7] * f);
  *reinterpret_cast<uint4*>(p.out + row * p.out_row + head * p.out_head + dim) = packed;
  if (with_lse && p.lse != nullptr)
    p.lse[static_cast<long long>(row) * p.heads + head] = r.sum == 0.f ? -INFINITY : (r.softmax_top + log2f(r.sum)) * kLn2;
}

template <int kCluster>
__global__ void __launch_bounds__(kThreads, 3) sparse_mla_decode(const Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Smem& sm = *reinterpret_cast<Smem*>(memory);
  Lane t;
  t.lane = threadIdx.x & 31;
  t.warp = threadIdx.x >> 5;
  t.g = t.lane >> 2;
  t.c = t.lane & 3;
  const int rank = kCluster == 1 ? 0 : blockIdx.x % kCluster;
  const int head0 = 16 * blockIdx.y;

  const long long unit = blockIdx.x / kCluster;
  int row, part = 0, parts = 1, begin = 0, end = 0, length0, length1;
  long long slot = 0;
  if (p.items == nullptr) {
    // no row is long enough to be divided among units
    row = static_cast<int>(unit);
    if (row >= p.rows) return;
    length0 = clamped_length(p.scope[0], row), length1 = clamped_length(p.scope[1], row);
    end = tiles_of(length0) + tiles_of(length1);
  } else {
    // {row, first tile, end tile, part | parts << 16}, {length 0, length 1, slot of part 0, unused}
    const int4 work = __ldg(reinterpret_cast<const int4*>(p.items) + 2 * unit);
    const int4 planned = __ldg(reinterpret_cast<const int4*>(p.items) + 2 * unit + 1);
    row = work.x;
    // the whole cluster leaves together
    if (row < 0 || row >= p.rows) return;
    begin = work.y, end = work.z;
    part = work.w & 0xffff, parts = work.w >> 16;
    length0 = planned.x, length1 = planned.y, slot = planned.z;
  }

  int tile, count, tiles0;
  auto share = [&] {
    const int n = end - begin;
    tile = begin + n * rank / kCluster;
    count = begin + n * (rank + 1) / kCluster - tile;
    tiles0 = tiles_of(length0);
  };
  auto load_index = [&](int i) -> int {
    const int at = tile + i;
    if (i >= count || t.lane >= kTile) return -1;
    const bool first = at < tiles0;
    const int position = (first ? at : at - tiles0) * kTile + t.lane;
    if (position >= (first ? length0 : length1)) return -1;
    const Scope& s = p.scope[first ? 0 : 1];
    return __ldg(s.indices + row * s.indices_stride + position);
  };
  share();
  int index[kStages + 1];
#pragma unroll
  for (int i = 0; i <= kStages; ++i) index[i] = load_index(i);

  if (p.items != nullptr) {
    const int actual0 = clamped_length(p.scope[0], row), actual1 = clamped_length(p.scope[1], row);
    if (actual0 != length0 || actual1 != length1) {
      // The plan is of other lengths. It stays right, and slow: the row's first unit takes all of it.
      if (part != 0) return;
      parts = 1;
      length0 = actual0, length1 = actual1;
      begin = 0, end = tiles_of(length0) + tiles_of(length1);
      share();
#pragma unroll
      for (int i = 0; i <= kStages; ++i) index[i] = load_index(i);
    }
  }

  auto issue = [&](int i, int token) {
    if (i < count) {
      const bool first = tile + i < tiles0;
      gather(sm, t, p.scope[first ? 0 : 1], i % kStages, token);
    }
    // an empty group keeps the count of groups
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) issue(i, index[i]);
  int next_index = index[kStages];

  // Query fragments, loaded while the first tiles travel.
  unsigned q0[16], q1[16];
  float qk[2], qk_rope = p.scale_log2;
  {
    uint4 raw0[2][2], raw1[2][2];
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = head0 + t.g + 8 * h;
      const __nv_bfloat16* from = head < p.heads ? p.q + row * p.q_row + head * p.q_head : nullptr;
      raw0[h][0] = load_query(from, 128 * t.warp + 16 * t.c);
      raw0[h][1] = load_query(from, 128 * t.warp + 16 * t.c + 8);
      if (t.warp < 3) {
        raw1[h][0] = load_query(from, 128 * t.warp + 64 + 16 * t.c);
        raw1[h][1] = load_query(from, 128 * t.warp + 64 + 16 * t.c + 8);
      } else {
        raw1[h][0] = load_query(from, 448 + 8 * t.c);
        raw1[h][1] = load_query(from, 448 + 32 + 8 * t.c);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = largest(raw0[h]);
      if (t.warp < 3) m = fmaxf(m, largest(raw1[h]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      int e = static_cast<int>(__float_as_uint(m) >> 23) - 127;
      // zeros, infinities and the far ends keep the factor a normal number; an infinity stays one
      e = min(max(e, -100), 100);
      factor[h] = __uint_as_float(static_cast<unsigned>(11 - e + 127) << 23);
      qk[h] = p.scale_log2 * __uint_as_float(static_cast<unsigned>(e - 11 + 127) << 23);
    }
    query_f16(q0, raw0, factor);
    if (t.warp < 3) {
      query_f16(q1, raw1, factor);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned w[8] = {raw1[h][0].x, raw1[h][0].y, raw1[h][0].z, raw1[h][0].w, raw1[h][1].x, raw1[h][1].y, raw1[h][1].z, raw1[h][1].w};
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
          for (int k = 0; k < 2; ++k) q1[4 * s + 2 * k + h] = w[2 * s + k];
      }
    }
  }

  float o0[8][4] = {}, o1[8][4] = {};
  float top0[2] = {kNothing, kNothing}, top1[2] = {kNothing, kNothing}, sum[2] = {0.f, 0.f};
  const int chunk0 = 8 * t.warp, chunk1 = chunk0 + 4;

#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int stage = i % kStages;
    copy_wait<kStages - 1>();
    __syncwarp();
    const unsigned raw = smem_address(&sm.raw[stage][0]);
    const unsigned valid = sm.valid[stage][t.warp];
    // this thread's tokens: columns 2c and 2c + 1 of the two mma tiles
    unsigned bytes[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int token = (k >> 1) * 8 + (k & 1 ? 4 + (t.c ^ 1) : t.c);
      bytes[k] = *reinterpret_cast<const unsigned short*>(&sm.scales[stage][t.warp][token * kScaleBytes + 2 * t.warp]);
    }
    float s[2][4];
    {
      float a0[2][4], a1[2][4];
      scores<false>(a0, q0, raw, t, chunk0);
      if (t.warp < 3) {
        scores<false>(a1, q1, raw, t, chunk1);
      } else {
        scores<true>(a1, q1, raw, t, chunk1);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const unsigned b = bytes[2 * j + (k & 1)];
          float v = a0[j][k] * scale_value(b & 255) * qk[k >> 1];
          if (t.warp < 3) {
            v += a1[j][k] * scale_value(b >> 8) * qk[k >> 1];
          } else {
            v += a1[j][k] * qk_rope;
          }
          s[j][k] = v;
        }
    }
    float4(*exchange)[2][32] = sm.exchange[i & 1];
#pragma unroll
    for (int j = 0; j < 2; ++j) exchange[t.warp][j][t.lane] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
    // One barrier a tile: the buffer written two tiles later has been read by then.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 w0 = exchange[0][j][t.lane], w1 = exchange[1][j][t.lane], w2 = exchange[2][j][t.lane], w3 = exchange[3][j][t.lane];
      // the same order in every warp, so that all of them hold the same score
      s[j][0] = (w0.x + w1.x) + (w2.x + w3.x);
      s[j][1] = (w0.y + w1.y) + (w2.y + w3.y);
      s[j][2] = (w0.z + w1.z) + (w2.z + w3.z);
      s[j][3] = (w0.w + w1.w) + (w2.w + w3.w);
    }
    float x0[2][4], x1[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int token = 8 * j + (k & 1 ? 4 + (t.c ^ 1) : t.c);
        const bool in = (valid >> token) & 1;
        const unsigned b = bytes[2 * j + (k & 1)];
        x0[j][k] = in ? s[j][k] + scale_exponent(b & 255) : -INFINITY;
        x1[j][k] = in ? (t.warp < 3 ? s[j][k] + scale_exponent(b >> 8) : s[j][k]) : -INFINITY;
      }
    unsigned prob[4];
    probabilities<false>(prob, x0, top0, o0, nullptr);
    values<false>(o0, prob, raw, t, chunk0);
    if (t.warp < 3) {
      probabilities<false>(prob, x1, top1, o1, nullptr);
      values<false>(o1, prob, raw, t, chunk1);
    } else {
      probabilities<true>(prob, x1, top1, o1, sum);
      values<true>(o1, prob, raw, t, chunk1);
    }
    // the stage is this warp's own
    __syncwarp();
    issue(i + kStages, next_index);
    next_index = load_index(i + kStages + 1);
  }
  copy_wait<0>();

  // --- merge ---------------------------------------------------------------------------------------------------------
  // Sums in fragment order: [group][2 rows x 4 pieces of 4 dimensions][lane]. Piece k of lane (g, c) and half h holds head
  // g + 8 h and dimensions 16 c + 4 k ... + 3 of the group.
  __syncthreads();
  float4* sums = reinterpret_cast<float4*>(&sm.raw[0][0]);
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int n = 4 * (k & 1), r = 2 * h + (k >> 1);
      sums[((2 * t.warp) * 8 + 4 * h + k) * 32 + t.lane] = make_float4(o0[n][r], o0[n + 1][r], o0[n + 2][r], o0[n + 3][r]);
      sums[((2 * t.warp + 1) * 8 + 4 * h + k) * 32 + t.lane] = make_float4(o1[n][r], o1[n + 1][r], o1[n + 2][r], o1[n + 3][r]);
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    if (t.c == 0) {
      sm.exponent[2 * t.warp][t.g + 8 * h] = top0[h];
      sm.exponent[2 * t.warp + 1][t.g + 8 * h] = top1[h];
      if (t.warp == 3) sm.sum[t.g + 8 * h] = sum[h];
    }
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    cg::this_cluster().sync();
  }

  // Thread (lane, warp) merges half h = warp / 2 and pieces 2 (warp % 2), + 1 of each group of the block's slice.
  constexpr int kSliceGroups = kGroups / kCluster;
  const int half = t.warp >> 1, piece = 2 * (t.warp & 1);
  const int head_in = t.g + 8 * half;
  auto peer = [&](auto* mine, int i) {
    if constexpr (kCluster == 1) {
      return mine;
    } else {
      return cg::this_cluster().map_shared_rank(mine, i);
    }
  };
  auto record = [&](int n) -> float* { return p.partial + ((slot + n) * gridDim.y + blockIdx.y) * kRecordFloats; };

#pragma unroll 1
  for (int j = 0; j < kSliceGroups; ++j) {
    const int group = rank * kSliceGroups + j;
    Merged r;
    merge<kCluster>(
        r, kCluster, [&](int i) { return *peer(&sm.exponent[group][head_in], i); },
        [&](int i) { return *peer(&sm.exponent[kGroups - 1][head_in], i); }, [&](int i) { return *peer(&sm.sum[head_in], i); },
        [&](int i, int k) { return *peer(&sums[(group * 8 + 4 * half + piece + k) * 32 + t.lane], i); });
    if (parts == 1) {
      store_output(p, r, row, head0 + head_in, 64 * group + 16 * t.c + 4 * piece, group == 0 && t.c == 0 && piece == 0);
    } else {
      float* to = record(part);
      float4* o = reinterpret_cast<float4*>(to) + (group * 8 + 4 * half + piece) * 32 + t.lane;
      o[0] = make_float4(r.acc[0], r.acc[1], r.acc[2], r.acc[3]);
      o[32] = make_float4(r.acc[4], r.acc[5], r.acc[6], r.acc[7]);
      if (t.c == 0 && piece == 0) {
        to[16 * 512 + group * 16 + head_in] = r.top;
        if (j == 0) {
          // each slice keeps a copy, so that a slice depends on blocks of its own rank alone
          to[16 * 512 + kGroups * 16 + rank * 32 + head_in] = r.softmax_top;
          to[16 * 512 + kGroups * 16 + rank * 32 + 16 + head_in] = r.sum;
        }
      }
    }
  }
  // a block's shared memory has to outlive its peers' reads
  if constexpr (kCluster > 1) cg::this_cluster().sync();
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
#pragma unroll 1
  for (int j = 0; j < kSliceGroups; ++j) {
    const int group = rank * kSliceGroups + j;
    Merged r;
    merge<0>(
        r, parts, [&](int i) { return __ldcg(record(i) + 16 * 512 + group * 16 + head_in); },
        [&](int i) { return __ldcg(record(i) + 16 * 512 + kGroups * 16 + rank * 32 + head_in); },
        [&](int i) { return __ldcg(record(i) + 16 * 512 + kGroups * 16 + rank * 32 + 16 + head_in); },
        [&](int i, int k) {
          return __ldcg(reinterpret_cast<const float4*>(record(i)) + (group * 8 + 4 * half + piece + k) * 32 + t.lane);
        });
    store_output(p, r, row, head0 + head_in, 64 * group + 16 * t.c + 4 * piece, group == 0 && t.c == 0 && piece == 0);
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

template <int kCluster>
cudaError_t launch(const Params& p, int units, int head_blocks, cudaStream_t stream) {
  static bool ready[64] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= 64 || !ready[device]) {
    error = cudaFuncSetAttribute(sparse_mla_decode<kCluster>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
    if (error != cudaSuccess) return error;
    if (device < 64) ready[device] = true;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(units) * kCluster, head_blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Smem);
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim.x = kCluster;
  attribute[0].val.clusterDim.y = 1;
  attribute[0].val.clusterDim.z = 1;
  config.attrs = attribute;
  config.numAttrs = kCluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, sparse_mla_decode<kCluster>, p);
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

// One layer. All strides are in elements of their tensor but `pitch`, which is in bytes. `cluster` is 1, 2, 4 or 8, the
// same as the one that the counters were sized for. `items` may be null where budget equals rows; partial and counters then
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

// Gives the id of the capture that a stream is part of, 0 when it is not capturing.
DSV4_EXPORT int dsv4_sparse_mla_capture_id(void* stream, unsigned long long* id) {
  cudaStreamCaptureStatus status;
  *id = 0;
  unsigned long long found = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &found);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusActive) *id = found;
  return error;
}

DSV4_KERNELS(dsv4::limit<kThreads, sizeof(Smem)>("sparse_mla_decodeILi1E"), dsv4::limit<kThreads, sizeof(Smem)>("sparse_mla_decodeILi2E"),
             dsv4::limit<kThreads, sizeof(Smem)>("sparse_mla_decodeILi4E"), dsv4::limit<kThreads, sizeof(Smem)>("sparse_mla_decodeILi8E"),
             dsv4::limit<kPlanThreads, 0>("sparse_mla_plan"))
