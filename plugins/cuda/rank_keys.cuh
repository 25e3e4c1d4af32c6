// Ranks for heavy hitters without queries: how little each key is like all of them (KeyDiff, arXiv 2504.15364).
//
// Two kernels, because a rank needs the sum over all tiles first:
//   sum_keys   per tile of 64 candidates: 1 / length of every key, and the sum of the tile's keys at unit length
//   rank_keys  per candidate: the tiles' sums added up in order, and minus the share of the key that points along them
#pragma once
#include "observe.cuh"

namespace edgekv {
namespace cuda {

EDGEKV_HOST_DEVICE size_t rank_keys_shared_bytes(const LayerParams& p) { return sizeof(float) * (p.key_dim > kTile ? p.key_dim : kTile); }

// Whether a compaction has to choose, so that ranks are asked for.
EDGEKV_DEVICE bool evicts(const Compaction& c, const Tail& tail) { return c.ranks_always || tail.body + c.layer.p.tail_slots > c.layer.p.body_slots; }

// Number d of the key of slot `slot` of a tile's plane is tile_keys(...)[key_offset(kv_head, slot, d, plane slots, key_dim)].
template <typename Elem>
EDGEKV_DEVICE const Elem* tile_keys(const Compaction& c, const Slots& slots) {
  return plane<Elem>(c.layer, slots.tail ? c.layer.at.tail_k : c.layer.at.body_k);
}

// Grid (tiles, kv_heads), kThreads threads. Writes c.seen (1 / length, which keep = heavy by keys has no other use for) and c.tiles.
template <typename Elem>
__global__ void __launch_bounds__(kThreads) sum_keys(const Compaction c) {
  EDGEKV_SHARED(shared);
  float* inverse = reinterpret_cast<float*>(shared);
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok || !evicts(c, tail)) return;
  const Slots slots = tile_slots(c, tail, int(blockIdx.x));
  if (slots.begin >= slots.end) return;
  const int kv_head = int(blockIdx.y), plane_slots = slots.tail ? p.tail_slots : p.body_slots, tokens = slots.end - slots.begin;
  const Elem* keys = tile_keys<Elem>(c, slots);
  const int token = int(threadIdx.x);
  if (token < tokens) {
    float squares = 0.0f;
    for (int d = 0; d < p.key_dim; ++d) {
      const float x = to_float(keys[key_offset(kv_head, slots.begin + token, d, plane_slots, p.key_dim)]);
      squares = fmaf(x, x, squares);
    }
    inverse[token] = 1.0f / sqrtf(fmaxf(squares, 1.17549435e-38f));
    c.seen[size_t(kv_head) * c.capacity + (slots.tail ? tail.body : 0) + slots.begin + token] = inverse[token];
  }
  __syncthreads();
  float* sums = c.tiles + (size_t(kv_head) * tiles_of(p) + blockIdx.x) * p.key_dim;
  for (int d = int(threadIdx.x); d < p.key_dim; d += kThreads) {
    float sum = 0.0f;
    for (int t = 0; t < tokens; ++t)
      sum = fmaf(to_float(keys[key_offset(kv_head, slots.begin + t, d, plane_slots, p.key_dim)]), inverse[t], sum);
    sums[d] = sum;
  }
}

// Grid (tiles, kv_heads), kThreads threads. Writes c.score.
template <typename Elem>
__global__ void __launch_bounds__(kThreads) rank_keys(const Compaction c) {
  EDGEKV_SHARED(shared);
  float* all = reinterpret_cast<float*>(shared);
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok || !evicts(c, tail)) return;
  const Slots slots = tile_slots(c, tail, int(blockIdx.x));
  if (slots.begin >= slots.end) return;
  const int kv_head = int(blockIdx.y), plane_slots = slots.tail ? p.tail_slots : p.body_slots;
  for (int d = int(threadIdx.x); d < p.key_dim; d += kThreads) {
    float sum = 0.0f;
    for (int tile = 0; tile < tiles_of(p); ++tile) {
      const Slots other = tile_slots(c, tail, tile);
      if (other.begin < other.end) sum = __fadd_rn(sum, c.tiles[(size_t(kv_head) * tiles_of(p) + tile) * p.key_dim + d]);
    }
    all[d] = sum;
  }
  __syncthreads();
  const int slot = slots.begin + int(threadIdx.x);
  if (slot >= slots.end) return;
  const Elem* keys = tile_keys<Elem>(c, slots);
  float along = 0.0f;
  for (int d = 0; d < p.key_dim; ++d) along = fmaf(to_float(keys[key_offset(kv_head, slot, d, plane_slots, p.key_dim)]), all[d], along);
  const size_t at = size_t(kv_head) * c.capacity + (slots.tail ? tail.body : 0) + slot;
  c.score[at] = -__fmul_rn(along, c.seen[at]);
}

}  // namespace cuda
}  // namespace edgekv
