// SPDX-License-Identifier: Apache-2.0
// Top-k of each row's actual length, written as page-table-transformed slots in ascending token order.
//
// A row of up to 4,096 values is selected as it is: a histogram, the bin of the k-th largest, and ranks among the few in
// that bin. A longer one gets a bound first: each thread takes the maximum of the values it holds; if k threads have one,
// the k-th largest of these maxima is no greater than the k-th largest value, as they are different values. Then the
// values that reach the bound are listed, in index order, a few more than k of them, and the list is selected from like a
// short row. If more reach it than the list holds (ties), the row goes the slow way, exact too.
//
// Rows of more than 16,384 values are cut into chunks for many blocks. Where a chunk is no longer than what a block holds,
// it leaves its best values, a few times its share of k, and a bound: all of its values that reach it are among them. The
// block that finishes a row's last chunk selects from the chunks' best. Lines are dealt to the chunks in turn, so that a
// stretch of the context that holds many of the k is shared out. If some chunk had more of the k than it left, the last
// block sees it, as fewer than k values reach the greatest of the bounds, and goes the other way.
//
// The other way, and that of longer chunks: the maximum of every granule of 16 values. The last block treats the maxima as
// values, lists the granules that reach the bound, and goes on with their values alone. The indexer can leave the same
// maxima behind. No block waits for another: no co-residency, no clusters.
//
// Where no row is long, block i is row i's, and its first values are asked for before its length is there.
#include <algorithm>

#include "abi.cuh"
#include "ptx.cuh"
#include "select.cuh"

// a named namespace: nvcc puts a random mark into the names of an unnamed one, and builds would differ
namespace dsv4::topk {

constexpr int kMaxScheduledRows = 1024;
constexpr int kPageSlots = 4096;
// launches in flight at once get different counters, as long as there are no more than this
constexpr int kCounterSets = 64;
constexpr int kHeld = 16;  // values a thread
constexpr int kMaxHeld = kHeld * kSelectThreads;
constexpr int kGranule = 16;
constexpr int kStepBits = 12;  // values that a block takes at one load a thread
constexpr int kHeldBits = kStepBits + 2;
static_assert(kMaxHeld == 1 << kHeldBits);
constexpr int kAheadBits = 12;  // values that a block asks for before it knows the lengths
constexpr int kMaxK = 2048;
constexpr int kFixedRows = 64;  // up to this many a block is a row's before the lengths are there
constexpr int kLine = 32;  // values that stay together when a row is dealt to its chunks
constexpr int kMaxDealt = kBins * 32;  // length: a bit a token in place of the bins
constexpr int kMaxBest = 512;  // a chunk's thread maxima that its bound is found from, of 1,024

// Zero when the library is loaded; the block that uses the last count puts zero back.
__device__ unsigned int arrived[kCounterSets * kMaxScheduledRows];

struct TopkParams {
  const float* scores;
  const int* lengths;
  const int* page_table;
  int* slots;
  int* raw;        // may be null
  float* maxima;   // [rows, maxima_stride], workspace or the indexer's output
  long long score_stride, table_stride, maxima_stride;
  int rows, k, page_bits, counter_set, width;
  int best;           // room for the best values of all of a row's chunks; 0: leave maxima
  int bits_ahead, chunks_ahead;  // a row's chunks, if all rows are as long as they can be
  unsigned inverse_ahead;        // 65,536 / chunks_ahead, upwards
  bool dealt_ahead;   // in chunks of as many values as a block takes at one load a thread
  bool fixed;         // block i is row i's unless a row is long; pages hold four tokens or more
  bool scheduled;     // chunks by length; otherwise one block a row whatever its length
  bool maxima_ready;  // the indexer wrote them
};

struct Smem {
  SelectSmem select;
  int pages[kPageSlots];
  int taken[kMaxK];  // tokens, ascending
  uint32_t found[2];  // values of a chunk that reach its first and its second bound; [0] also: ties of a row
  int is_last;
};

// One row's work; `this` is the same in all threads.
struct Row {
  const TopkParams& p;
  Smem& smem;
  const float* scores;
  const float* maxima;
  const int* table;
  long long out;
  int row, length;

  __device__ __forceinline__ Row(const TopkParams& p, Smem& smem, int row, int length)
      : p(p), smem(smem), scores(p.scores + row * p.score_stride), maxima(p.maxima + row * p.maxima_stride),
        table(p.page_table + row * p.table_stride), out(static_cast<long long>(row) * p.k), row(row),
        length(length) {}

  // Fetches the row's part of the page table; copies_arrived() and a barrier before it is used.
  __device__ __forceinline__ void fetch_pages() const {
    const int pages = min((length + (1 << p.page_bits) - 1) >> p.page_bits, kPageSlots);
#pragma unroll 1
    for (int i = threadIdx.x; i < pages; i += kSelectThreads) copy_async4(&smem.pages[i], table + i);
  }

