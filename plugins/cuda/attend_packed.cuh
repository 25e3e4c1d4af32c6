// Attention of T rows over a compressed body: all of it while a prompt is read, else the slots that each row has chosen (retrieve.cuh).
// Sinks and tail lie in full and are attend.cuh's; combine.cuh merges both.
//
// As in attend.cuh, splits depend on the layer's parameters alone and are merged in order. Within a split the slots that count are
// listed, a window at a time, and unpacked 64 by 64 into the stage that dense tokens would be copied to: what was not chosen is not
// read. A block takes the query rows of one token when they choose, so a row has the same bits alone and in a verification block; their keys
// and queries are the whole numbers of the second ranking (whole_keys.cuh), held as single precision, in which their products are exact.
// Queries meet keys transformed (turn_queries.cuh); the sums of values stay transformed until all splits are merged.
#pragma once
#include "attend.cuh"
#include "whole_keys.cuh"

namespace edgekv {
namespace cuda {

template <int RowsPerWarp>
EDGEKV_HOST_DEVICE size_t attend_packed_shared_bytes(int key_dim) {
  const size_t rows = RowsPerWarp * kWarps;
  return sizeof(float) * (kStageElements + rows * ((key_dim + 3) / 4 * 4) + rows * kTile + rows + kTile) + sizeof(int) * kWindow;
}

// Which of the slots first .. first + 31 a token attends to, of those in [begin, end).
EDGEKV_DEVICE unsigned slots_word(const Step& s, const Tail& tail, int kv_head, int t, int first, int begin, int end) {
  const unsigned inside = range_bits(first, begin, end);
  if (inside == 0u) return 0u;
  if (tail.retrieve == 0) return inside & ~range_bits(first, tail.hidden_from, tail.hidden_to);
  return inside & s.slots[(size_t(kv_head) * s.rows + t) * slot_words(s.layer.p) + first / 32];
}

// Grid (splits of the body or 1, kv_heads, tiles), kThreads threads. Tiles: of T * ceil(group / rows) or more row tiles, each times the
// value tiles.
template <int RowsPerWarp, int ValueChunks, bool Walk>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(RowsPerWarp, ValueChunks, Walk)) attend_packed(const Step s) {
  constexpr int kRows = RowsPerWarp * kWarps;
  EDGEKV_SHARED(shared);
  const LayerParams& p = s.layer.p;
  const int q_stride = (p.key_dim + 3) / 4 * 4;
  float* stage = reinterpret_cast<float*>(shared);
  float* queries = stage + kStageElements;
  float* weights = queries + kRows * q_stride;
  float* query_units = weights + kRows * kTile;  // steps of the rows' products, where they choose
  float* key_units = query_units + kRows;        // and of the tokens'
  int* list = reinterpret_cast<int*>(key_units + kTile);

  const Tail tail = read_step(s);
  if (!tail.ok) return;  // attend has written y
  const int kv_head = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, group = p.q_heads / p.kv_heads;
  const int value_tiles = (p.value_dim + ValueChunks * kTileDims - 1) / (ValueChunks * kTileDims), tile_of_rows = int(blockIdx.z) / value_tiles;
  const int value_first = int(blockIdx.z) % value_tiles * ValueChunks * kTileDims;
  const int value_width = p.value_dim - value_first < ValueChunks * kTileDims ? p.value_dim - value_first : ValueChunks * kTileDims;
  // Rows that choose come token by token, others together.
  const int tiles_of_token = (group + kRows - 1) / kRows, token = tail.retrieve ? tile_of_rows / tiles_of_token : 0;
  const int first_row = tail.retrieve ? token * group + tile_of_rows % tiles_of_token * kRows : tile_of_rows * kRows;
  const int all_rows = (tail.retrieve ? token + 1 : s.rows) * group;
  if (first_row >= all_rows) return;
  const PackedBody b = packed_body(s.layer, kv_head, tail.base);

  for (int i = int(threadIdx.x); i < kRows * q_stride; i += kThreads) {
    const int r = first_row + i / q_stride, d = i % q_stride;
    const RowOf row = row_of(p, kv_head, r);
    queries[i] = r < all_rows && d < p.key_dim && tail.body > 0 ? s.turned[(size_t(row.t) * p.q_heads + row.head) * p.key_dim + d] : 0.0f;
  }
  const float factor = score_factor(p);
  if (tail.retrieve && tail.body > 0) {
    __syncthreads();
    for (int i = 0; i < RowsPerWarp; ++i) {
      float *row = queries + (warp * RowsPerWarp + i) * q_stride, largest = 0.0f;
      for (int d = lane; d < p.key_dim; d += 32) largest = fmaxf(largest, fabsf(row[d]));
      largest = warp_max(largest);
      for (int d = lane; d < p.key_dim; d += 32) row[d] = query_level(row[d], largest);
      if (lane == 0) query_units[warp * RowsPerWarp + i] = query_unit(largest, factor);
    }
  }
  float total[RowsPerWarp][ValueChunks][2], total_max[RowsPerWarp], total_sum[RowsPerWarp];  // over finished splits (Walk)
#pragma unroll
  for (int i = 0; i < RowsPerWarp; ++i) {
    total_max[i] = negative_infinity();
    total_sum[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < ValueChunks; ++c) total[i][c][0] = total[i][c][1] = 0.0f;
  }

  float* own_weights = weights + warp * RowsPerWarp * kTile;
  const float* own_queries = queries + warp * RowsPerWarp * q_stride;
  const int splits = splits_of(p.body_slots, s.split), first_split = Walk ? 0 : int(blockIdx.x), last_split = Walk ? splits : first_split + 1;
  unsigned loaded = 0;  // at most the body's slots, so far
  for (int index = first_split; index < last_split; ++index) {
    const int begin = index * s.split, end = begin + s.split < tail.body ? begin + s.split : tail.body;
    float sum[RowsPerWarp][ValueChunks][2], row_max[RowsPerWarp], row_sum[RowsPerWarp], score[RowsPerWarp][2];
#pragma unroll
    for (int i = 0; i < RowsPerWarp; ++i) {
      row_max[i] = negative_infinity();
      row_sum[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < ValueChunks; ++c) sum[i][c][0] = sum[i][c][1] = 0.0f;
    }
    for (int window = begin; window < end; window += kWindow) {
      // The list before this one was last read before the barrier of the last stage of values; the next barrier makes it visible.
      const int first = window + 32 * lane;
      const int found = list_slots(slots_word(s, tail, kv_head, token, first, begin, end), first, warp == 0 ? list : nullptr, lane);
      loaded += found;
      for (int at = 0; at < found; at += kTile) {
        const int tokens = found - at < kTile ? found - at : kTile;
#pragma unroll
        for (int i = 0; i < RowsPerWarp; ++i) score[i][0] = score[i][1] = 0.0f;
        for (int d = 0; d < p.key_dim; d += kTileDims) {
          const int width = p.key_dim - d < kTileDims ? p.key_dim - d : kTileDims;
          __syncthreads();  // list and queries are there, and the stage is no longer read
          if (tail.retrieve)
            unpack_whole_keys(stage, key_units, b, list + at, tokens, d, width);
          else
            unpack_keys(stage, b, list + at, tokens, d, width);
          __syncthreads();
          add_scores<RowsPerWarp>(score, stage, own_queries + d, q_stride, width, lane);
        }

        // What the mean keys add, the mask by stored position, then one step of online softmax.
        int key_pos[2] = {-1, -1}, interval[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (2 * lane + e < tokens) {
            key_pos[e] = b.positions[list[at + 2 * lane + e]];
            interval[e] = interval_of(b, key_pos[e]);
          }
#pragma unroll
        for (int i = 0; i < RowsPerWarp; ++i) {
          const int r = first_row + warp * RowsPerWarp + i;
          const RowOf row = row_of(p, kv_head, r);
          const int query_pos = r < all_rows ? tail.base + tail.committed + row.t : -1;
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (visible(p, key_pos[e], query_pos)) {
              const float of_mean = s.of_mean[(size_t(row.t) * p.q_heads + row.head) * p.intervals + interval[e]];
              if (tail.retrieve) {  // to where scores are after the scale
                const float unit = __fmul_rn(key_units[2 * lane + e], query_units[warp * RowsPerWarp + i]);
                score[i][e] = __fadd_rn(__fmul_rn(score[i][e], unit), __fmul_rn(of_mean, factor)) / (p.softcap > 0.0f ? 1.0f / p.softcap : kRankLog2E);
              } else {
                score[i][e] = __fmul_rn(p.scale, __fadd_rn(score[i][e], of_mean));
              }
              score[i][e] = soft_limit(score[i][e], p.softcap);
            } else {
              score[i][e] = negative_infinity();
            }
          const float m = fmaxf(row_max[i], warp_max(fmaxf(score[i][0], score[i][1])));
          const bool none = m == negative_infinity();
          const float w0 = none ? 0.0f : expf(score[i][0] - m), w1 = none ? 0.0f : expf(score[i][1] - m);
          const float keep = none ? 1.0f : expf(row_max[i] - m);
          row_max[i] = m;
          row_sum[i] = fmaf(row_sum[i], keep, warp_sum(__fadd_rn(w0, w1)));
#pragma unroll
          for (int c = 0; c < ValueChunks; ++c) {
            sum[i][c][0] = __fmul_rn(sum[i][c][0], keep);
            sum[i][c][1] = __fmul_rn(sum[i][c][1], keep);
          }
          *reinterpret_cast<float2*>(own_weights + i * kTile + 2 * lane) = make_float2(w0, w1);
        }
#pragma unroll
        for (int c = 0; c < ValueChunks; ++c) {
          const int width = value_width - c * kTileDims < kTileDims ? value_width - c * kTileDims : kTileDims;
          if (width <= 0) continue;
          __syncthreads();  // the stage is no longer read
          unpack_values(stage, b, list + at, tokens, value_first + c * kTileDims, width);
          __syncthreads();
          add_values<RowsPerWarp, ValueChunks>(sum, c, stage, own_weights, tokens, lane);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < RowsPerWarp; ++i) {
      const int r = first_row + warp * RowsPerWarp + i;
      if (Walk) {
        const Merge m = merge(total_max[i], row_max[i]);
        total_max[i] = m.maximum;
        total_sum[i] = merged(m, total_sum[i], row_sum[i]);
#pragma unroll
        for (int c = 0; c < ValueChunks; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) total[i][c][e] = merged(m, total[i][c][e], sum[i][c][e]);
      } else if (r < all_rows) {
        const RowOf row = row_of(p, kv_head, r);
        float* part = s.body_part + ((size_t(index) * s.rows + row.t) * p.q_heads + row.head) * (p.value_dim + 2);
        store_part<ValueChunks>(part, p.value_dim, value_first, value_width, sum[i], row_max[i], row_sum[i], lane);
      }
    }
  }
  if constexpr (Walk) {
#pragma unroll
    for (int i = 0; i < RowsPerWarp; ++i) {
      const int r = first_row + warp * RowsPerWarp + i;
      if (r >= all_rows) continue;
      const RowOf row = row_of(p, kv_head, r);
      float* part = s.body_part + (size_t(row.t) * p.q_heads + row.head) * (p.value_dim + 2);
      store_part<ValueChunks>(part, p.value_dim, value_first, value_width, total[i], total_max[i], total_sum[i], lane);
    }
  }

  if (threadIdx.x != 0) return;
  const unsigned long long slots = loaded, value_groups = (value_width + EDGEKV_GROUP - 1) / EDGEKV_GROUP;
  auto* traffic = reinterpret_cast<unsigned long long*>(header(s.layer)->traffic);
  atomicAdd(&traffic[kReadBodyIndex], slots * ((p.key_dim / 4 + 1) / 2));
  atomicAdd(&traffic[kReadBodyKeys], slots * key_bytes(p));
  atomicAdd(&traffic[kReadBodyValues], slots * 4 * (p.value_bits + 1) * value_groups);
  atomicAdd(&traffic[kReadBodyMeta], slots * 4);
}

}  // namespace cuda
}  // namespace edgekv
