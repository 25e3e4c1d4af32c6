// Scores of picked tokens for any number of queries, by score_heads() of the picked.h or picked_avx2.h included before this file.
#pragma once

namespace {

// Up to kHeadsAtOnce queries at a time meet a key where it is unpacked; the first of them fetch what comes next.
template <int kBits>
inline void score_rows(const Picked& t, const float* queries, int rows, int dim, const float* bias, float* out, int64_t stride) {
  for (int r = 0; r < rows; r += kHeadsAtOnce) {
    const float *q = queries + r * dim, *of_mean = bias + int64_t(r) * t.body.intervals;
    float* to = out + r * stride;
    switch (rows - r) {
      case 1: score_heads<1, kBits>(t, q, dim, of_mean, to, stride, r == 0); break;
      case 2: score_heads<2, kBits>(t, q, dim, of_mean, to, stride, r == 0); break;
      case 3: score_heads<3, kBits>(t, q, dim, of_mean, to, stride, r == 0); break;
      default: score_heads<4, kBits>(t, q, dim, of_mean, to, stride, r == 0);
    }
  }
}

// Scores of any number of ordered queries [rows][dim] against picked tokens: out [rows][stride], written in whole vectors.
inline void score_picked(const Picked& t, const float* queries, int rows, int dim, const float* bias, float* out, int64_t stride) {
  t.body.key_bits == 2 ? score_rows<2>(t, queries, rows, dim, bias, out, stride) : score_rows<4>(t, queries, rows, dim, bias, out, stride);
}

}  // namespace
