// Stored keys and queries as whole numbers (edgekv/reference/self_index/ranking.py): for the second ranking and for attention to what has been
// retrieved.
#pragma once
#include "packed_body.cuh"

namespace edgekv {
namespace cuda {

constexpr int kQueryLevels = 64;          // of a query's numbers, either sign
constexpr int kMostLevel = 63;            // of a key's numbers
constexpr int kLevelShift = 8;            // bits of a zero point or scale below a level
constexpr float kLargestKey = 16320.0f;   // what a token's largest magnitude becomes before that shift
constexpr float kRankLog2E = 1.44269504088896341f;

// What turns products into units of log2, or with a soft cap into arguments of tanh.
EDGEKV_DEVICE float score_factor(const LayerParams& p) { return p.softcap > 0.0f ? p.scale / p.softcap : __fmul_rn(p.scale, kRankLog2E); }

// A number of a query whose largest is `largest`, as one from -64 to 64.
EDGEKV_DEVICE float query_level(float x, float largest) {
  const float inverse = largest >= 1e-30f ? float(kQueryLevels) / largest : 0.0f;
  return fminf(float(kQueryLevels), fmaxf(float(-kQueryLevels), rintf(__fmul_rn(x, inverse))));
}
// A step of it, times the score factor.
EDGEKV_DEVICE float query_unit(float largest, float factor) { return __fmul_rn(__fmul_rn(largest, factor), 1.0f / kQueryLevels); }

// The largest magnitude that a token's key could hold, and the step of a product with its numbers.
EDGEKV_DEVICE float largest_of_key(const PackedBody& b, int slot) {
  float largest = 0.0f;
  for (int n = 0; n < (b.key_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP; ++n) {
    const float2 pair = key_pair(b, slot, n);
    largest = fmaxf(largest, __fadd_rn(pair.x, __fmul_rn(pair.y, float((1 << b.key_bits) - 1))));
  }
  return largest;
}
EDGEKV_DEVICE float key_unit(float largest) { return __fmul_rn(largest, 128.0f / kLargestKey); }

// Rounded to a whole number of 16 bits; what is none is the lowest.
EDGEKV_DEVICE short to_short(float x) { return x >= -32768.0f && x < 32767.5f ? short(rintf(x)) : short(-32768); }

// Four numbers of a key, odd and from -127 to 127, as bytes: codes are bytes, positive bits.
EDGEKV_DEVICE unsigned whole_numbers(short zero_point, short scale, unsigned codes, unsigned positive) {
  unsigned out = 0;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int level = short(zero_point + scale * int(codes >> 8 * c & 255u)) >> kLevelShift;
    const int odd = 2 * (level < 0 ? 0 : level < kMostLevel ? level : kMostLevel) + 1;
    out |= unsigned((positive >> c & 1u ? odd : -odd) & 255) << 8 * c;
  }
  return out;
}

// Numbers 8 i + 4 part + c of a group of a token's key, a word for each i: bytes.
EDGEKV_DEVICE void whole_key(const PackedBody& b, int slot, int group, int part, float largest, unsigned (&words)[4]) {
  const float widen = largest > 0.0f ? kLargestKey / largest : 0.0f;
  const float2 pair = key_pair(b, slot, group);
  const short zero_point = to_short(__fmul_rn(pair.x, widen)), scale = to_short(__fmul_rn(pair.y, widen));
  unsigned codes[4], positive[4];
  key_codes(b, slot, group, part, codes, positive);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = whole_numbers(zero_point, scale, codes[i], positive[i]);
}

// As unpack_keys (packed_body.cuh), but as whole numbers; units [tokens]: the steps of products with them, written with the first dimensions.
EDGEKV_DEVICE void unpack_whole_keys(float* stage, float* units, const PackedBody& b, const int* list, int tokens, int first, int width) {
  for (int item = int(threadIdx.x); item < kTile * kTileDims / 16; item += kThreads) {
    const int token = item % kTile, part = item / kTile, word = part % 2;
    if (token >= tokens || part / 2 * EDGEKV_GROUP >= width) continue;
    const float largest = largest_of_key(b, list[token]);
    if (first == 0 && part == 0) units[token] = key_unit(largest);
    unsigned words[4];
    whole_key(b, list[token], first / EDGEKV_GROUP + part / 2, word, largest, words);
    float* to = stage + token / EDGEKV_LANES * kKeyBlock + token % EDGEKV_LANES;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int d = part / 2 * EDGEKV_GROUP + i / 4 * 8 + word * 4 + i % 4;
      if (d < width) to[d * EDGEKV_LANES] = float(static_cast<signed char>(words[i / 4] >> 8 * (i % 4) & 255u));
    }
  }
}

}  // namespace cuda
}  // namespace edgekv
