// The keep rules: which candidates form the next body. Writes, per kv head, the ascending list of candidates that stay.
#pragma once
#include "observe.cuh"
#include "select.cuh"

namespace edgekv {
namespace cuda {

EDGEKV_HOST_DEVICE int kept_of(const LayerParams& p, int body) {
  const int all = body + p.tail_slots;
  return all < p.body_slots ? all : p.body_slots;
}

// Larger means more worth keeping; a NaN ranks last.
EDGEKV_DEVICE unsigned ranking_key(const Compaction& c, int kv_head, int candidate) {
  const size_t at = size_t(kv_head) * c.capacity + candidate;
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
  const int kv_head = int(blockIdx.x), n = tail.body + p.tail_slots;
  int* out = c.source + size_t(kv_head) * p.body_slots;
  if (n <= p.body_slots || p.keep == kKeepWindow) {  // everything, or the sinks and the newest
    for (int j = int(threadIdx.x); j < kept_of(p, tail.body); j += kChooseThreads)
      out[j] = n <= p.body_slots || j < p.sinks ? j : n - p.body_slots + j;
    return;
  }
  const int first = p.sinks, last = n - p.window, need = p.body_slots - p.sinks - p.window;
  for (int j = int(threadIdx.x); j < p.sinks; j += kChooseThreads) out[j] = j;
  for (int j = int(threadIdx.x); j < p.window; j += kChooseThreads) out[p.body_slots - p.window + j] = last + j;
  if (need <= 0) return;
  const Threshold threshold = find_threshold(selection, first, last, need, 32, [&](int i) { return ranking_key(c, kv_head, i); });
  int ties = need - threshold.better, written = p.sinks;  // of the candidates at the threshold, the lowest positions stay
  for (int base = first; base < last; base += kChooseThreads) {
    const int i = base + int(threadIdx.x);
    const unsigned key = i < last ? ranking_key(c, kv_head, i) : 0u;
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