  // Writes token `index` of the row as its i-th.
  __device__ __forceinline__ void write(int i, int index) const {
    const int page = index >> p.page_bits;
    const int physical = page < kPageSlots ? smem.pages[page] : __ldg(table + page);
    p.slots[out + i] = (physical << p.page_bits) | (index & ((1 << p.page_bits) - 1));
    if (p.raw) p.raw[out + i] = index;
  }

  // At most k values: all of them, then -1.
  __device__ __forceinline__ void all() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.k; i += kSelectThreads) {
      int slot = -1;
      if (i < length) slot = (__ldg(table + (i >> p.page_bits)) << p.page_bits) | (i & ((1 << p.page_bits) - 1));
      p.slots[out + i] = slot;
      if (p.raw) p.raw[out + i] = i < length ? i : -1;
    }
  }

  __device__ __forceinline__ bool list(int& count) const;
  __device__ __forceinline__ bool select() const;
  __device__ __forceinline__ bool select_short(const float4& x, int valid) const;
  __device__ __forceinline__ bool select_best(int chunks, int room) const;
  __device__ __forceinline__ void select_slowly() const;
};

enum Source { kScores, kMaxima, kGranules };

// The first of the four values of a row that a thread takes of a chunk that lines are dealt to.
__device__ __forceinline__ int dealt_index(int chunks, int chunk) {
  return ((threadIdx.x >> 3) * chunks + chunk) * kLine + (threadIdx.x & 7) * 4;
}

// Four values from an address that is a multiple of 16, the first `valid` of them; -inf for the rest, which are not read.
__device__ __forceinline__ float4 load_four(const float* from, int valid) {
  // a branch, so that the two ways do not wait for one another's registers
  if (valid == 4) return __ldcg(reinterpret_cast<const float4*>(from));
  float4 four = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  if (valid > 0) four.x = __ldcg(from);
  if (valid > 1) four.y = __ldcg(from + 1);
  if (valid > 2) four.z = __ldcg(from + 2);
  return four;
}

__device__ __forceinline__ float most_of(const float4& x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }

// Of the ties before the tie-th, how many were chosen.
__device__ __forceinline__ void add_chosen_before(uint32_t& count, const SelectSmem& smem, uint32_t tie) {
  count += __popc(smem.chosen[tie / 32] & ((1u << (tie & 31)) - 1));
#pragma unroll 1
  for (int i = 0; i < tie / 32; ++i) count += __popc(smem.chosen[i]);
}

// Element order of a thread's held values: warp, vector, lane, component.
__device__ __forceinline__ int held_index(int vectors, int j) {
  return ((threadIdx.x >> 5) * vectors + j) * 128 + (threadIdx.x & 31) * 4;
}

