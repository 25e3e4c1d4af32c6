// The second ranking of SignVQRetrieval: the candidates that the codes propose (retrieve.cuh), by their stored keys.
//
//   score_candidates per split: their scores, one for each query head
//   choose_by_keys   per row: softmax over the candidates, summed over the query heads, the best k
#pragma once
#include "retrieve.cuh"

namespace edgekv {
namespace cuda {

constexpr int kHeadsAtOnce = 4;
EDGEKV_HOST_DEVICE size_t score_candidates_shared_bytes(const LayerParams& p) {
  const size_t padded = (p.key_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP * EDGEKV_GROUP;
  return sizeof(int) * kWindow + sizeof(float) * padded * (p.q_heads / p.kv_heads);
}

// Grid (splits of kWindow, kv_heads, T), kThreads threads; each takes a candidate of its own. Writes r.exact.
__global__ void __launch_bounds__(kThreads) score_candidates(const Retrieval r) {
  EDGEKV_SHARED(shared);
  int* list = reinterpret_cast<int*>(shared);
  float* queries = reinterpret_cast<float*>(shared + sizeof(int) * kWindow);  // [group][padded]
  const LayerParams& p = r.s.layer.p;
  const int kv_head = int(blockIdx.y), t = int(blockIdx.z), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int group = p.q_heads / p.kv_heads, padded = (p.key_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP * EDGEKV_GROUP;
  const Choice c = read_choice(r, kv_head, t);
  if (!ranks_again(c)) return;
  const PackedBody b = packed_body(r.s.layer, kv_head, c.tail.base);
  const size_t row = row_at(r, kv_head, t);
  const int first = int(blockIdx.x) * kWindow + 32 * lane;
  const int found = list_slots(first < p.body_slots ? r.candidates[row * slot_words(p) + first / 32] : 0u, first, warp == 0 ? list : nullptr, lane);
  if (found == 0) return;
  for (int i = int(threadIdx.x); i < group * padded; i += kThreads)
    queries[i] = i % padded < p.key_dim ? r.s.turned[(size_t(t) * p.q_heads + kv_head * group + i / padded) * p.key_dim + i % padded] : 0.0f;
  __syncthreads();
  for (int i = int(threadIdx.x); i < found; i += kThreads) {
    const int slot = list[i], interval = interval_of(b, b.positions[slot]);
    for (int g = 0; g < group; g += kHeadsAtOnce) {
      float sum[kHeadsAtOnce] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int part = 0; part < padded / 16; ++part) {
        float x[16];
        unpack_key(b, slot, part / 2, part % 2, x);
#pragma unroll
        for (int j = 0; j < kHeadsAtOnce; ++j) {
          const float* q = queries + (g + j < group ? g + j : group - 1) * padded + part / 2 * EDGEKV_GROUP + part % 2 * 4;
#pragma unroll
          for (int n = 0; n < 16; n += 4) {
            const float4 w = *reinterpret_cast<const float4*>(q + 2 * n);
            sum[j] = fmaf(w.w, x[n + 3], fmaf(w.z, x[n + 2], fmaf(w.y, x[n + 1], fmaf(w.x, x[n], sum[j]))));
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kHeadsAtOnce; ++j)
        if (g + j < group) {
          const float of_mean = r.s.of_mean[(size_t(t) * p.q_heads + kv_head * group + g + j) * p.intervals + interval];
          r.exact[(row * group + g + j) * p.body_slots + slot] = soft_limit(__fmul_rn(p.scale, __fadd_rn(sum[j], of_mean)), p.softcap);
        }
    }
  }
}

EDGEKV_HOST_DEVICE size_t choose_by_keys_shared_bytes(const LayerParams& p) {
  return kChooseSharedBytes + sizeof(float) * (2 * size_t(p.q_heads / p.kv_heads) + kChooseThreads / 32);
}

// Grid (kv_heads, T), kChooseThreads threads. Writes r.out where choose_by_codes has not.
__global__ void __launch_bounds__(kChooseThreads) choose_by_keys(const Retrieval r) {
  EDGEKV_SHARED(shared);
  constexpr int kChooseWarps = kChooseThreads / 32;
  const LayerParams& p = r.s.layer.p;
  const int kv_head = int(blockIdx.x), t = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int group = p.q_heads / p.kv_heads, words = slot_words(p);
  float* parts = reinterpret_cast<float*>(shared + kChooseSharedBytes);  // one per warp
  const Choice c = read_choice(r, kv_head, t);
  if (!ranks_again(c)) return;
  const size_t row = row_at(r, kv_head, t);
  const unsigned* candidates = r.candidates + row * words;
  float* weight = r.exact + row * group * p.body_slots;  // of the first query head, and then of all
  const auto candidate = [&](int i) { return (candidates[i / 32] >> i % 32 & 1u) != 0u; };
  for (int g = 0; g < group; ++g) {
    const float* score = weight + size_t(g) * p.body_slots;
    float most = negative_infinity(), sum = 0.0f;
    for (int i = c.lo + int(threadIdx.x); i < c.hi; i += kChooseThreads)
      if (candidate(i)) most = fmaxf(most, score[i]);
    most = warp_max(most);
    if (lane == 0) parts[warp] = most;
    __syncthreads();
    for (int w = 0; w < kChooseWarps; ++w) most = fmaxf(most, parts[w]);
    __syncthreads();  // the parts may be written again
    for (int i = c.lo + int(threadIdx.x); i < c.hi; i += kChooseThreads)
      if (candidate(i)) sum = __fadd_rn(sum, expf(score[i] - most));
    sum = warp_sum(sum);
    if (lane == 0) parts[warp] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < kChooseWarps; ++w) sum = __fadd_rn(sum, parts[w]);
    __syncthreads();  // as above
    for (int i = c.lo + int(threadIdx.x); i < c.hi; i += kChooseThreads)  // each thread its own slots: no other reads them before
      if (candidate(i)) weight[i] = __fadd_rn(g == 0 ? 0.0f : weight[i], expf(score[i] - most) / sum);
  }
  // Weights are not negative, so their bits are in their order; 0 is for slots that are no candidates.
  choose_best(Selection(shared), c.lo, c.hi, c.wanted, 32, r.out + row * words, words, [&](int i) {
    const float w = candidate(i) ? weight[i] : -1.0f;
    return w >= 0.0f ? __float_as_uint(w) + 1u : candidate(i) ? 1u : 0u;
  });
}

}  // namespace cuda
}  // namespace edgekv
