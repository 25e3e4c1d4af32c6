// Attention of T rows over body and tail, flash style: the slots are cut into splits, the splits into tiles of 64 tokens.
//
//   within a split   online softmax over the tiles, in slot order
//   across splits    the splits' results are merged in slot order
//
// Where splits begin depends on the layer's parameters alone. Decoding and verification give every split a block of its own and
// merge in combine.cuh; prefill lets one block walk through all splits and merge on the way (Walk). Both do the same
// operations in the same order, so a row has the same bits alone, in a verification block and in a prefill chunk.
// Masked tiles change nothing: maximum kept, sums multiplied by 1, weights of 0.
#pragma once
#include "rows.cuh"
#include "tile.cuh"

namespace edgekv {
namespace cuda {

// Stages in flight: enough bytes on the way to keep DRAM busy, few enough for three blocks on an SM of 164 KiB.
template <typename Elem>
constexpr int kStages = sizeof(Elem) == 2 ? 4 : 3;

// Query rows that share a kv head: row r of the block's rows is query head r % group of token r / group.
struct RowOf {
  int t, head;
};
EDGEKV_DEVICE RowOf row_of(const LayerParams& p, int kv_head, int r) {
  const int group = p.q_heads / p.kv_heads;
  return {r / group, kv_head * group + r % group};
}

// The slots a split covers in one plane.
struct Slots {
  bool tail;
  int begin, end;
};
EDGEKV_HOST_DEVICE int splits_of(int slots, int split) { return (slots + split - 1) / split; }
EDGEKV_DEVICE Slots slots_of(const Step& s, const Tail& tail, int index) {
  const int body_splits = splits_of(s.layer.p.body_slots, s.split);
  Slots r;
  r.tail = index >= body_splits;
  r.begin = (r.tail ? index - body_splits : index) * s.split;
  const int filled = r.tail ? tail.committed + s.rows : tail.body;
  r.end = r.begin + s.split < filled ? r.begin + s.split : filled;
  if (!r.tail) {  // hidden slots at either end are not even loaded; what is hidden between is masked
    if (tail.hidden_from <= r.begin && r.begin < tail.hidden_to) r.begin = tail.hidden_to;
    if (r.begin < tail.hidden_from && tail.hidden_from < r.end && r.end <= tail.hidden_to) r.end = tail.hidden_from;
  }
  return r;
}

// Merging a partial result into a running one: the only place where two softmaxes meet.
struct Merge {
  float maximum, keep, add;  // new maximum, factors of the running and the partial sums
};
EDGEKV_DEVICE Merge merge(float running, float partial) {
  const float m = fmaxf(running, partial);
  if (m == negative_infinity()) return {m, 1.0f, 0.0f};
  return {m, expf(running - m), expf(partial - m)};
}
EDGEKV_DEVICE float merged(const Merge& m, float running, float partial) { return fmaf(partial, m.add, __fmul_rn(running, m.keep)); }

// Leaves a row's result of some splits for the merge: this block's share of the values, and once the softmax's maximum and sum.
template <int ValueChunks>
EDGEKV_DEVICE void store_part(float* part, int value_dim, int value_first, int value_width, const float (&sum)[ValueChunks][2], float row_max,
                              float row_sum, int lane) {
#pragma unroll
  for (int c = 0; c < ValueChunks; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (c * kTileDims + 2 * lane + e < value_width) part[value_first + c * kTileDims + 2 * lane + e] = sum[c][e];
  if (lane == 0 && value_first == 0) part[value_dim] = row_max, part[value_dim + 1] = row_sum;
}

template <typename Elem, int RowsPerWarp>
EDGEKV_HOST_DEVICE size_t attend_shared_bytes(int key_dim) {
  const size_t rows = RowsPerWarp * kWarps;
  return sizeof(Elem) * kStageElements * kStages<Elem> + 4 * rows * ((key_dim + 3) / 4 * 4) + 4 * rows * kTile;
}

// Starts the copy of one stage: the key chunks of a tile, then its value chunks.
template <typename Elem>
EDGEKV_DEVICE void load_stage(const Step& s, Elem* stage, const Slots& slots, int kv_head, int index, int value_first, int value_width) {
  const LayerParams& p = s.layer.p;
  const int key_chunks = chunks(p.key_dim), per_tile = key_chunks + chunks(value_width);
  const int slot = slots.begin + index / per_tile * kTile, chunk = index % per_tile;
  const int tokens = slots.end - slot < kTile ? slots.end - slot : kTile;
  const int plane_slots = slots.tail ? p.tail_slots : p.body_slots;
  if (chunk < key_chunks) {
    const Elem* keys = plane<Elem>(s.layer, slots.tail ? s.layer.at.tail_k : s.layer.at.body_k) + size_t(kv_head) * plane_slots * p.key_dim;
    const int first = chunk * kTileDims, width = p.key_dim - first < kTileDims ? p.key_dim - first : kTileDims;
    load_keys(stage, keys, slot, tokens, first, width, p.key_dim);
  } else {
    const Elem* values = plane<Elem>(s.layer, slots.tail ? s.layer.at.tail_v : s.layer.at.body_v) + size_t(kv_head) * plane_slots * p.value_dim;
    const int first = (chunk - key_chunks) * kTileDims, width = value_width - first < kTileDims ? value_width - first : kTileDims;
    load_values(stage, values, slot, tokens, value_first + first, width, p.value_dim);
  }
}

// Blocks that should share an SM: what shared memory allows on 164 KiB, so registers are not squeezed below that for nothing.
constexpr int blocks_per_sm(int rows_per_warp, int value_chunks, bool walk) { return rows_per_warp < 4 ? 4 : walk && value_chunks == 4 ? 2 : 3; }

// Grid (splits or 1, kv_heads, row tiles * value tiles), kThreads threads. ValueChunks: 64-dimension pieces of the value tile.
template <typename Elem, int RowsPerWarp, int ValueChunks, bool Walk>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(RowsPerWarp, ValueChunks, Walk)) attend(const Step s) {
  constexpr int kRows = RowsPerWarp * kWarps;
  EDGEKV_SHARED(shared);
  const LayerParams& p = s.layer.p;
  const int q_stride = (p.key_dim + 3) / 4 * 4;
  Elem* stages = reinterpret_cast<Elem*>(shared);
  float* queries = reinterpret_cast<float*>(shared + sizeof(Elem) * kStageElements * kStages<Elem>);
  float* weights = queries + kRows * q_stride;

  const int kv_head = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int value_tiles = (p.value_dim + ValueChunks * kTileDims - 1) / (ValueChunks * kTileDims);
  const int value_first = int(blockIdx.z) % value_tiles * ValueChunks * kTileDims;
  const int value_width = p.value_dim - value_first < ValueChunks * kTileDims ? p.value_dim - value_first : ValueChunks * kTileDims;
  const int first_row = int(blockIdx.z) / value_tiles * kRows, all_rows = s.rows * (p.q_heads / p.kv_heads);
  const Tail tail = read_step(s);
  if (!tail.ok) {  // nothing sensible can be computed: say so loudly instead of answering with old data
    if (Walk || blockIdx.x == 0)
      for (int i = int(threadIdx.x); i < kRows * value_width; i += kThreads)
        if (first_row + i / value_width < all_rows) {
          const RowOf r = row_of(p, kv_head, first_row + i / value_width);
          store_activation(s, s.y, ((long long)r.t * p.q_heads + r.head) * p.value_dim + value_first + i % value_width, not_a_number());
        }
    return;
  }

  const int per_tile = chunks(p.key_dim) + chunks(value_width);
  const int splits = splits_of(p.body_slots, s.split) + splits_of(p.tail_slots, s.split);
  const int first_split = Walk ? 0 : int(blockIdx.x), last_split = Walk ? splits : first_split + 1;

  for (int i = int(threadIdx.x); i < kRows * q_stride; i += kThreads) {
    const int r = first_row + i / q_stride, d = i % q_stride;
    const RowOf row = row_of(p, kv_head, r);
    queries[i] = r < all_rows && d < p.key_dim ? load_query(s, row.t, row.head, d) : 0.0f;
  }

  float total[RowsPerWarp][ValueChunks][2], total_max[RowsPerWarp], total_sum[RowsPerWarp];  // over finished splits (Walk)
  int query_pos[RowsPerWarp];
#pragma unroll
  for (int i = 0; i < RowsPerWarp; ++i) {
    total_max[i] = negative_infinity();
    total_sum[i] = 0.0f;
    const int r = first_row + warp * RowsPerWarp + i;
    query_pos[i] = r < all_rows ? tail.base + tail.committed + row_of(p, kv_head, r).t : -1;  // a row that does not exist sees nothing
#pragma unroll
    for (int c = 0; c < ValueChunks; ++c) total[i][c][0] = total[i][c][1] = 0.0f;
  }

  for (int index = first_split; index < last_split; ++index) {
    const Slots slots = slots_of(s, tail, index);
    if (slots.begin >= slots.end) continue;  // an empty split takes no part in the merge, here as in combine.cuh
    float sum[RowsPerWarp][ValueChunks][2], row_max[RowsPerWarp], row_sum[RowsPerWarp], score[RowsPerWarp][2];
#pragma unroll
    for (int i = 0; i < RowsPerWarp; ++i) {
      row_max[i] = negative_infinity();
      row_sum[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < ValueChunks; ++c) sum[i][c][0] = sum[i][c][1] = 0.0f;
    }

    __syncthreads();  // the queries are there, and the last split's stages are no longer read
    const int tiles = (slots.end - slots.begin + kTile - 1) / kTile, work = tiles * per_tile;
    for (int i = 0; i < kStages<Elem> - 1; ++i) {
      if (i < work) load_stage(s, stages + i * kStageElements, slots, kv_head, i, value_first, value_width);
      copy_commit();
    }
    int step = 0;
    const auto next_stage = [&]() -> const Elem* {
      EDGEKV_COPY_WAIT(kStages<Elem> - 2);
      __syncthreads();  // this stage has landed for every thread, and the stage about to be overwritten is no longer read
      const int ahead = step + kStages<Elem> - 1;
      if (ahead < work) load_stage(s, stages + ahead % kStages<Elem> * kStageElements, slots, kv_head, ahead, value_first, value_width);
      copy_commit();
      return stages + step++ % kStages<Elem> * kStageElements;
    };
    float* own_weights = weights + warp * RowsPerWarp * kTile;
    for (int tile = 0; tile < tiles; ++tile) {
      const int slot = slots.begin + tile * kTile, tokens = slots.end - slot < kTile ? slots.end - slot : kTile;
#pragma unroll
      for (int i = 0; i < RowsPerWarp; ++i) score[i][0] = score[i][1] = 0.0f;
      for (int first = 0; first < p.key_dim; first += kTileDims) {
        const int width = p.key_dim - first < kTileDims ? p.key_dim - first : kTileDims;
        add_scores<RowsPerWarp>(score, next_stage(), queries + warp * RowsPerWarp * q_stride + first, q_stride, width, lane);
      }

      // Mask by stored position, then one step of online softmax.
      int key_pos[2] = {-1, -1};
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (2 * lane + e < tokens && (slots.tail || slot + 2 * lane + e < tail.hidden_from || slot + 2 * lane + e >= tail.hidden_to))
          key_pos[e] = slots.tail              ? tail.base + slot + 2 * lane + e
                       : s.layer.sinks_as_body ? slot + 2 * lane + e
                                               : plane<int32_t>(s.layer, s.layer.at.body_pos)[size_t(kv_head) * p.body_slots + slot + 2 * lane + e];
#pragma unroll
      for (int i = 0; i < RowsPerWarp; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          score[i][e] = visible(p, key_pos[e], query_pos[i]) ? soft_limit(__fmul_rn(p.scale, score[i][e]), p.softcap) : negative_infinity();
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
      // The weights pass to the whole warp through shared memory; the barrier of the value stage lies between.
#pragma unroll
      for (int c = 0; c < ValueChunks; ++c)
        if (c * kTileDims < value_width) add_values<RowsPerWarp, ValueChunks>(sum, c, next_stage(), own_weights, tokens, lane);
    }
    EDGEKV_COPY_WAIT(0);  // only empty groups are left

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
        float* part = s.part + ((size_t(index) * s.rows + row.t) * p.q_heads + row.head) * (p.value_dim + 2);
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
      if (s.body_part) {  // combine_packed goes on with it
        float* part = s.part + (size_t(row.t) * p.q_heads + row.head) * (p.value_dim + 2);
        store_part<ValueChunks>(part, p.value_dim, value_first, value_width, total[i], total_max[i], total_sum[i], lane);
        continue;
      }
      const long long y = ((long long)row.t * p.q_heads + row.head) * p.value_dim + value_first;
#pragma unroll
      for (int c = 0; c < ValueChunks; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int d = c * kTileDims + 2 * lane + e;
          if (d < value_width) store_activation(s, s.y, y + d, total_sum[i] > 0.0f ? total[i][c][e] / total_sum[i] : 0.0f);
        }
    }
  }
}

}  // namespace cuda
}  // namespace edgekv