// Lists the values of a row of more than kListed that reach a bound, in index order; false if the list cannot hold them.
__device__ __forceinline__ bool Row::list(int& count) const {
  SelectSmem& s = smem.select;
  if (p.k > kSelectThreads) return false;
  const bool is_long = length > kMaxHeld;
  Source source = is_long ? kMaxima : kScores;
  count = is_long ? (length + kGranule - 1) / kGranule : length;
  if (count < p.k) return false;
  float bound = -INFINITY;
#pragma unroll 1
  while (true) {
    const int vectors = (count + (1 << kStepBits) - 1) >> kStepBits;
    if (vectors * 4 > kHeld) return false;
    const float* from = source == kMaxima ? maxima : scores;
    const int end = source == kMaxima ? count : length;
    float4 x[kHeld / 4];
    int index[kHeld / 4];
    uint32_t valid = 0;  // a bit a value
#pragma unroll
    for (int j = 0; j < kHeld / 4; ++j) {
      index[j] = held_index(vectors, j);
      x[j] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      if (j < vectors && index[j] < count) {
        if (source == kGranules) index[j] = s.indices[index[j] / kGranule] * kGranule + index[j] % kGranule;
        const int here = min(max(end - index[j], 0), 4);
        x[j] = load_four(from + index[j], here);
        valid |= ((1u << here) - 1u) << (4 * j);
      }
    }
    if (source != kGranules) {
      // Each thread holds at most 4 * vectors values, so at least count / (4 * vectors) threads hold one. Their maxima
      // give a bound if they are k; if they are 2 k, a good one. Otherwise all values are counted.
      if (count >= 2 * p.k * 4 * vectors) {
        float most = -INFINITY;
#pragma unroll
        for (int j = 0; j < kHeld / 4; ++j) most = fmaxf(most, most_of(x[j]));
        if (valid) atomicAdd(&s.bins[bin_of(most)], 1u);
      } else {
#pragma unroll
        for (int j = 0; j < kHeld / 4; ++j) {
          if (valid >> (4 * j) & 1u) atomicAdd(&s.bins[bin_of(x[j].x)], 1u);
          if (valid >> (4 * j) & 2u) atomicAdd(&s.bins[bin_of(x[j].y)], 1u);
          if (valid >> (4 * j) & 4u) atomicAdd(&s.bins[bin_of(x[j].z)], 1u);
          if (valid >> (4 * j) & 8u) atomicAdd(&s.bins[bin_of(x[j].w)], 1u);
        }
      }
      find_bin(s, p.k);
      bound = bin_floor(s.bin);
      if (!(bound > -INFINITY)) return false;  // among -inf: below it lies no bin of numbers
    }
    uint32_t reached = 0;
#pragma unroll
    for (int j = 0; j < kHeld / 4; ++j) {
      if (j < vectors)
      reached |= (x[j].x >= bound ? 1u : 0u) << (4 * j) | (x[j].y >= bound ? 2u : 0u) << (4 * j) |
                 (x[j].z >= bound ? 4u : 0u) << (4 * j) | (x[j].w >= bound ? 8u : 0u) << (4 * j);
    }
    reached &= valid;
    // counts of the four vectors, a byte each (at most 128 in a warp), so that one scan orders them all
    uint32_t counts = 0;
#pragma unroll
    for (int j = 0; j < kHeld / 4; ++j) counts |= __popc(reached >> (4 * j) & 15u) << (8 * j);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t in_warp = __reduce_add_sync(0xffffffffu, counts);
    if (lane == 0) s.warp_sums[1][warp] = __dp4a(in_warp, 0x01010101u, 0u);
    __syncthreads();  // also: the granule list was read and may be written over
    const uint32_t sums = s.warp_sums[1][lane];
    const uint32_t upto = warp_inclusive_sum(counts);
    const uint32_t listed = __reduce_add_sync(0xffffffffu, sums);
    uint32_t base = __reduce_add_sync(0xffffffffu, lane < warp ? sums : 0);
    const bool last = source != kMaxima;
    if (listed > (last ? kListed : kMaxHeld / kGranule)) return false;
#pragma unroll
    for (int j = 0; j < kHeld / 4; ++j) {
      if (j >= vectors) break;
      uint32_t position = base + ((upto - counts) >> (8 * j) & 255u);
      base += in_warp >> (8 * j) & 255u;
      const float values[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (reached >> (4 * j + c) & 1u) {
          s.values[position] = values[c];
          s.indices[position++] = index[j] + c;
        }
      }
    }
    if (threadIdx.x == 0) s.bound = key_of(bound);
    __syncthreads();
    count = listed;
    if (last) break;
    source = kGranules;
    count *= kGranule;
  }
  return true;
}

// Selects and writes; false, with nothing written, when the row must go the slow way.
__device__ __forceinline__ bool Row::select() const {
  SelectSmem& s = smem.select;
  fetch_pages();
  const bool whole = length <= kListed;
  int count = length;
  if (!whole && !list(count)) return false;
  // Four candidates a thread, in index order; warps without one have little to do.
  const int first = threadIdx.x * 4, valid = min(max(count - first, 0), 4);
  float4 x{};
  int4 index{};
  uint32_t level[4] = {};  // the bin, from 1; 0 for no value
  if (valid) {
    if (whole) {
      x = load_four(scores + first, valid);
      index = make_int4(first, first + 1, first + 2, first + 3);
    } else {
      x = *reinterpret_cast<const float4*>(&s.values[first]);
      index = *reinterpret_cast<const int4*>(&s.indices[first]);
    }
    const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c >= valid) break;
      // listed values lie close above the bound, so their bins are narrow: 4,096 for the next octave
      const uint32_t bin = whole ? bin_of(values[c]) : min((key_of(values[c]) - s.bound) >> 11, kBins - 1);
      level[c] = bin + 1;
      atomicAdd(&s.bins[bin], 1u);
    }
  }
  const float values[4] = {x.x, x.y, x.z, x.w};
  const int indices[4] = {index.x, index.y, index.z, index.w};
  find_bin_here(s, p.k);
  uint32_t threshold = s.bin + 1, wanted = p.k - s.above;
  const uint32_t in_bin = s.count;
  const bool many = in_bin > kMaxRank;
  if (many) {
    // ties, mostly: the exact key, byte by byte from the highest
    const uint32_t bin = threshold;
    uint32_t mask = 0;
    threshold = 0;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const uint32_t key = key_of(values[c]);
        if (level[c] == bin && (key & mask) == threshold) atomicAdd(&s.bins[key >> shift & 255u], 1u);
      }
      find_bin(s, wanted);
      threshold |= s.bin << shift;
      mask |= 255u << shift;
      wanted -= s.above;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) level[c] = c < valid ? key_of(values[c]) : 0;
  }
  copies_arrived();
  const bool rank = !many && in_bin > wanted;
  if (threadIdx.x < kMaxRank / 32) s.chosen[threadIdx.x] = 0;
  uint32_t own = 0;  // greater ones in the low half, equal ones in the high half
