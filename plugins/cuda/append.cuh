// Writes a step's T rows into the tail: keys (rotated), values, and the queries that will score tokens at the next boundary.
// Nothing else of a state changes in a step, but for the traffic counters, which are no part of the committed state.
#pragma once
#include "rows.cuh"

namespace edgekv {
namespace cuda {

// What this step's kernels load and store. Every tile of row_block query rows reads the cache once; keys come in blocks of 16. (Slots
// hidden inside one split are loaded and masked; they are not counted.)
EDGEKV_DEVICE void count_step(const Step& s, const Tail& tail) {
  const LayerParams& p = s.layer.p;
  const uint64_t element = p.element == kFloat16 ? 2 : 4, heads = p.kv_heads, newest = tail.committed + s.rows;
  const uint64_t kept = tail.body - (tail.hidden_to - tail.hidden_from);
  const uint64_t passes = (uint64_t(s.rows) * (p.q_heads / p.kv_heads) + s.row_block - 1) / s.row_block * heads;
  const auto blocks = [](uint64_t slots) { return (slots + EDGEKV_LANES - 1) / EDGEKV_LANES * EDGEKV_LANES; };
  const int first_observed = p.tail_slots - p.observe > tail.committed ? p.tail_slots - p.observe : tail.committed;
  const uint64_t observed = keeps_scores(p) && int(newest) > first_observed ? newest - first_observed : 0;
  uint64_t* t = header(s.layer)->traffic;
  const bool sinks = s.layer.sinks_as_body;  // count as tail; attend_packed.cuh counts what it reads of the body
  t[sinks ? kReadTailKeys : kReadBodyKeys] += passes * blocks(kept) * p.key_dim * element;
  t[sinks ? kReadTailValues : kReadBodyValues] += passes * kept * p.value_dim * element;
  t[kReadTailKeys] += passes * blocks(newest) * p.key_dim * element;
  t[kReadTailValues] += passes * newest * p.value_dim * element;
  if (!sinks) t[kReadBodyMeta] += passes * kept * 4;
  t[kWriteTail] += (heads * s.rows * (p.key_dim + p.value_dim) + observed * p.q_heads * p.key_dim) * element;
  t[kTrafficSteps] += 1;
}

// Grid (T, kv_heads + q_heads), any block size. Blocks 0..kv_heads-1 of y write a key and a value, the others a query.
template <typename Elem>
__global__ void append_rows(const Step s) {
  const Layer& l = s.layer;
  const LayerParams& p = l.p;
  const Tail tail = read_step(s);
  if (!tail.ok) return;
  const int t = int(blockIdx.x), h = int(blockIdx.y), slot = tail.committed + t;
  if (t == 0 && h == 0 && threadIdx.x == 0) count_step(s, tail);
  if (h < p.kv_heads) {
    Elem* k = plane<Elem>(l, l.at.tail_k);
    Elem* v = plane<Elem>(l, l.at.tail_v) + (size_t(h) * p.tail_slots + slot) * p.value_dim;
    for (int d = int(threadIdx.x); d < p.key_dim; d += int(blockDim.x))
      k[key_offset(h, slot, d, p.tail_slots, p.key_dim)] = from_float<Elem>(load_key(s, t, h, d));
    for (int d = int(threadIdx.x); d < p.value_dim; d += int(blockDim.x))
      v[d] = from_float<Elem>(load_number(s.half, s.v.data, t * s.v.row + h * s.v.head + d));
    return;
  }
  const int observed = slot - (p.tail_slots - p.observe);
  if (!keeps_scores(p) || observed < 0) return;
  const int head = h - p.kv_heads;
  Elem* q = plane<Elem>(l, l.at.tail_q) + (size_t(head) * p.observe + observed) * p.key_dim;
  for (int d = int(threadIdx.x); d < p.key_dim; d += int(blockDim.x)) q[d] = from_float<Elem>(load_query(s, t, head, d));
}

}  // namespace cuda
}  // namespace edgekv
