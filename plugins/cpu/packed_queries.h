// Queries as the keys of a compressed body meet them: transformed, with their products with the mean keys.
#pragma once
#include <cstring>

#include "cpu/hadamard.h"
#include "cpu/ranking.h"

namespace {

// Room between rows of queries that meet unpacked keys.
inline int packed_stride(int dim) { return (dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP * EDGEKV_GROUP; }

// Scores come out in units of log2, or before the soft cap as the argument of tanh.
inline float score_factor(const edgekv::LayerParams& p) { return p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E; }

// Row r of a kv head, rotated, to where attend_packed.h expects it. Where its token has chosen slots, with the last head of the token: its
// rows transformed and what the mean keys add to their scores, unless the scores are known.
inline void prepare_packed(const edgekv::Step& s, int head, int r, const float* q, float factor) {
  const auto& p = s.params;
  const PackedBody body(p, s.state, head, s.position - s.first_tail);
  const int64_t all = int64_t(s.rows) * s.group, row = head * all + r;
  const int dim = p.key_dim, stride = packed_stride(dim);
  if (s.scored) return;
  if (p.latent > 0) {  // rebuilt keys meet queries as they are
    if (s.slots == nullptr) return;
    float* scaled = s.turned + row * stride;
    for (int d = 0; d < stride; ++d) scaled[d] = d < dim ? q[d] * factor : 0.0f;
    return;
  }
  if (s.slots != nullptr) {
    float* turned = s.turned + row * stride;
    std::memcpy(turned, q, size_t(dim) * sizeof(float));
    for (int d = dim; d < stride; ++d) turned[d] = 0;
    if ((r + 1) % s.group != 0) return;
    const int first = s.body_count > 0 ? body.interval_of(body.positions[0]) : body.intervals;
    turned -= int64_t(s.group - 1) * stride;
    means_in_order(body, turned, stride, s.group, first, factor, s.bias + (row + 1 - s.group) * body.intervals);
    for (int g = 0; g < s.group; ++g) hadamard(turned + g * stride, dim);
    __atomic_fetch_add(&s.loaded->body_meta, uint64_t(body.intervals - first) * dim * 2 * s.group, __ATOMIC_RELAXED);
    return;
  }
  float turned[1024];
  for (int d = 0; d < dim; ++d) turned[d] = q[d] * factor;
  hadamard(turned, dim);
  const int block = r / kRowBlock * kRowBlock, width = int(all) - block < kRowBlock ? int(all) - block : kRowBlock;
  float* to = s.turned + (head * all + block) * dim + (r - block);
  for (int d = 0; d < dim; ++d) to[d * width] = turned[d];
}

}  // namespace