#pragma unroll
  for (int c = 0; c < 4 && valid; ++c) own += (level[c] > threshold) | (level[c] == threshold) << 16;
  uint32_t total;
  const uint32_t before = block_prefix(s, own, 1, total);
  const uint32_t greater = before & 0xffffu, equal = before >> 16;
  if (rank) {
    uint32_t tie = equal;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (level[c] == threshold) s.tied[tie++] = key_of(values[c]);
    __syncthreads();
    choose_ties(s, in_bin, wanted);
  }
  if (own) {
    uint32_t position = greater, tie = equal;
    if (rank) {
      add_chosen_before(position, s, tie);
    } else {
      position += min(tie, wanted);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      bool take = level[c] > threshold;
      if (level[c] == threshold) {
        take = rank ? s.chosen[tie / 32] >> (tie & 31) & 1u : tie < wanted;
        ++tie;
      }
      if (take) smem.taken[position++] = indices[c];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.k; i += kSelectThreads) write(i, smem.taken[i]);
  return true;
}

// What select() does, for a row of up to kListed values that are there: the way of the shortest rows, one piece of code
// without steps for other rows. x: the thread's four values, of which `valid` count. False when too many tie.
__device__ __forceinline__ bool Row::select_short(const float4& x, int valid) const {
  SelectSmem& s = smem.select;
  const int first = threadIdx.x * 4;
  const float values[4] = {x.x, x.y, x.z, x.w};
  int page = 0;  // of the four
  uint32_t level[4] = {};  // the bin, from 1; 0 for no value
  if (valid) {
    page = __ldg(table + (first >> p.page_bits));
    uint32_t bin[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) bin[c] = bin_of(values[c]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < valid) atomicAdd(&s.bins[bin[c]], 1u);
      level[c] = c < valid ? bin[c] + 1 : 0;
    }
  }
  if (threadIdx.x < kMaxRank / 32) s.chosen[threadIdx.x] = 0;
  find_bin_here(s, p.k);
  const uint32_t threshold = s.bin + 1, wanted = p.k - s.above, in_bin = s.count;
  uint32_t own = 0;  // greater ones in the low half, equal ones in the high half
#pragma unroll
  for (int c = 0; c < 4 && valid; ++c) own += (level[c] > threshold) | (level[c] == threshold) << 16;
  uint32_t total;
  const uint32_t before = block_prefix(s, own, 1, total);
  uint32_t position = before & 0xffffu, tie = before >> 16;
  uint32_t chosen = 0;  // a bit for each of the four
  if (in_bin > wanted) {
    if (in_bin > kMaxRank) return false;
    uint32_t at = tie;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (level[c] == threshold) s.tied[at++] = key_of(values[c]);
    __syncthreads();
    choose_ties(s, in_bin, wanted);
    add_chosen_before(position, s, tie);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (level[c] == threshold) chosen |= (s.chosen[tie / 32] >> (tie & 31) & 1u) << c, ++tie;
  } else {
    position += tie;
#pragma unroll
    for (int c = 0; c < 4; ++c) chosen |= (level[c] == threshold) << c;
  }
  if (!own) return true;
  const int slot = page << p.page_bits | (first & ((1 << p.page_bits) - 1));
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (level[c] > threshold || chosen >> c & 1u) {
      p.slots[out + position] = slot + c;
      if (p.raw) p.raw[out + position] = first + c;
      ++position;
    }
  }
  return true;
}

// Exact for any row and k: byte-wise passes over the row in device memory (mostly L2), then one to write. For rows
// whose values tie beyond the list, and for k past the block's threads.
__device__ __forceinline__ void Row::select_slowly() const {
  SelectSmem& s = smem.select;
  uint32_t prefix = 0, mask = 0, wanted = p.k;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
#pragma unroll 2
    for (int i = threadIdx.x; i < length; i += kSelectThreads) {
      const uint32_t key = key_of(__ldcg(scores + i));
      // a warp whose values agree counts them at once: rows come here because they tie
      if ((key & mask) == prefix) {
        const uint32_t byte = key >> shift & 255u;
        const uint32_t active = __activemask();
        const uint32_t peers = __match_any_sync(active, byte);
        if ((threadIdx.x & 31) == __ffs(peers) - 1) atomicAdd(&s.bins[byte], static_cast<uint32_t>(__popc(peers)));
      }
    }
    find_bin(s, wanted);
    prefix |= s.bin << shift;
    mask |= 255u << shift;
    wanted -= s.above;
    __syncthreads();
  }
  copies_arrived();
  uint32_t written = 0, equals = 0;
