// The unit of work: a stage in shared memory of 64 tokens x 64 dimensions of one kv head, and what is computed on it. A block has
// 4 warps. Each warp owns RowsPerWarp query rows and sees all 64 tokens, so softmax never leaves a warp.
#pragma once
#include "layer.cuh"

namespace edgekv {
namespace cuda {

constexpr int kTile = 64;        // tokens
constexpr int kTileDims = 64;    // dimensions of a stage
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// Keys keep their interleaving by 16 tokens; one spare dimension after each block of 16 puts the four blocks on different banks.
constexpr int kKeyBlock = (kTileDims + 1) * EDGEKV_LANES;
constexpr int kStageElements = kTile / EDGEKV_LANES * kKeyBlock;
static_assert(kStageElements >= kTile * kTileDims, "a stage also holds values");

EDGEKV_HOST_DEVICE int chunks(int dim) { return (dim + kTileDims - 1) / kTileDims; }

// Starts copying dimensions [first, first + width) of `tokens` keys of one head from slot (a multiple of 16) into the stage.
template <typename Elem>
EDGEKV_DEVICE void load_keys(Elem* stage, const Elem* head_keys, int slot, int tokens, int first, int width, int key_dim) {
  constexpr int kUnit = 16 / sizeof(Elem);
  const int units = width * EDGEKV_LANES / kUnit;
  for (int b = 0; b * EDGEKV_LANES < tokens; ++b) {
    const Elem* from = head_keys + (size_t(slot / EDGEKV_LANES + b) * key_dim + first) * EDGEKV_LANES;
    for (int i = int(threadIdx.x); i < units; i += kThreads) copy_async_16(stage + b * kKeyBlock + i * kUnit, from + i * kUnit);
  }
}

// The same for values, which lie token by token. Rows that are no multiple of 16 bytes are copied number by number.
template <typename Elem>
EDGEKV_DEVICE void load_values(Elem* stage, const Elem* head_values, int slot, int tokens, int first, int width, int value_dim) {
  constexpr int kUnit = 16 / sizeof(Elem);
  const Elem* from = head_values + size_t(slot) * value_dim + first;
  if (value_dim % kUnit == 0) {
    const int units = width / kUnit;
    for (int i = int(threadIdx.x); i < tokens * units; i += kThreads) {
      const int token = width == kTileDims ? i / (kTileDims / kUnit) : i / units, unit = width == kTileDims ? i % (kTileDims / kUnit) : i % units;
      copy_async_16(stage + token * kTileDims + unit * kUnit, from + size_t(token) * value_dim + unit * kUnit);
    }
    return;
  }
  for (int i = int(threadIdx.x); i < tokens * width; i += kThreads)
    stage[i / width * kTileDims + i % width] = from[size_t(i / width) * value_dim + i % width];
}

// score[i][e] += q[i] . k for the two tokens 2 * lane + e of the stage. q: shared, this warp's first row at `first`, rows `stride` apart.
// Dimensions are added in order, one fma each, whatever T is: a row's bits do not depend on the rows beside it.
template <int RowsPerWarp, typename Elem>
EDGEKV_DEVICE void add_scores(float (&score)[RowsPerWarp][2], const Elem* stage, const float* q, int stride, int width, int lane) {
  const Elem* k = stage + lane / 8 * kKeyBlock + lane % 8 * 2;
  int d = 0;
#pragma unroll 2
  for (; d + 4 <= width; d += 4) {
    float2 key[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) key[j] = load_pair(k + (d + j) * EDGEKV_LANES);
#pragma unroll
    for (int i = 0; i < RowsPerWarp; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(q + i * stride + d);
      score[i][0] = fmaf(x.w, key[3].x, fmaf(x.z, key[2].x, fmaf(x.y, key[1].x, fmaf(x.x, key[0].x, score[i][0]))));
      score[i][1] = fmaf(x.w, key[3].y, fmaf(x.z, key[2].y, fmaf(x.y, key[1].y, fmaf(x.x, key[0].y, score[i][1]))));
    }
  }
  for (; d < width; ++d) {
    const float2 key = load_pair(k + d * EDGEKV_LANES);
#pragma unroll
    for (int i = 0; i < RowsPerWarp; ++i) {
      score[i][0] = fmaf(q[i * stride + d], key.x, score[i][0]);
      score[i][1] = fmaf(q[i * stride + d], key.y, score[i][1]);
    }
  }
}

// sum[i][chunk][e] += sum over tokens of weight[i][token] * v[token][2 * lane + e]. A weight of 0 leaves the sum alone even where
// the slot holds no number (a stale or rejected row).
template <int RowsPerWarp, int ValueChunks, typename Elem>
EDGEKV_DEVICE void add_values(float (&sum)[RowsPerWarp][ValueChunks][2], int chunk, const Elem* stage, const float* weight, int tokens, int lane) {
#pragma unroll 4
  for (int t = 0; t < tokens; ++t) {
    const float2 v = load_pair(stage + t * kTileDims + 2 * lane);
#pragma unroll
    for (int i = 0; i < RowsPerWarp; ++i) {
      const float w = weight[i * kTile + t];
      if (w != 0.0f) {  // the same for all lanes
        sum[i][chunk][0] = fmaf(w, v.x, sum[i][chunk][0]);
        sum[i][chunk][1] = fmaf(w, v.y, sum[i][chunk][1]);
      }
    }
  }
}

}  // namespace cuda
}  // namespace edgekv
