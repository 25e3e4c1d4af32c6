// Queries as the keys of a compressed body meet them: transformed, with their products with the mean keys.
#pragma once
#include "cpu/hadamard.h"
#include "cpu/packed_body.h"

namespace {

// Room between rows of queries that meet unpacked keys.
inline int packed_stride(int dim) { return (dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP * EDGEKV_GROUP; }

// Scores come out in units of log2, or before the soft cap as the argument of tanh.
inline float score_factor(const edgekv::LayerParams& p) { return p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E; }

// q times the factor, transformed, and zeros up to packed_stride.
inline void turn_query(const float* q, int dim, float factor, float* out) {
  for (int d = 0; d < dim; ++d) out[d] = q[d] * factor;
  hadamard(out, dim);
  for (int d = dim; d < packed_stride(dim); ++d) out[d] = 0;
}

// Row r of a kv head, rotated, to where attend_packed.h expects it.
inline void prepare_packed(const edgekv::Step& s, int head, int r, const float* q, float factor) {
  const auto& p = s.params;
  const PackedBody body(p, s.state, head, s.position - s.first_tail);
  const int64_t all = int64_t(s.rows) * s.group, row = head * all + r;
  const int dim = p.key_dim;
  if (s.slots != nullptr) {
    float scaled[1024];
    turn_query(q, dim, factor, s.turned + row * packed_stride(dim));
    for (int d = 0; d < dim; ++d) scaled[d] = q[d] * factor;
    const int first = s.body_count > 0 ? body.interval_of(body.positions[0]) : body.intervals;
    mean_scores(body, scaled, first, s.bias + row * body.intervals);
    __atomic_fetch_add(&s.loaded->body_meta, uint64_t(body.intervals - first) * dim * 2, __ATOMIC_RELAXED);
    return;
  }
  float turned[1024];
  turn_query(q, dim, factor, turned);
  const int block = r / kRowBlock * kRowBlock, width = int(all) - block < kRowBlock ? int(all) - block : kRowBlock;
  float* to = s.turned + (head * all + block) * dim + (r - block);
  for (int d = 0; d < dim; ++d) to[d * width] = turned[d];
}

}  // namespace