#pragma unroll 1
  for (int start = 0, turn = 0; start < length && written + min(equals, wanted) < p.k; start += 4 * kSelectThreads, ++turn) {
    const int first = start + threadIdx.x * 4;
    uint32_t keys[4];
    uint32_t own = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      keys[c] = first + c < length ? key_of(__ldcg(scores + first + c)) : 0u;
      own += (keys[c] > prefix) | (keys[c] == prefix) << 16;
    }
    uint32_t total;
    const uint32_t before = block_prefix(s, own, turn, total);
    uint32_t greater = written + (before & 0xffffu), equal = equals + (before >> 16);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (keys[c] > prefix || (keys[c] == prefix && equal < wanted)) write(greater + min(equal, wanted), first + c);
      greater += keys[c] > prefix;
      equal += keys[c] == prefix;
    }
    written += total & 0xffffu;
    equals += total >> 16;
  }
}

// The best of a chunk: what its threads' maxima give as a bound, and all values that reach it, in no order, as pairs of a
// value and a token with -1 for the rest of its `room`. The last pair's value is the bound, infinite if there is no room.
template <int kVectors>
__device__ __forceinline__ void write_best(const TopkParams& p, Smem& smem, int row, int length, int chunk, int chunks,
                                           bool there, int room, int wanted) {
  SelectSmem& s = smem.select;
  const float* scores = p.scores + row * p.score_stride;
  const int stride = chunks * (4 * kSelectThreads);
  const int first = dealt_index(chunks, chunk);
  float4 x[kVectors];
  if (kVectors == 1 && there && first + 4 <= length) {
    x[0] = reinterpret_cast<const float4*>(s.indices)[kSelectThreads - 1 - threadIdx.x];
  } else {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      x[j] = load_four(scores + first + j * stride, min(max(length - first - j * stride, 0), 4));
  }
  float most = -INFINITY;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) most = fmaxf(most, most_of(x[j]));
  if (threadIdx.x == 0) smem.found[0] = smem.found[1] = 0;
  float bound;
  int found;
  // neighbours are often alike: then a thread's four reach the bound together, and fewer of the maxima are enough
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    if (first < length) atomicAdd(&s.bins[bin_of(most)], 1u);
    find_bin_here(s, turn ? wanted * 5 / 16 : wanted);
    bound = bin_floor(s.bin);
    if (__ballot_sync(0xffffffffu, first < length && most >= bound)) {
      uint32_t reached = 0;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        reached |= (x[j].x >= bound ? 1u : 0u) << (4 * j) | (x[j].y >= bound ? 2u : 0u) << (4 * j) |
                   (x[j].z >= bound ? 4u : 0u) << (4 * j) | (x[j].w >= bound ? 8u : 0u) << (4 * j);
      }
      const uint32_t upto = warp_inclusive_sum(__popc(reached));
      uint32_t position = 0;
      if ((threadIdx.x & 31) == 31) position = atomicAdd(&smem.found[turn], upto);
      position = __shfl_sync(0xffffffffu, position, 31) + upto - __popc(reached);
      if (reached && position + __popc(reached) < room) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          const float values[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (reached >> (4 * j + c) & 1u) {
              s.values[position] = values[c];
              s.indices[position++] = first + j * stride + c;
            }
          }
        }
      }
    }
    __syncthreads();
    found = smem.found[turn];
    if (found < room || turn) break;
  }
  const bool fits = found < room && bound > -INFINITY;  // a bound among -inf is none
  float* values = p.maxima + row * p.maxima_stride + chunk * room;
  int* tokens = reinterpret_cast<int*>(values + p.best);
#pragma unroll 1
  for (int i = threadIdx.x; i < room; i += kSelectThreads) {
    const bool is_value = i < found && i < room - 1;
    __stcg(values + i, i == room - 1 ? (fits ? bound : INFINITY) : is_value ? s.values[i] : -INFINITY);
    __stcg(tokens + i, is_value ? s.indices[i] : -1);
  }
}

