// The keep rules: which candidates form the next body. Writes, per kv head, the ascending list of candidates that stay.
#pragma once
#include "observe.cuh"
#include "select.cuh"

namespace edgekv {
namespace cuda {

EDGEKV_DEVICE int kept_of(const Compaction& c, const Tail& tail) {
  const int all = moves_of(c, tail).candidates;
  return all < c.layer.p.body_slots ? all : c.layer.p.body_slots;
}
// Where a candidate's score lies: those of a compressed state come behind the sinks'.
EDGEKV_DEVICE size_t score_at(const Compaction& c, const Moves& m, int kv_head, int candidate) {
  return size_t(kv_head) * c.capacity + m.sinks_before + m.to_sinks + candidate;
}

// Larger means more worth keeping; a NaN ranks last.
EDGEKV_DEVICE unsigned ranking_key(const Compaction& c, size_t at) {
  float v = c.score[at];
  if (c.layer.p.score_normalise) v = v / fmaxf(c.seen[at], 1.17549435e-38f);
  if (v != v) return 0;
  const unsigned bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Grid (kv_heads), kChooseThreads threads.
__global__ void __launch_bounds__(kChooseThreads) choose_slots(const Compaction c) {
  EDGEKV_SHARED(shared);
  const Selection selection(shared);
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const Moves m = moves_of(c, tail);
  const int kv_head = int(blockIdx.x), n = m.candidates, sinks = p.format == kFormatSelfIndex ? 0 : p.sinks;  // among the candidates
  int* out = c.source + size_t(kv_head) * p.body_slots;
  if (n <= p.body_slots || p.keep == kKeepWindow) {  // everything, or the sinks and the newest
    for (int j = int(threadIdx.x); j < kept_of(c, tail); j += kChooseThreads)
      out[j] = n <= p.body_slots || j < sinks ? j : n - p.body_slots + j;
    return;
  }
  const int first = sinks, last = n - p.window, need = p.body_slots - sinks - p.window;
  for (int j = int(threadIdx.x); j < sinks; j += kChooseThreads) out[j] = j;
  for (int j = int(threadIdx.x); j < p.window; j += kChooseThreads) out[p.body_slots - p.window + j] = last + j;
  if (need <= 0) return;
  const Threshold threshold = find_threshold(selection, first, last, need, 32, [&](int i) { return ranking_key(c, score_at(c, m, kv_head, i)); });
  int ties = need - threshold.better, written = sinks;  // of the candidates at the threshold, the lowest positions stay
  for (int base = first; base < last; base += kChooseThreads) {
    const int i = base + int(threadIdx.x);
    const unsigned key = i < last ? ranking_key(c, score_at(c, m, kv_head, i)) : 0u;
    int equal = 0, chosen = 0;
    const bool tie = i < last && key == threshold.key;
    const int tie_rank = count_before(tie, selection.scratch, &equal);
    const bool stays = i < last && (key > threshold.key || (tie && tie_rank < ties));
    const int rank = count_before(stays, selection.scratch, &chosen);
    if (stays) out[written + rank] = i;
    ties -= equal;
    written += chosen;
  }
}

}  // namespace cuda
}  // namespace edgekv
