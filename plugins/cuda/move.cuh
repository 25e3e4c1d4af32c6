// Forms the next body in place from the candidates that stay. Kept tokens only ever move towards slot 0 and stay in order, so a
// block that reads 64 tokens, waits, and writes them never destroys what a later group reads.
#pragma once
#include "choose.cuh"

namespace edgekv {
namespace cuda {

constexpr int kMoveThreads = 256;
constexpr int kMoveUnits = 32;                                           // dimensions (or rotary pairs) per block
constexpr int kMoveItems = kTile * kMoveUnits / kMoveThreads;            // held in registers by each thread

// With positions = cache the two numbers of a rotary pair are moved by one thread, because they are turned together.
EDGEKV_HOST_DEVICE int key_units(const LayerParams& p) {
  return p.positions == kPositionsCache ? p.key_dim - p.rotary_dim / 2 : p.key_dim;
}
EDGEKV_HOST_DEVICE int move_slices(const LayerParams& p) {
  const int units = key_units(p) > p.value_dim ? key_units(p) : p.value_dim;
  return (units + kMoveUnits - 1) / kMoveUnits;
}

struct Unit {
  int first, second;  // dimensions; second = -1 for a number on its own
  int pair;
};
EDGEKV_DEVICE Unit key_unit(const LayerParams& p, int u) {
  const int half = p.rotary_dim / 2;
  if (p.positions != kPositionsCache) return {u, -1, 0};
  if (u >= half) return {u + half, -1, 0};
  if (p.rotary_interleaved) return {2 * u, 2 * u + 1, u};
  return {u, u + half, u};
}

// Grid (kv_heads, move_slices, 2: keys and values), kMoveThreads threads.
template <typename Elem>
__global__ void __launch_bounds__(kMoveThreads) move_tokens(const Compaction c) {
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const int kv_head = int(blockIdx.x), first_unit = int(blockIdx.y) * kMoveUnits, count = kept_of(c, tail);
  const bool keys = blockIdx.z == 0, turns = keys && p.positions == kPositionsCache && p.rotary_dim > 0;
  const int units = keys ? key_units(p) : p.value_dim;
  const int* source = c.source + size_t(kv_head) * p.body_slots;
  Elem* body = plane<Elem>(c.layer, keys ? c.layer.at.body_k : c.layer.at.body_v);
  const Elem* rows = plane<Elem>(c.layer, keys ? c.layer.at.tail_k : c.layer.at.tail_v);
  const long long old_base = header(c.layer)->rank_base - tail.body, new_base = c.rank_base - count;  // ranks of slot 0
  const int turn_of_staying = int(new_base - old_base);
  int moved = 0;

  for (int base = 0; base < count; base += kTile) {
    const int last = base + kTile < count ? base + kTile - 1 : count - 1;
    // Sources ascend, so this group stays where it is when its last token does, and no key needs turning.
    if (source[last] == last && last < tail.body && !(turns && turn_of_staying != 0)) continue;
    moved += last + 1 - base;
    float first[kMoveItems], second[kMoveItems];
#pragma unroll
    for (int i = 0; i < kMoveItems; ++i) {
      const int item = i * kMoveThreads + int(threadIdx.x);
      // Keys: 16 tokens lie side by side. Values: dimensions do.
      const int token = base + (keys ? item % kTile : item / kMoveUnits), u = first_unit + (keys ? item / kTile : item % kMoveUnits);
      if (token > last || u >= units) continue;
      const int from = source[token], slot = from < tail.body ? from : from - tail.body;
      const Elem* plane_from = from < tail.body ? body : rows;
      const int plane_slots = from < tail.body ? p.body_slots : p.tail_slots;
      if (!keys) {
        first[i] = to_float(plane_from[(size_t(kv_head) * plane_slots + slot) * p.value_dim + u]);
        continue;
      }
      const Unit unit = key_unit(p, u);
      first[i] = to_float(plane_from[key_offset(kv_head, slot, unit.first, plane_slots, p.key_dim)]);
      if (unit.second < 0) continue;
      second[i] = to_float(plane_from[key_offset(kv_head, slot, unit.second, plane_slots, p.key_dim)]);
      const int turn = int(new_base + token - (old_base + from));
      if (turn == 0) continue;
      const float angle = __fmul_rn(float(turn), c.inv_freq[unit.pair]), cosine = cosf(angle), sine = sinf(angle), a = first[i];
      first[i] = fmaf(a, cosine, -__fmul_rn(second[i], sine));
      second[i] = fmaf(second[i], cosine, __fmul_rn(a, sine));
    }
    __syncthreads();  // all of the group is read
#pragma unroll
    for (int i = 0; i < kMoveItems; ++i) {
      const int item = i * kMoveThreads + int(threadIdx.x);
      const int token = base + (keys ? item % kTile : item / kMoveUnits), u = first_unit + (keys ? item / kTile : item % kMoveUnits);
      if (token > last || u >= units) continue;
      if (!keys) {
        body[(size_t(kv_head) * p.body_slots + token) * p.value_dim + u] = from_float<Elem>(first[i]);
        continue;
      }
      const Unit unit = key_unit(p, u);
      body[key_offset(kv_head, token, unit.first, p.body_slots, p.key_dim)] = from_float<Elem>(first[i]);
      if (unit.second >= 0) body[key_offset(kv_head, token, unit.second, p.body_slots, p.key_dim)] = from_float<Elem>(second[i]);
    }
  }
  if (threadIdx.x != 0) return;
  int numbers = 0;  // per token, in this block's units
  for (int u = first_unit; u < first_unit + kMoveUnits && u < units; ++u) numbers += keys && key_unit(p, u).second >= 0 ? 2 : 1;
  const unsigned long long bytes = (unsigned long long)moved * numbers * sizeof(Elem);
  auto* traffic = reinterpret_cast<unsigned long long*>(header(c.layer)->traffic);
  atomicAdd(&traffic[kCompactRead], bytes);
  atomicAdd(&traffic[kCompactWrite], bytes);
}

// Positions and scores. Grid (kv_heads), kMoveThreads threads.
__global__ void __launch_bounds__(kMoveThreads) move_metadata(const Compaction c) {
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const int kv_head = int(blockIdx.x), count = kept_of(c, tail);
  const size_t head = size_t(kv_head) * p.body_slots;
  const Moves m = moves_of(c, tail);
  unsigned long long moved = 0, filled = 0;
  int32_t* positions = plane<int32_t>(c.layer, c.layer.at.body_pos) + head;
  for (int base = 0; base < count; base += kMoveThreads) {
    const int j = base + int(threadIdx.x), from = j < count ? c.source[head + j] : 0;
    const int position = from < tail.body ? positions[from] : tail.base + m.to_sinks + from - tail.body;
    __syncthreads();  // all of the group is read
    if (j >= count) continue;
    positions[j] = position;
    moved += from < tail.body && from != j;
    filled += from >= tail.body;
    if (keeps_scores(p)) {
      const size_t at = score_at(c, m, kv_head, from);
      plane<float>(c.layer, c.layer.at.body_score)[head + j] = c.score[at];
      plane<float>(c.layer, c.layer.at.body_seen)[head + j] = c.seen[at];
    }
  }
  if (p.format != kFormatSelfIndex) return;  // move_tokens counts
  const unsigned long long token = p.key_dim / 8 + c.layer.record.bytes + 4;
  auto* traffic = reinterpret_cast<unsigned long long*>(header(c.layer)->traffic);
  atomicAdd(&traffic[kCompactRead], moved * token);
  atomicAdd(&traffic[kCompactWrite], (moved + filled) * token);
}

// The header, once all else is in place. One thread.
__global__ void commit_compaction(const Compaction c) {
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok || threadIdx.x != 0) return;
  const int count = kept_of(c, tail);
  StateHeader* h = header(c.layer);
  // Scoring reads all keys twice for every batch of query rows; moving was counted where it happened.
  const uint64_t batches = (c.query_rows + kObserveRowsPerWarp * kWarps - 1) / (kObserveRowsPerWarp * kWarps);
  h->traffic[kCompactRead] += 2 * batches * p.kv_heads * (uint64_t(tail.body) + p.tail_slots) * p.key_dim * (p.element == kFloat16 ? 2 : 4);
  // Ranking by keys reads them three times: for their lengths, their sum and their share in it.
  if (ranks_by_keys(p) && tail.body + p.tail_slots > p.body_slots)
    h->traffic[kCompactRead] += 3 * uint64_t(p.kv_heads) * (uint64_t(tail.body) + p.tail_slots) * p.key_dim * (p.element == kFloat16 ? 2 : 4);
  h->evicted += tail.body + p.tail_slots - count;
  h->body_count = count;
  h->tail_base = c.position;
  h->rank_base = c.rank_base;
}

}  // namespace cuda
}  // namespace edgekv