// Selects from the chunks' best and writes; false, with nothing written, when they may not hold all of the k.
__device__ __forceinline__ bool Row::select_best(int chunks, int room) const {
  SelectSmem& s = smem.select;
  const int lane = threadIdx.x & 31, first = threadIdx.x * 4;
  const int* tokens = reinterpret_cast<const int*>(maxima + p.best);
  const float chunk_bound = lane < chunks ? __ldcg(maxima + (lane + 1) * room - 1) : -INFINITY;
  float4 x{};
  int4 token = make_int4(-1, -1, -1, -1);
  if (first < chunks * room) {
    x = __ldcg(reinterpret_cast<const float4*>(maxima + first));
    token = __ldcg(reinterpret_cast<const int4*>(tokens + first));
  }
  fetch_pages();
  if (threadIdx.x == 0) s.bin = kBins, smem.found[0] = 0;
  const uint32_t bound = __reduce_max_sync(0xffffffffu, key_of(chunk_bound));
  if (bound == key_of(INFINITY)) return false;
  const float values[4] = {x.x, x.y, x.z, x.w};
  const int indices[4] = {token.x, token.y, token.z, token.w};
  uint32_t level[4];  // the bin, from 1; 0 for no value
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint32_t key = key_of(values[c]);
    level[c] = 0;
    if (indices[c] >= 0 && key >= bound) {
      const uint32_t bin = min((key - bound) >> 11, kBins - 1);
      level[c] = bin + 1;
      atomicAdd(&s.bins[bin], 1u);
    }
  }
  find_bin_here(s, p.k);
  const uint32_t threshold = s.bin + 1, in_bin = s.count, wanted = p.k - s.above;
  if (threshold > kBins || in_bin > kMaxRank) return false;
  // a bit a token, which puts them in order; the bins are clear
  const bool rank = in_bin > wanted;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (level[c] > threshold || (level[c] == threshold && !rank)) {
      atomicOr(&s.bins[indices[c] / 32], 1u << (indices[c] & 31));
    } else if (level[c] == threshold) {
      const uint32_t tie = atomicAdd(&smem.found[0], 1u);
      s.tied[tie] = key_of(values[c]);
      s.indices[tie] = indices[c];
    }
  }
  copies_arrived();
  if (rank) {
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x >> 5; i < in_bin; i += kSelectThreads / 32) {
      const uint32_t key = s.tied[i];
      const int index = s.indices[i];
      uint32_t ahead = 0;
#pragma unroll 1
      for (int j = lane; j - lane < in_bin; j += 32) {
        const uint32_t other = j < in_bin ? s.tied[j] : 0;
        ahead += __popc(__ballot_sync(0xffffffffu, other > key || (other == key && j < in_bin && s.indices[j] < index)));
      }
      if (lane == 0 && ahead < wanted) atomicOr(&s.bins[index / 32], 1u << (index & 31));
    }
  }
  __syncthreads();
  // 128 tokens a thread, the last ones first
  const int group = kSelectThreads - 1 - threadIdx.x;
  const uint4 bits = reinterpret_cast<const uint4*>(s.bins)[group];
  reinterpret_cast<uint4*>(s.bins)[group] = make_uint4(0, 0, 0, 0);
  const uint32_t own = __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w);
  uint32_t total;
  uint32_t position = p.k - own - block_prefix(s, own, 1, total);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  if (own) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll 1
      for (uint32_t left = words[c]; left; left &= left - 1)
        smem.taken[position++] = group * 128 + c * 32 + __ffs(left) - 1;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.k; i += kSelectThreads) write(i, smem.taken[i]);
  return true;
}

// Out of the way of the code that usually runs.
__device__ __noinline__ void select_row_slowly(const TopkParams& p, Smem& smem, int row, int length) {
  const Row work(p, smem, row, length);
  work.select_slowly();
}

// Writes the maximum of every granule of [begin, end); begin is a multiple of 4,096.
__device__ __forceinline__ void write_maxima(const TopkParams& p, int row, int begin, int end) {
  const float* scores = p.scores + row * p.score_stride;
  float* maxima = p.maxima + row * p.maxima_stride;
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int start = begin + threadIdx.x * 4; start - threadIdx.x * 4 < end; start += kAtOnce * 4 * kSelectThreads) {
    float4 four[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = start + i * 4 * kSelectThreads;
      four[i] = load_four(scores + index, min(max(end - index, 0), 4));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = start + i * 4 * kSelectThreads;
      float most = most_of(four[i]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if (index < end && (threadIdx.x & 3) == 0) __stcg(maxima + index / kGranule, most);
    }
  }
}

__device__ __noinline__ void write_row_maxima(const TopkParams& p, int row, int length) {
  write_maxima(p, row, 0, length);
  __syncthreads();
}

