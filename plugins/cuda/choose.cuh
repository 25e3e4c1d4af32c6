// The keep rules: which candidates form the next body. Writes, per kv head, the ascending list of candidates that stay.
#pragma once
#include "observe.cuh"

namespace edgekv {
namespace cuda {

constexpr int kChooseThreads = 256;
constexpr size_t kChooseSharedBytes = 4 * (256 + kChooseThreads / 32 + 2);

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

// Number of set flags before this thread in the block; *all receives the block's total. scratch: one int per warp.
EDGEKV_DEVICE int count_before(bool flag, int* scratch, int* all) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const unsigned bits = __ballot_sync(kFullWarp, flag);
  if (lane == 0) scratch[warp] = __popc(bits);
  __syncthreads();
  int before = __popc(bits & ((1u << lane) - 1u));
  *all = 0;
  for (int w = 0; w < kChooseThreads / 32; ++w) {
    if (w < warp) before += scratch[w];
    *all += scratch[w];
  }
  __syncthreads();  // the scratch may be used again
  return before;
}

// The key of the need-th best candidate of [first, last), found by radix, 8 bits at a time from the top; *better receives how many
// are strictly better. Integer counts, so the order of the atomics does not matter.
EDGEKV_DEVICE unsigned threshold_key(const Compaction& c, int kv_head, int first, int last, int need, int* histogram, int* found, int* better) {
  unsigned prefix = 0;
  int above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = int(threadIdx.x); i < 256; i += kChooseThreads) histogram[i] = 0;
    __syncthreads();
    for (int i = first + int(threadIdx.x); i < last; i += kChooseThreads) {
      const unsigned key = ranking_key(c, kv_head, i);
      if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&histogram[key >> shift & 255u], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = 255, count = above;
      while (count + histogram[bin] < need) count += histogram[bin--];
      found[0] = bin;
      found[1] = count;
    }
    __syncthreads();
    prefix = prefix << 8 | unsigned(found[0]);
    above = found[1];
  }
  *better = above;
  return prefix;
}

// Grid (kv_heads), kChooseThreads threads.
__global__ void __launch_bounds__(kChooseThreads) choose_slots(const Compaction c) {
  EDGEKV_SHARED(shared);
  int* histogram = reinterpret_cast<int*>(shared);
  int* scratch = histogram + 256;
  int* found = scratch + kChooseThreads / 32;
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
  int better = 0;
  const unsigned threshold = threshold_key(c, kv_head, first, last, need, histogram, found, &better);
  int ties = need - better, written = p.sinks;  // of the candidates at the threshold, the lowest positions stay
  for (int base = first; base < last; base += kChooseThreads) {
    const int i = base + int(threadIdx.x);
    const unsigned key = i < last ? ranking_key(c, kv_head, i) : 0u;
    int equal = 0, chosen = 0;
    const bool tie = i < last && key == threshold;
    const int tie_rank = count_before(tie, scratch, &equal);
    const bool stays = i < last && (key > threshold || (tie && tie_rank < ties));
    const int rank = count_before(stays, scratch, &chosen);
    if (stays) out[written + rank] = i;
    ties -= equal;
    written += chosen;
  }
}

}  // namespace cuda
}  // namespace edgekv
