// The second ranking of SignVQRetrieval: the candidates that the codes propose (retrieve.cuh), by their stored keys.
//
//   score_candidates per split: their scores, one for each query head
//   choose_by_keys   per row: softmax over the candidates, summed over the query heads, the best k
//
// Products are whole numbers, and what is done in floating point is done in the oracle's order without fused products
// (edgekv/reference/self_index/ranking.py), so the same slots are chosen.
#pragma once
#include "retrieve.cuh"
#include "whole_keys.cuh"

namespace edgekv {
namespace cuda {

constexpr int kHeadsAtOnce = 4;
constexpr float kWeightUnit = 65536.0f;   // weights are counted in its inverse
// 2^x of x in [-126, 126].
EDGEKV_DEVICE float exp2_in_order(float x) {
  const float n = rintf(x), f = __fadd_rn(x, -n);
  float p = __fadd_rn(__fmul_rn(0.00132647273f, f), 0.00967151299f);
  p = __fadd_rn(__fmul_rn(p, f), 0.0555073358f);
  p = __fadd_rn(__fmul_rn(p, f), 0.240222424f);
  p = __fadd_rn(__fmul_rn(p, f), 0.693147004f);
  p = __fadd_rn(__fmul_rn(p, f), 1.0f);
  return __uint_as_float(__float_as_uint(p) + (unsigned(int(n)) << 23));
}
EDGEKV_DEVICE float tanh_in_order(float x) {
  const float bounded = fminf(20.0f, fmaxf(-20.0f, x));
  return __fadd_rn(1.0f, -(2.0f / __fadd_rn(exp2_in_order(__fmul_rn(bounded, 2.0f * kRankLog2E)), 1.0f)));
}

EDGEKV_HOST_DEVICE size_t score_candidates_shared_bytes(const LayerParams& p) {
  const size_t padded = (p.key_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP * EDGEKV_GROUP, group = p.q_heads / p.kv_heads;
  return sizeof(int) * kWindow + sizeof(float) * group + padded * group;
}

// Grid (splits of kWindow, kv_heads, T), kThreads threads; each takes a candidate of its own. Writes r.exact: scores in units of log2, or
// before the soft cap as the argument of tanh.
__global__ void __launch_bounds__(kThreads) score_candidates(const Retrieval r) {
  EDGEKV_SHARED(shared);
  const LayerParams& p = r.s.layer.p;
  const int group = p.q_heads / p.kv_heads, padded = (p.key_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP * EDGEKV_GROUP;
  int* list = reinterpret_cast<int*>(shared);
  float* units = reinterpret_cast<float*>(list + kWindow);             // [group] a step of each query head, times the score factor
  unsigned* queries = reinterpret_cast<unsigned*>(units + group);      // [group][padded / 4], four numbers from -64 to 64 in each
  const int kv_head = int(blockIdx.y), t = int(blockIdx.z), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const Choice c = read_choice(r, kv_head, t);
  if (!ranks_again(c)) return;
  const PackedBody b = packed_body(r.s.layer, kv_head, c.tail.base);
  const size_t row = row_at(r, kv_head, t), first_head = size_t(t) * p.q_heads + kv_head * group;
  const int first = int(blockIdx.x) * kWindow + 32 * lane;
  const int found = list_slots(first < p.body_slots ? r.candidates[row * slot_words(p) + first / 32] : 0u, first, warp == 0 ? list : nullptr, lane);
  if (found == 0) return;
  const float factor = score_factor(p);
  for (int g = warp; g < group; g += kWarps) {
    const float* turned = r.s.turned + (first_head + g) * p.key_dim;
    float largest = 0.0f;
    for (int d = lane; d < p.key_dim; d += 32) largest = fmaxf(largest, fabsf(turned[d]));
    largest = warp_max(largest);
    for (int word = lane; word < padded / 4; word += 32) {
      unsigned four = 0;
      for (int i = 0; i < 4 && 4 * word < p.key_dim; ++i) four |= unsigned(int(query_level(turned[4 * word + i], largest)) & 255) << 8 * i;
      queries[g * (padded / 4) + word] = four;
    }
    if (lane == 0) units[g] = query_unit(largest, factor);
  }
  __syncthreads();
  const int groups = padded / EDGEKV_GROUP;
  for (int i = int(threadIdx.x); i < found; i += kThreads) {
    const int slot = list[i], interval = interval_of(b, b.positions[slot]);
    const float largest = largest_of_key(b, slot), widen = largest > 0.0f ? kLargestKey / largest : 0.0f, unit = key_unit(largest);
    for (int g = 0; g < group; g += kHeadsAtOnce) {
      int sum[kHeadsAtOnce] = {0, 0, 0, 0};
      for (int n = 0; n < groups; ++n) {
        const float2 pair = key_pair(b, slot, n);
        const short zero_point = to_short(__fmul_rn(pair.x, widen)), scale = to_short(__fmul_rn(pair.y, widen));
        for (int part = 0; part < 2; ++part) {
          unsigned codes[4], positive[4];
          key_codes(b, slot, n, part, codes, positive);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const int numbers = int(whole_numbers(zero_point, scale, codes[w], positive[w]));
#pragma unroll
            for (int j = 0; j < kHeadsAtOnce; ++j)
              sum[j] = __dp4a(numbers, int(queries[(g + j < group ? g + j : group - 1) * (padded / 4) + 8 * n + 2 * w + part]), sum[j]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kHeadsAtOnce; ++j)
        if (g + j < group) {
          const float of_mean = __fmul_rn(r.s.of_mean[(first_head + g + j) * p.intervals + interval], factor);
          r.exact[(row * group + g + j) * p.body_slots + slot] = __fadd_rn(__fmul_rn(float(sum[j]), __fmul_rn(unit, units[g + j])), of_mean);
        }
    }
  }
}

constexpr size_t kChooseTotalAt = (kChooseSharedBytes + 7) / 8 * 8;
EDGEKV_HOST_DEVICE size_t choose_by_keys_shared_bytes(const LayerParams&) { return kChooseTotalAt + sizeof(unsigned long long) + sizeof(float) * kChooseThreads / 32; }

// Grid (kv_heads, T), kChooseThreads threads. Writes r.out where choose_by_codes has not.
__global__ void __launch_bounds__(kChooseThreads) choose_by_keys(const Retrieval r) {
  EDGEKV_SHARED(shared);
  constexpr int kChooseWarps = kChooseThreads / 32;
  const LayerParams& p = r.s.layer.p;
  const int kv_head = int(blockIdx.x), t = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int group = p.q_heads / p.kv_heads, words = slot_words(p);
  unsigned long long* total = reinterpret_cast<unsigned long long*>(shared + kChooseTotalAt);  // of weights, as whole numbers
  float* parts = reinterpret_cast<float*>(total + 1);                                          // one per warp
  const Choice c = read_choice(r, kv_head, t);
  if (!ranks_again(c)) return;
  const size_t row = row_at(r, kv_head, t);
  const unsigned* candidates = r.candidates + row * words;
  float* weight = r.exact + row * group * p.body_slots;  // of the first query head, and then of all
  const auto candidate = [&](int i) { return (candidates[i / 32] >> i % 32 & 1u) != 0u; };
  for (int g = 0; g < group; ++g) {
    float* score = weight + size_t(g) * p.body_slots;
    if (p.softcap > 0.0f) {  // apart, one at a time: its division is a call, across which registers would spill
#pragma unroll 1
      for (int i = c.lo + int(threadIdx.x); i < c.hi; i += kChooseThreads)
        if (candidate(i)) score[i] = __fmul_rn(tanh_in_order(score[i]), p.softcap * kRankLog2E);
    }
    float most = negative_infinity();
    for (int i = c.lo + int(threadIdx.x); i < c.hi; i += kChooseThreads)
      if (candidate(i)) most = fmaxf(most, score[i]);
    most = warp_max(most);
    if (lane == 0) parts[warp] = most;
    if (threadIdx.x == 0) *total = 0;
    __syncthreads();
    for (int w = 0; w < kChooseWarps; ++w) most = fmaxf(most, parts[w]);
    const auto weight_of = [&](int i) { return exp2_in_order(fmaxf(-100.0f, __fadd_rn(score[i], -most))); };
    unsigned long long own = 0;
    for (int i = c.lo + int(threadIdx.x); i < c.hi; i += kChooseThreads)
      if (candidate(i)) own += static_cast<unsigned long long>(rintf(__fmul_rn(weight_of(i), kWeightUnit)));
    atomicAdd(total, own);
    __syncthreads();
    const float factor = kWeightUnit / float(*total);
    __syncthreads();  // the total and the parts may be written again
    for (int i = c.lo + int(threadIdx.x); i < c.hi; i += kChooseThreads)  // each thread its own slots: no other reads them before
      if (candidate(i)) {
        const float w = __fmul_rn(weight_of(i), factor);
        weight[i] = g == 0 ? w : __fadd_rn(weight[i], w);
      }
  }
  // Weights are not negative, so their bits are in their order; 0 is for slots that are no candidates.
  choose_best(Selection(shared), c.lo, c.hi, c.wanted, 32, r.out + row * words, words, [&](int i) {
    const float w = candidate(i) ? weight[i] : -1.0f;
    return w >= 0.0f ? __float_as_uint(w) + 1u : candidate(i) ? 1u : 0u;
  });
}

}  // namespace cuda
}  // namespace edgekv