__global__ __launch_bounds__(kSelectThreads, 1) void topk_kernel(const __grid_constant__ TopkParams p) {
  DSV4_SHARED_MEMORY(Smem, smem);
  const int lane = threadIdx.x & 31;
  const int first_length = lane < p.rows ? __ldg(p.lengths + lane) : 0;  // of row `lane`, asked for before all else
  const int second_length = p.fixed && lane + 32 < p.rows ? __ldg(p.lengths + lane + 32) : 0;
  float4 own{};
  if (!p.maxima_ready && p.fixed && blockIdx.x < p.rows && threadIdx.x * 4 + 4 <= p.width)
    own = __ldcg(reinterpret_cast<const float4*>(p.scores + blockIdx.x * p.score_stride) + threadIdx.x);
  // the bins are clear whenever nobody counts: find_bin leaves them so
  clear_bins(smem.select);
  if (!p.maxima_ready) {
    // What the block will probably need is on its way before the lengths say so: its chunk if all rows are as long as
    // they can be. Those of short rows are among them.
    const int row = blockIdx.x * p.inverse_ahead >> 16, chunk = blockIdx.x - row * p.chunks_ahead;
    const int first = chunk << p.bits_ahead;
    const int values = 1 << (p.bits_ahead < kAheadBits ? p.bits_ahead : kAheadBits);
    if (row < p.rows) {
      if (p.dealt_ahead) {
        // into the end of the list, which stays free until these values have been read
        const int ahead = dealt_index(p.chunks_ahead, chunk);
        if (ahead + 4 <= p.width)
          copy_async16(&smem.select.indices[kListed - 4 - threadIdx.x * 4], p.scores + row * p.score_stride + ahead);
      } else if (threadIdx.x < values / kLine) {
        const int ahead = p.best && p.bits_ahead <= kHeldBits ? (threadIdx.x * p.chunks_ahead + chunk) * kLine
                                                                  : first + threadIdx.x * kLine;
        if (ahead < p.width) prefetch(p.scores + row * p.score_stride + ahead);
      }
      if (threadIdx.x == kSelectThreads - 1) {
        prefetch(p.page_table + row * p.table_stride + (first >> p.page_bits));
        if (p.chunks_ahead > 1) prefetch(&arrived[p.counter_set * kMaxScheduledRows + row]);
      }
    }
  }
  __syncthreads();
  if (p.maxima_ready) wait_for_primary();
  // Where no row is long there is nothing to deal.
  const bool fixed = p.fixed && !__ballot_sync(0xffffffffu, max(first_length, second_length) > kMaxHeld);
  if (fixed && blockIdx.x >= p.rows) {
    copies_arrived();
    return;
  }
  if (fixed) {
    const int length = __shfl_sync(0xffffffffu, blockIdx.x < 32 ? first_length : second_length, blockIdx.x & 31);
    const Row work(p, smem, blockIdx.x, min(length, p.width));
    if (work.length > p.k && work.length <= kListed) {
      const int first = threadIdx.x * 4, valid = min(max(work.length - first, 0), 4);
      if (p.maxima_ready || first + 4 > p.width) own = load_four(work.scores + first, valid);
      const bool done = work.select_short(own, valid);
      copies_arrived();
      if (done) return;
      __syncthreads();
    }
  }

  // The schedule, found by each warp for itself. Without long rows a unit is a row. Otherwise a long row is a unit for each
  // of its chunks of 4,096 << shift values, enough for all blocks to have some.
  int chunk_bits = 0;  // 0: no row is long
  if (p.scheduled && !fixed) {
    int steps = 0;
#pragma unroll 1
    for (int row = lane; row < p.rows; row += 32) {
      const int length = row < 32 ? first_length : __ldg(p.lengths + row);
      if (length > kMaxHeld) steps += (length + (1 << kStepBits) - 1) >> kStepBits;
    }
    steps = __reduce_add_sync(0xffffffffu, steps);
    if (steps) chunk_bits = kStepBits;
#pragma unroll 1
    while ((steps << kStepBits >> chunk_bits) > static_cast<int>(gridDim.x)) ++chunk_bits;
  }
  copies_arrived();
  int unit = blockIdx.x;
#pragma unroll 1
  while (true) {
    int row = unit, length = 0, chunks = 1, chunk = 0;
    if (chunk_bits) {
      int passed = 0;  // units of the rows before
      row = -1;
#pragma unroll 1
      for (int first = 0; first < p.rows; first += 32) {
        const int own_row = first + lane;
        const int own_length = first == 0 ? first_length : own_row < p.rows ? __ldg(p.lengths + own_row) : 0;
        int units = own_row < p.rows;
        if (own_length > kMaxHeld) units = (own_length + (1 << chunk_bits) - 1) >> chunk_bits;
        const int upto = passed + warp_inclusive_sum(units);
        const uint32_t hit = __ballot_sync(0xffffffffu, upto > unit);
        if (hit) {
          const int from = __ffs(hit) - 1;
          row = first + from;
          length = __shfl_sync(0xffffffffu, own_length, from);
          chunks = __shfl_sync(0xffffffffu, units, from);
          chunk = unit - (__shfl_sync(0xffffffffu, upto, from) - chunks);
          break;
        }
        passed = __shfl_sync(0xffffffffu, upto, 31);
      }
      if (row < 0) return;  // no units are left
    } else {
      if (row >= p.rows) return;
      length = row < 32 ? __shfl_sync(0xffffffffu, first_length, row) : __ldg(p.lengths + row);
    }
    length = min(max(length, 0), p.width);
    bool mine = true;
    // how many best values a chunk may leave, and how many thread maxima to find its bound from: twice its share or more
    int room = 0;
    if (chunks > 1 && p.best && length <= kMaxDealt && chunk_bits <= kHeldBits) {
      room = p.best / chunks & ~3;
      if (min(room * 5 / 8, kMaxBest) * chunks < 2 * p.k) room = 0;
    }
    if (length > kMaxHeld && !p.maxima_ready) {
      const int begin = p.scheduled ? chunk << chunk_bits : 0;
      const int wanted = min(room * 5 / 8, kMaxBest);
      if (room && chunk_bits == kStepBits) {
        const int row_ahead = blockIdx.x * p.inverse_ahead >> 16;
        const bool there = p.dealt_ahead && unit == blockIdx.x && chunks == p.chunks_ahead && row == row_ahead &&
                           chunk == blockIdx.x - row_ahead * p.chunks_ahead;
        write_best<1>(p, smem, row, length, chunk, chunks, there, room, wanted);
      } else if (room) {
        write_best<4>(p, smem, row, length, chunk, chunks, false, room, wanted);
      } else {
        write_maxima(p, row, begin, p.scheduled ? min(begin + (1 << chunk_bits), length) : length);
      }
      __syncthreads();
      if (chunks > 1) {
        if (threadIdx.x == 0) {
          unsigned int* counter = &arrived[p.counter_set * kMaxScheduledRows + row];
          smem.is_last = arrive(counter) == chunks - 1u;
          if (smem.is_last) *counter = 0;
        }
        __syncthreads();
        mine = smem.is_last;
      }
    }
    if (mine) {
      const Row work(p, smem, row, length);
      if (length <= p.k) {
        work.all();
      } else if (!room || !work.select_best(chunks, room)) {
        copies_arrived();  // the pages, which are fetched again
        if (room) write_row_maxima(p, row, length);
        if (!work.select()) select_row_slowly(p, smem, row, length);
      }
    }
    if (fixed) return;
    unit += gridDim.x;
    __syncthreads();  // smem is used again
  }
}

}  // namespace dsv4::topk

