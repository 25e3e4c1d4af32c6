// What a step does to its rows before they attend: rotated, projected, stored in the tail, and packed as the tiles want queries. Written
// once on the vector type of the simd_*.h included before this file.
#pragma once
#include <cmath>
#include <cstring>

#include "cpu/packed_queries.h"

namespace {

using edgekv::kRowBlocks;
using edgekv::Step;

// out = in with the pairs of the first rotary_dim numbers rotated: (a, b) -> (a cos - b sin, b cos + a sin).
inline void rotate(const float* in, float* out, int dim, int rotary_dim, bool interleaved, const float* cos, const float* sin) {
  const int half = rotary_dim / 2;
  if (interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = in[2 * i], b = in[2 * i + 1];
      out[2 * i] = a * cos[i] - b * sin[i];
      out[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  } else {
    for (int i = 0; i < half; ++i) {
      const float a = in[i], b = in[i + half];
      out[i] = a * cos[i] - b * sin[i];
      out[i + half] = b * cos[i] + a * sin[i];
    }
  }
  std::memcpy(out + rotary_dim, in + rotary_dim, size_t(dim - rotary_dim) * sizeof(float));
}

// kVectors vectors of out[j] = sum over d of in[d] * map[d][j], map [from][to]: four sums, of every fourth d, added in pairs (one sum
// would wait for itself); products and sums apart, so that every instruction set and the oracle round alike.
template <int kVectors, class M>
inline void project_columns(const float* in, const M* map, int from, int to, float* out) {
  Vec sum[kVectors][4];
  for (auto& four : sum)
    for (Vec& one : four) one = zero();
  auto take = [&](int d, int i) {
    const Vec x = splat(in[d]);
    for (int v = 0; v < kVectors; ++v) sum[v][i] = add(sum[v][i], mul(load(map + int64_t(d) * to + v * kLanes), x));
  };
  int d = 0;
  for (; d + 4 <= from; d += 4) take(d, 0), take(d + 1, 1), take(d + 2, 2), take(d + 3, 3);
  for (int i = 0; d < from; ++d, ++i) take(d, i);
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, add(add(sum[v][0], sum[v][1]), add(sum[v][2], sum[v][3])));
}

// The same for every column. Two vectors at a time: a decode step reads a map once, from memory, and should read it in its order.
template <class M>
inline void project(const float* in, const M* map, int from, int to, float* out) {
  int j = 0;
  for (; j + 2 * kLanes <= to; j += 2 * kLanes) project_columns<2>(in, map + j, from, to, out + j);
  for (; j + kLanes <= to; j += kLanes) project_columns<1>(in, map + j, from, to, out + j);
  if (j == to) return;
  Vec sum[4] = {zero(), zero(), zero(), zero()};
  for (int d = 0; d < from; ++d) sum[d % 4] = add(sum[d % 4], mul(load_first(map + int64_t(d) * to + j, to - j), splat(in[d])));
  store_first(out + j, add(add(sum[0], sum[1]), add(sum[2], sum[3])), to - j);
}

// A query or key as it meets the others: rotated when there are tables, projected when there is a map [given_dim][key_dim] of its head.
// Points to `in` or to one of the two pieces of working memory of 1024 floats.
template <class M>
inline const float* rotate_and_project(const edgekv::LayerParams& p, const float* in, const float* cos, const float* sin, const M* map,
                                       float* rotated, float* projected) {
  const int dim = edgekv::given_dim(p);
  if (cos != nullptr) {
    rotate(in, rotated, dim, p.rotary_dim, p.rotary_interleaved, cos, sin);
    in = rotated;
  }
  if (map == nullptr) return in;
  project(in, map, dim, p.key_dim, projected);
  return projected;
}

template <class E, class F>
inline void store_row(E* to, const F* from, int dim) {
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d));
  if (d < dim) store_first(to + d, load_first(from + d, dim - d), dim - d);
}

template <class E>
void prepare_head(const Step& s, int head) {
  const auto& p = s.params;
  const int dim = p.key_dim;
  const int64_t map_size = int64_t(edgekv::given_dim(p)) * dim;
  float rotated[1024], projected[1024];
  auto row = [&](const edgekv::Rows& x, const void* maps, int h, int t) {
    const int64_t at = int64_t(t) * s.table_stride + edgekv::table_at(p, head);
    return rotate_and_project(p, x.data + h * x.head_stride + t * x.row_stride, s.cos ? s.cos + at : nullptr, s.cos ? s.sin + at : nullptr,
                              maps ? static_cast<const E*>(maps) + h * map_size : nullptr, rotated, projected);
  };

  E element[1024];
  E* tail_k = reinterpret_cast<E*>(s.state.tail_k) + int64_t(head) * p.tail_slots * dim;
  E* tail_v = reinterpret_cast<E*>(s.state.tail_v) + int64_t(head) * p.tail_slots * p.value_dim;
  for (int t = 0; t < s.rows; ++t) {
    const int slot = s.first_tail + t;
    store_row(element, row(s.k, s.key_map, head, t), dim);
    E* column = tail_k + int64_t(slot / kLanes) * dim * kLanes + slot % kLanes;
    for (int d = 0; d < dim; ++d) column[d * kLanes] = element[d];
    store_row(tail_v + int64_t(slot) * p.value_dim, s.v.data + head * s.v.head_stride + t * s.v.row_stride, p.value_dim);
  }

  const float factor = score_factor(p);
  const int all = s.rows * s.group, observed_from = p.tail_slots - p.observe;
  float* packed = s.queries + int64_t(head) * all * dim;
  for (int t = 0; t < s.rows; ++t) {
    for (int g = 0; g < s.group; ++g) {
      const float* q = row(s.q, s.query_map, head * s.group + g, t);
      const int observed = s.first_tail + t - observed_from;
      if (edgekv::keeps_scores(p) && observed >= 0)
        store_row(reinterpret_cast<E*>(s.state.tail_q) + (int64_t(head * s.group + g) * p.observe + observed) * dim, q, dim);
      const int r = t * s.group + g, block = r / kRowBlock * kRowBlock;
      const int width = all - block < kRowBlock ? all - block : kRowBlock;
      float* to = packed + int64_t(block) * dim + (r - block);
      for (int d = 0; d < dim; ++d) to[d * width] = q[d] * factor;
      if (p.format == edgekv::kFormatSelfIndex) prepare_packed(s, head, r, q, factor);
    }
  }
}

inline void prepare(const Step& s, int head) {
  if (s.params.element == edgekv::kFloat16)
    prepare_head<uint16_t>(s, head);
  else
    prepare_head<float>(s, head);
}

}  // namespace
