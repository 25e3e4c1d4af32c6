// Scores for heavy hitters at a boundary: the softmax rows of the interval's last queries, computed again over body and tail, and
// for every token the sum of its column (algorithm: H2O, arXiv 2306.14048, at committed boundaries only).
//
// Three kernels, because a column needs its rows' maxima and sums first:
//   observe_tiles    per tile of 64 candidates and query row: maximum and sum of exponentials
//   observe_rows     per query row: the tiles merged, in order
//   observe_columns  per candidate: weights of all query rows added, in order
// Candidates are the filled body slots, then the tail, which at a boundary is full.
#pragma once
#include "attend.cuh"

namespace edgekv {
namespace cuda {

// One compaction of one layer. Passed to kernels by value.
struct Compaction {
  Layer layer;
  const float* inv_freq;  // [rotary_dim / 2] in device memory, with positions = cache
  long long position;     // the boundary
  long long rank_base;    // rotary position of the next token
  int capacity;           // room per kv head in the arrays of scores: every slot, and the sinks of a compressed state
  int query_rows;         // observe * q_heads / kv_heads
  // Workspace:
  float* score;           // [kv_heads][capacity] of candidates: attention received, or the rank by keys
  float* seen;            // [kv_heads][capacity] observing queries; by keys: 1 / length of the key
  float* tiles;           // [kv_heads][tiles][query_rows][2] maximum, sum; by keys: [kv_heads][tiles][key_dim]
  float* rows;            // [kv_heads][query_rows][2] maximum, sum
  int* source;            // [kv_heads][body_slots] candidate that moves to each body slot
  int ranks_always;       // keys are ranked also where all have room (unpack_candidates.cuh decides)
  // Of a compressed state, the tokens that leave the tail, [kv_heads][tail_slots]:
  float* spread;          // [key_dim] keys without their mean, transformed
  unsigned char* codes;   // [key_dim / 4] sign codes
  unsigned char* records;
};

// What leaves the tail. The first tokens of a text that a compressed cache reads go to its sinks; the candidates for the body are the
// filled body slots, then the rest of the tail.
struct Moves {
  int sinks_before, to_sinks;  // sinks that are in place, and those that come now; 0 in a dense state, whose sinks are body slots
  int added, candidates;
};
EDGEKV_DEVICE Moves moves_of(const Compaction& c, const Tail& tail) {
  const LayerParams& p = c.layer.p;
  Moves m{0, 0, p.tail_slots, 0};
  if (p.format == kFormatSelfIndex) {
    m.sinks_before = p.sinks < tail.base ? p.sinks : tail.base;
    m.to_sinks = p.sinks - m.sinks_before < p.tail_slots ? p.sinks - m.sinks_before : p.tail_slots;
    m.added -= m.to_sinks;
  }
  m.candidates = tail.body + m.added;
  return m;
}

EDGEKV_DEVICE Tail read_boundary(const Compaction& c) {
  Tail t = read_tail(c.layer, c.position, 0);
  const LayerParams& p = c.layer.p;
  t.ok = t.ok && t.committed == p.tail_slots && (p.keep != kKeepFull || moves_of(c, t).candidates <= p.body_slots);
  if (p.format == kFormatSelfIndex) t.ok = t.ok && t.base / p.tail_slots < p.intervals;
  return t;
}
EDGEKV_HOST_DEVICE int tiles_of(const LayerParams& p) { return splits_of(p.body_slots, kTile) + splits_of(p.tail_slots, kTile); }

constexpr int kObserveRowsPerWarp = 4;
template <typename Elem>
EDGEKV_HOST_DEVICE size_t observe_shared_bytes() {
  return sizeof(Elem) * kStageElements + 4 * kObserveRowsPerWarp * kWarps * kTileDims + 4 * 2 * kWarps * kTile;
}

// The tile `index` of candidates: body tiles first, each at most up to the filled slots.
EDGEKV_DEVICE Slots tile_slots(const Compaction& c, const Tail& tail, int index) {
  const int body_tiles = splits_of(c.layer.p.body_slots, kTile);
  Slots r;
  r.tail = index >= body_tiles;
  r.begin = (r.tail ? index - body_tiles : index) * kTile;
  const int filled = r.tail ? c.layer.p.tail_slots : tail.body;
  r.end = r.begin + kTile < filled ? r.begin + kTile : filled;
  return r;
}

// Masked scores of query rows first_row.. (this warp's RowsPerWarp of them) against the tile's tokens 2 * lane + e.
template <typename Elem>
EDGEKV_DEVICE void tile_scores(const Compaction& c, const Tail& tail, const Slots& slots, int kv_head, int batch, Elem* stage, float* queries,
                               float (&score)[kObserveRowsPerWarp][2], bool (&sees)[kObserveRowsPerWarp][2]) {
  constexpr int kRows = kObserveRowsPerWarp * kWarps;
  const LayerParams& p = c.layer.p;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, tokens = slots.end - slots.begin;
  const int plane_slots = slots.tail ? p.tail_slots : p.body_slots;
  const Elem* keys = plane<Elem>(c.layer, slots.tail ? c.layer.at.tail_k : c.layer.at.body_k) + size_t(kv_head) * plane_slots * p.key_dim;
  const Elem* stored = plane<Elem>(c.layer, c.layer.at.tail_q);
#pragma unroll
  for (int i = 0; i < kObserveRowsPerWarp; ++i) score[i][0] = score[i][1] = 0.0f;
  for (int chunk = 0; chunk < chunks(p.key_dim); ++chunk) {
    const int first = chunk * kTileDims, width = p.key_dim - first < kTileDims ? p.key_dim - first : kTileDims;
    __syncthreads();  // the stage and the queries before are no longer read
    load_keys(stage, keys, slots.begin, tokens, first, width, p.key_dim);
    copy_commit();
    for (int i = int(threadIdx.x); i < kRows * kTileDims; i += kThreads) {
      const int r = batch * kRows + i / kTileDims, d = i % kTileDims;
      const RowOf row = row_of(p, kv_head, r);
      queries[i] = r < c.query_rows && d < width ? to_float(stored[(size_t(row.head) * p.observe + row.t) * p.key_dim + first + d]) : 0.0f;
    }
    EDGEKV_COPY_WAIT(0);
    __syncthreads();
    add_scores<kObserveRowsPerWarp>(score, stage, queries + warp * kObserveRowsPerWarp * kTileDims, kTileDims, width, lane);
  }
  for (int e = 0; e < 2; ++e) {
    int key_pos = -1;
    if (2 * lane + e < tokens)
      key_pos = slots.tail ? tail.base + slots.begin + 2 * lane + e
                           : plane<int32_t>(c.layer, c.layer.at.body_pos)[size_t(kv_head) * p.body_slots + slots.begin + 2 * lane + e];
#pragma unroll
    for (int i = 0; i < kObserveRowsPerWarp; ++i) {
      const int r = batch * kRows + warp * kObserveRowsPerWarp + i;
      const int query = tail.base + p.tail_slots - p.observe + row_of(p, kv_head, r).t;
      sees[i][e] = r < c.query_rows && visible(p, key_pos, query);
      score[i][e] = sees[i][e] ? soft_limit(__fmul_rn(p.scale, score[i][e]), p.softcap) : negative_infinity();
    }
  }
}

// Grid (tiles, kv_heads), kThreads threads.
template <typename Elem>
__global__ void __launch_bounds__(kThreads) observe_tiles(const Compaction c) {
  constexpr int kRows = kObserveRowsPerWarp * kWarps;
  EDGEKV_SHARED(shared);
  Elem* stage = reinterpret_cast<Elem*>(shared);
  float* queries = reinterpret_cast<float*>(shared + sizeof(Elem) * kStageElements);
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const Slots slots = tile_slots(c, tail, int(blockIdx.x));
  if (slots.begin >= slots.end) return;
  const int kv_head = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  for (int batch = 0; batch * kRows < c.query_rows; ++batch) {
    float score[kObserveRowsPerWarp][2];
    bool sees[kObserveRowsPerWarp][2];
    tile_scores(c, tail, slots, kv_head, batch, stage, queries, score, sees);
#pragma unroll
    for (int i = 0; i < kObserveRowsPerWarp; ++i) {
      const int r = batch * kRows + warp * kObserveRowsPerWarp + i;
      const float m = warp_max(fmaxf(score[i][0], score[i][1]));
      const float sum = warp_sum(m == negative_infinity() ? 0.0f : __fadd_rn(expf(score[i][0] - m), expf(score[i][1] - m)));
      if (lane == 0 && r < c.query_rows) {
        float* at = c.tiles + ((size_t(kv_head) * gridDim.x + blockIdx.x) * c.query_rows + r) * 2;
        at[0] = m;
        at[1] = sum;
      }
    }
  }
}

// Grid (ceil(query_rows / block), kv_heads).
__global__ void observe_rows(const Compaction c) {
  const Tail tail = read_boundary(c);
  const int r = int(blockIdx.x * blockDim.x + threadIdx.x), kv_head = int(blockIdx.y), tiles = tiles_of(c.layer.p);
  if (!tail.ok || r >= c.query_rows) return;
  float maximum = negative_infinity(), sum = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    const Slots slots = tile_slots(c, tail, tile);
    if (slots.begin >= slots.end) continue;
    const float* at = c.tiles + ((size_t(kv_head) * tiles + tile) * c.query_rows + r) * 2;
    const Merge m = merge(maximum, at[0]);
    maximum = m.maximum;
    sum = merged(m, sum, at[1]);
  }
  float* out = c.rows + (size_t(kv_head) * c.query_rows + r) * 2;
  out[0] = maximum;
  out[1] = sum;
}

// Grid (tiles, kv_heads), kThreads threads. Old scores and counts decay; new tokens start at 0.
template <typename Elem>
__global__ void __launch_bounds__(kThreads) observe_columns(const Compaction c) {
  constexpr int kRows = kObserveRowsPerWarp * kWarps;
  EDGEKV_SHARED(shared);
  Elem* stage = reinterpret_cast<Elem*>(shared);
  float* queries = reinterpret_cast<float*>(shared + sizeof(Elem) * kStageElements);
  float* columns = queries + kRows * kTileDims;  // [kWarps][kTile] sums, then [kWarps][kTile] counts
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const Slots slots = tile_slots(c, tail, int(blockIdx.x));
  if (slots.begin >= slots.end) return;
  const int kv_head = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  float sum[2] = {0.0f, 0.0f}, count[2] = {0.0f, 0.0f};
  for (int batch = 0; batch * kRows < c.query_rows; ++batch) {
    float score[kObserveRowsPerWarp][2];
    bool sees[kObserveRowsPerWarp][2];
    tile_scores(c, tail, slots, kv_head, batch, stage, queries, score, sees);
#pragma unroll
    for (int i = 0; i < kObserveRowsPerWarp; ++i) {
      const int r = batch * kRows + warp * kObserveRowsPerWarp + i;
      if (r >= c.query_rows) continue;
      const float* row = c.rows + (size_t(kv_head) * c.query_rows + r) * 2;
      for (int e = 0; e < 2; ++e)
        if (sees[i][e]) {
          sum[e] = __fadd_rn(sum[e], expf(score[i][e] - row[0]) / row[1]);
          count[e] += 1.0f;
        }
    }
  }
  for (int e = 0; e < 2; ++e) {
    columns[warp * kTile + 2 * lane + e] = sum[e];
    columns[(kWarps + warp) * kTile + 2 * lane + e] = count[e];
  }
  __syncthreads();
  const int token = int(threadIdx.x);
  if (token >= slots.end - slots.begin) return;
  float score = 0.0f, seen = 0.0f;
  for (int w = 0; w < kWarps; ++w) {
    score = __fadd_rn(score, columns[w * kTile + token]);
    seen += columns[(kWarps + w) * kTile + token];
  }
  const int slot = slots.begin + token, candidate = slots.tail ? tail.body + slot : slot;
  if (!slots.tail) {
    const size_t at = size_t(kv_head) * p.body_slots + slot;
    score = __fadd_rn(__fmul_rn(plane<float>(c.layer, c.layer.at.body_score)[at], p.score_decay), score);
    seen = __fadd_rn(__fmul_rn(plane<float>(c.layer, c.layer.at.body_seen)[at], p.score_decay), seen);
  }
  c.score[size_t(kv_head) * c.capacity + candidate] = score;
  c.seen[size_t(kv_head) * c.capacity + candidate] = seen;
}

}  // namespace cuda
}  // namespace edgekv