DSV4_KERNELS(dsv4::limit<dsv4::kSelectThreads, sizeof(dsv4::topk::Smem)>("topk_kernel"))

// scores [rows, width] fp32, row stride in floats; lengths [rows]; page_table [rows, *]; slots and raw [rows, k] dense;
// maxima: workspace of rows * maxima_stride floats, 16-byte aligned. maxima_ready: the indexer wrote them.
DSV4_EXPORT int dsv4_topk(const float* scores, long long score_stride, int width, const int* lengths,
                          const int* page_table, long long table_stride, int* slots, int* raw, float* maxima,
                          long long maxima_stride, int rows, int k, int page_size, int counter_set, int maxima_ready,
                          int sms, void* stream) {
  using namespace dsv4;
  using namespace dsv4::topk;
  if (rows < 1 || k < 1 || k > kMaxK || page_size < 1 || (page_size & (page_size - 1)) || score_stride % 4 ||
      reinterpret_cast<uintptr_t>(scores) % 16 || reinterpret_cast<uintptr_t>(maxima) % 16 || maxima_stride % 4)
    return kBadArgument;
  static bool opted_in[64] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < 64 && !opted_in[device]) {
    error = cudaFuncSetAttribute(topk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
    if (error != cudaSuccess) return error;
    opted_in[device] = true;
  }
  // chunks only where a row can be long and its maxima are not there yet
  const bool scheduled = !maxima_ready && rows <= kMaxScheduledRows && width > kMaxHeld;
  const int best = scheduled && k <= kSelectThreads ? std::min<long long>(kListed, maxima_stride / 2) & ~3ll : 0;
  int bits = scheduled ? kStepBits : kAheadBits;
  if (scheduled)
    while (1 << bits < width && rows * ((width + (1ll << bits) - 1) >> bits) > sms) ++bits;
  const int chunks = scheduled ? (width + (1ll << bits) - 1) >> bits : 1;
  const long long steps = (width + (1ll << kStepBits) - 1) >> kStepBits;
  const int blocks = scheduled ? static_cast<int>(std::min<long long>(sms, rows * steps)) : rows;
  const bool fixed = rows <= kFixedRows && rows <= blocks && page_size >= 4;
  const TopkParams p{scores, lengths, page_table, slots, raw, maxima, score_stride, table_stride, maxima_stride,
                     rows, k, __builtin_ctz(page_size), counter_set % kCounterSets, width, best, bits, chunks,
                     (65536u + chunks - 1) / chunks, best && chunks > 1 && bits == kStepBits, fixed, scheduled,
                     maxima_ready != 0};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kSelectThreads);
  config.dynamicSmemBytes = sizeof(Smem);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = maxima_ready ? 1 : 0;
  return cudaLaunchKernelEx(&config, topk_kernel, p);
}
