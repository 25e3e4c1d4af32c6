// The second ranking of a retrieval (docs/self_index.md, "Choice"): candidates by their stored keys. Products are whole numbers, and what is
// done in floating point is done in one order without fused products, so that every instruction set and the oracle rank alike.
#pragma once
#include "cpu/picked_slots.h"

namespace {

constexpr int kQueryLevels = 64;          // of a query's numbers, either sign
constexpr int kMostLevel = 63;            // of a key's numbers
constexpr int kLevelShift = 8;            // bits of a zero point or scale below a level
constexpr float kLargestKey = 16320.0f;   // what a token's largest magnitude becomes before that shift: 63.75 levels
constexpr float kWeightUnit = 65536.0f;   // weights are counted in its inverse

// 2^x of x in [-126, 126], as exp2 in vecmath.h but without fused products.
inline Vec exp2_in_order(Vec x) {
  const Vec n = nearest(x), f = sub(x, n);
  Vec p = add(mul(splat(0.00132647273f), f), splat(0.00967151299f));
  p = add(mul(p, f), splat(0.0555073358f));
  p = add(mul(p, f), splat(0.240222424f));
  p = add(mul(p, f), splat(0.693147004f));
  p = add(mul(p, f), splat(1.0f));
  return times_power_of_two(p, n);
}

// tanh with absolute error below 1e-6.
inline Vec tanh_in_order(Vec x) {
  const Vec bounded = min(splat(20.0f), max(splat(-20.0f), x));
  return sub(splat(1.0f), div(splat(2.0f), add(exp2_in_order(mul(bounded, splat(2.0f * kLog2E))), splat(1.0f))));
}

// Products of the query heads [group][stride] of a kv head with the mean keys from interval `first` on, times the factor:
// float32 [group][intervals]. Each is added up as in dot_in_order.
inline void means_in_order(const PackedBody& b, const float* queries, int stride, int group, int first, float factor, float* out) {
  for (int g = 0; g < group; g += 4) {
    const float* q[4];
    for (int h = 0; h < 4; ++h) q[h] = queries + int64_t(g + h < group ? g + h : g) * stride;
    for (int i = first; i < b.intervals; ++i) {
      const uint16_t* m = b.mean + int64_t(i) * b.key_dim;
      Vec sum[4];
      for (Vec& s : sum) s = zero();
      for (int d = 0; d < b.key_dim; d += kLanes) {
        const Vec x = b.key_dim - d < kLanes ? load_first(m + d, b.key_dim - d) : load(m + d);
        for (int h = 0; h < 4; ++h) sum[h] = add(sum[h], mul(x, load(q[h] + d)));
      }
      for (int h = 0; h < 4 && g + h < group; ++h) out[int64_t(g + h) * b.intervals + i] = sum_lanes(sum[h]) * factor;
    }
  }
}

// A query head as whole numbers.
struct WholeQuery {
  float unit;   // a step of it, times the factor that makes scores of products
  int32_t sum;  // of its numbers
};

// x [stride], transformed and 0 from the head's size on, to whole numbers [stride] from -64 to 64.
inline WholeQuery whole_query(const float* x, int stride, float factor, int8_t* out) {
  Vec top = zero();
  for (int d = 0; d < stride; d += kLanes) top = max(abs(load(x + d)), top);
  const float largest = max_lanes(top);
  const Vec inverse = splat(largest >= 1e-30f ? kQueryLevels / largest : 0.0f), bound = splat(kQueryLevels);
  int32_t sum = 0;
  for (int d = 0; d < stride; d += kLanes) {
    alignas(64) float level[kLanes];
    store(level, max(splat(-kQueryLevels), min(nearest(mul(load(x + d), inverse)), bound)));
    for (int i = 0; i < kLanes; ++i) {
      out[d + i] = level[i] == level[i] ? int8_t(level[i]) : 0;  // of NaN anything will do
      sum += out[d + i];
    }
  }
  return {largest * factor * (1.0f / kQueryLevels), sum};
}

// Scores of up to kTile candidates from the products of whole numbers, in place: x [group][stride], written in whole vectors. largest
// [count]: their largest magnitudes; means [group][intervals].
inline void scores_of_products(const PickedSlots& t, const WholeQuery* queries, int group, const float* largest, const float* means, float* x,
                               int64_t stride) {
  const int intervals = t.body.intervals;
  IntervalRuns runs;
  for (int i = 0; i < t.count; i += kLanes) {
    const int lanes = t.count - i < kLanes ? t.count - i : kLanes;
    const Vec unit = mul(load(largest + i), splat(128.0f / kLargestKey));
    runs.find(t, i, lanes);
    for (int g = 0; g < group; ++g) {
      const float* of = means + int64_t(g) * intervals;
      Vec mean = splat(of[runs.of[0]]);
      for (int n = 1; n < runs.count; ++n) mean = keep_lanes(mean, 0, runs.from[n], splat(of[runs.of[n]]));
      float* at = x + g * stride + i;
      store(at, add(mul(load(at), mul(unit, splat(queries[g].unit))), mean));
    }
  }
}

// Attention that the candidates with these scores [group][stride] get among themselves, summed over the query heads: float32 [count]. work: as
// many numbers.
// A head's weights are 2^x relative to its largest, its sum one of whole numbers, so that no order of additions matters.
inline void rank_again(const float* scores, int64_t stride, int count, int group, float softcap, float* work, float* weight) {
  const int blocks = (count + kLanes - 1) / kLanes;
  const Vec nothing = splat(kNothing), lowest = splat(-100.0f);
  for (int g = 0; g < group; ++g) {
    const float* row = scores + g * stride;
    Vec top = nothing;
    for (int i = 0; i < blocks; ++i) {
      Vec x = load(row + i * kLanes);
      if (softcap > 0) x = mul(tanh_in_order(x), splat(softcap * kLog2E));
      if (i == blocks - 1) x = keep_lanes(x, 0, count - i * kLanes, nothing);
      store(work + i * kLanes, x);
      top = max(x, top);
    }
    const Vec base = splat(max_lanes(top));
    int64_t total = 0;
    for (int i = 0; i < blocks;) {
      Vec sum = zero();  // exact: at most 128 times 65536 in a lane
      for (const int end = i + 128 < blocks ? i + 128 : blocks; i < end; ++i) {
        const Vec w = exp2_in_order(max(lowest, sub(load(work + i * kLanes), base)));
        store(work + i * kLanes, w);
        sum = add(sum, nearest(mul(w, splat(kWeightUnit))));
      }
      alignas(64) float lane[kLanes];
      store(lane, sum);
      for (float s : lane) total += s >= 0 && s < 1e9f ? int64_t(s) : 0;  // a damaged state may have given anything
    }
    const Vec factor = splat(kWeightUnit / float(total));
    for (int i = 0; i < blocks; ++i) {
      const Vec w = mul(load(work + i * kLanes), factor);
      store(weight + i * kLanes, g == 0 ? w : add(load(weight + i * kLanes), w));
    }
  }
}

}  // namespace
