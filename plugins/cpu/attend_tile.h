// Some rows of a kv head against one tile of slots: scores, their softmax as it stands, weighted values. What decides the bits of a row is said
// in attend.h.
#pragma once
#include <cmath>
#include <cstring>

#include "cpu/prepare.h"

namespace {

// Memory that is needed next, brought closer while something else is computed: the next tile's keys while keys are read, its values
// during values, so that as much is asked for as is read, whatever the dimensions. Addresses beyond the planes do no harm.
struct Ahead {
  const char* next;
  const char* end;
  template <int kBytes>
  void fetch() {
    if (next >= end) return;
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(next + i, 0, 2);
    next += kBytes;
  }
};

// Running result of one row, in a partial (kernels.h).
struct RowState {
  float* at;
  int width;
  float* sums() const { return at + width; }
  float& highest() const { return at[width + 16]; }
};

// Sums stay in registers only where their loops are unrolled before the compiler decides what an array is: left to itself, gcc 12 wrote
// every sum of single-precision keys to memory in every round, which took three times as long. Hence the pragmas.

// Scores of R rows against V blocks of 16 keys. keys [V][dim][16], queries [dim][R], out R rows of `stride`.
template <class E, int R, int V>
inline void score_blocks(const E* keys, int dim, const float* queries, float* out, int64_t stride, Ahead& ahead) {
  Vec sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = zero();
  for (int d = 0; d < dim; ++d) {
    Vec key[V];
    for (int v = 0; v < V; ++v) key[v] = load(keys + (int64_t(v) * dim + d) * kLanes);
    ahead.fetch<V * kLanes * int(sizeof(E))>();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec q = splat(queries[d * R + r]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] = fma(key[v], q, sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * stride + v * kLanes, sum[r][v]);
}

template <class E, int R, int V>
inline void score_tile(const E* keys, int blocks, int dim, const float* queries, float* out, int64_t stride, Ahead& ahead) {
  while (blocks >= V) {
    score_blocks<E, R, V>(keys, dim, queries, out, stride, ahead);
    keys += int64_t(V) * dim * kLanes;
    out += V * kLanes;
    blocks -= V;
  }
  if constexpr (V > 1) score_tile<E, R, V / 2>(keys, blocks, dim, queries, out, stride, ahead);
}

// Turns the scores of one row into weights, in place, and rescales what the row has summed so far. The row sees the slots
// [lo, hi) of the tile; scores exist for the blocks [first, last).
inline void soften(RowState row, float* scores, int first, int last, int lo, int hi, float softcap) {
  const Vec nothing = splat(kNothing);
  Vec top = nothing;
  for (int b = first; b < last; ++b) {
    float* at = scores + b * kLanes;
    Vec x = load(at);
    if (softcap > 0) x = mul(tanh(x), splat(softcap * kLog2E));
    if (lo > b * kLanes || hi < (b + 1) * kLanes) x = keep_lanes(x, lo - b * kLanes, hi - b * kLanes, nothing);
    store(at, x);
    top = max(x, top);
  }
  const float before = row.highest(), tile = max_lanes(top), highest = tile > before ? tile : before;
  const float base = highest == kNothing ? 0.0f : highest;
  Vec sums = load(row.sums());
  if (highest != before) {
    const Vec factor = splat(exp2_one(before - base));
    sums = mul(sums, factor);
    for (int i = 0; i < row.width; i += kLanes) store(row.at + i, mul(load(row.at + i), factor));
    row.highest() = highest;
  }
  for (int b = first; b < last; ++b) {
    float* at = scores + b * kLanes;
    const Vec weight = exp2(sub(load(at), splat(base)));
    store(at, weight);
    sums = add(sums, weight);
  }
  store(row.sums(), sums);
}

// Adds the weighted values of slots [begin, end) to 16 * N dimensions of R rows. Slots from `common` on are seen by some rows
// only: row r stops before hi[r], so that what a later token stored never enters an earlier row, not even multiplied by zero.
template <class E, int R, int N, bool kPartial>
inline void add_values(const E* values, int64_t stride, int lanes, int begin, int common, int end, const int* hi, const float* weights,
                       float* sums, int sums_stride, Ahead& ahead) {
  Vec sum[R][N];
  auto value = [&](int slot, int n) {
    const E* at = values + slot * stride + n * kLanes;
    if constexpr (kPartial)
      return load_first(at, lanes);
    else
      return load(at);
  };
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[r][n] = load(sums + r * sums_stride + n * kLanes);
  for (int slot = begin; slot < common; ++slot) {
    Vec v[N];
    for (int n = 0; n < N; ++n) v[n] = value(slot, n);
    ahead.fetch<N * kLanes * int(sizeof(E))>();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec w = splat(weights[r * kTile + slot]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[r][n] = fma(v[n], w, sum[r][n]);
    }
  }
  for (int slot = common; slot < end; ++slot) {
    Vec v[N];
    for (int n = 0; n < N; ++n) v[n] = value(slot, n);
    for (int r = 0; r < R; ++r) {
      if (slot >= hi[r]) continue;
      const Vec w = splat(weights[r * kTile + slot]);
      for (int n = 0; n < N; ++n) sum[r][n] = fma(v[n], w, sum[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(sums + r * sums_stride + n * kLanes, sum[r][n]);
}

template <class E, int R, int N>
inline void add_value_tile(const E* values, int64_t stride, int dims, int begin, int common, int end, const int* hi,
                           const float* weights, float* sums, int sums_stride, Ahead& ahead) {
  while (dims >= N * kLanes) {
    add_values<E, R, N, false>(values, stride, kLanes, begin, common, end, hi, weights, sums, sums_stride, ahead);
    values += N * kLanes;
    sums += N * kLanes;
    dims -= N * kLanes;
  }
  if constexpr (N > 1)
    add_value_tile<E, R, N / 2>(values, stride, dims, begin, common, end, hi, weights, sums, sums_stride, ahead);
  else if (dims > 0)
    add_values<E, R, 1, true>(values, stride, dims, begin, common, end, hi, weights, sums, sums_stride, ahead);
}

// Vectors per row that keep the running sums of R rows in registers.
constexpr int vectors_for(int rows) {
  int n = 8;
  while (n > 1 && n * rows > kAccumulators) n /= 2;
  return n;
}

// A tile of a kv head: slots [0, size) at keys and values. lo and hi are relative to it.
template <class E>
struct Tile {
  const E *keys, *values;
  int key_dim, value_dim, value_stride, size;
  float softcap;
  bool fetched;  // an earlier block of rows has brought the tile into the cache
};

template <class E, int R>
__attribute__((noinline)) void attend_block(const Tile<E>& tile, const float* queries, const int* lo, const int* hi, float* partial, int stride, int width) {
  int begin = tile.size, common = tile.size, end = 0, limit[R];
  for (int r = 0; r < R; ++r) {
    limit[r] = hi[r] < tile.size ? hi[r] : tile.size;
    if (limit[r] <= lo[r] || limit[r] <= 0) limit[r] = 0;
    if (limit[r] > 0 && lo[r] < begin) begin = lo[r];
    if (limit[r] < common) common = limit[r];
    if (limit[r] > end) end = limit[r];
  }
  if (end == 0) return;  // nothing seen: weights of zero would change nothing
  if (begin < 0) begin = 0;
  if (common < begin) common = begin;
  alignas(64) float scores[R * kTile];
  const int first = begin / kLanes, last = (end + kLanes - 1) / kLanes;
  auto bytes = [](const E* from, int count) {
    const char* at = reinterpret_cast<const char*>(from);
    return Ahead{at, at + size_t(count) * sizeof(E)};
  };
  Ahead ahead = bytes(tile.keys + kTile * tile.key_dim, tile.fetched ? 0 : kTile * tile.key_dim);
  score_tile<E, R, vectors_for(R)>(tile.keys + int64_t(first) * tile.key_dim * kLanes, last - first, tile.key_dim, queries,
                                   scores + first * kLanes, kTile, ahead);
  for (int r = 0; r < R; ++r) {
    if (limit[r] > 0) {
      soften({partial + int64_t(r) * stride, width}, scores + r * kTile, first, last, lo[r], limit[r], tile.softcap);
    } else {
      std::memset(scores + r * kTile, 0, kTile * sizeof(float));
    }
  }
  ahead = bytes(tile.values + kTile * tile.value_dim, tile.fetched ? 0 : kTile * tile.value_dim);
  add_value_tile<E, R, vectors_for(R)>(tile.values, tile.value_stride, tile.value_dim, begin, common, end, limit, scores, partial, stride,
                                       ahead);
}

template <class E, int R>
inline void attend_rows(int rows, const Tile<E>& tile, const float* queries, const int* lo, const int* hi, float* partial, int stride,
                        int width) {
  if constexpr (R > 1) {
    if (rows < R) return attend_rows<E, R - 1>(rows, tile, queries, lo, hi, partial, stride, width);
  }
  attend_block<E, R>(tile, queries, lo, hi, partial, stride, width);
}

}  // namespace
