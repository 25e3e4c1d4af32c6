// SignVQRetrieval: which slots of a compressed body each row attends to (docs/self_index.md, "Scan" and "Choice"), one bit per slot.
//
//   score_tables     per row: the query's table over the codebook, and what each interval's mean key adds
//   scan_codes       per split of the body: look-ups and additions, a score of 16 bits per token
//   choose_by_codes  per row: the best k, or the candidates of the second ranking (rank_candidates.cuh)
//
// Everything up to the scores is computed in the oracle's order of additions, without fused products, so the same slots are chosen.
#pragma once
#include "packed_body.cuh"
#include "select.cuh"

namespace edgekv {
namespace cuda {

constexpr int kTableLevels = 63;    // of a table entry
constexpr int kBiasLimit = 16383;   // a score of at most 256 entries and a bias fits 16 bits

// Passed to kernels by value.
struct Retrieval {
  Step s;                 // q, rotation, position, turned queries and their products with mean keys
  unsigned* out;          // [kv_heads][T][body_slots / 32] bits
  // Workspace, per kv head and row:
  unsigned char* table;   // [key_dim / 4][16]
  int* bias;              // [intervals]
  short* score;           // [body_slots]
  unsigned* candidates;   // [body_slots / 32] bits
  float* exact;           // [group][body_slots] by stored keys, then in place of the first the weight over all query heads
};

EDGEKV_DEVICE size_t row_at(const Retrieval& r, int kv_head, int t) { return size_t(kv_head) * r.s.rows + t; }

// What a row may choose from: body slots [lo, hi).
struct Choice {
  Tail tail;
  int lo, hi;
  int wanted, picked;  // slots to choose, and candidates that the codes propose for them
};

EDGEKV_DEVICE Choice read_choice(const Retrieval& r, int kv_head, int t) {
  const LayerParams& p = r.s.layer.p;
  Choice c{};
  c.tail = read_step(r.s);
  if (!c.tail.ok || c.tail.retrieve == 0) return c;
  c.hi = c.tail.body;
  if (p.sliding_window > 0) {  // the first slot that the row still sees
    const int32_t* positions = plane<int32_t>(r.s.layer, r.s.layer.at.body_pos) + size_t(kv_head) * p.body_slots;
    const int oldest = c.tail.base + c.tail.committed + t - p.sliding_window;
    int low = 0, high = c.hi;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (positions[middle] > oldest) high = middle;
      else low = middle + 1;
    }
    c.lo = low;
  }
  const int visible = c.hi - c.lo, candidates = header(r.s.layer)->candidates;
  c.wanted = c.tail.retrieve < visible ? c.tail.retrieve : visible;
  const int asked = candidates > c.wanted ? candidates : c.wanted;
  c.picked = asked < visible ? asked : visible;
  return c;
}
// Whether codes decide at all: else there is nothing to choose from, or everything is chosen.
EDGEKV_DEVICE bool scans(const Choice& c) { return c.wanted > 0 && c.wanted < c.hi - c.lo; }
EDGEKV_DEVICE bool ranks_again(const Choice& c) { return scans(c) && c.picked > c.wanted; }

// What a row reads, as plugins/cpu counts it.
EDGEKV_DEVICE void count_retrieval(const Retrieval& r, const PackedBody& b, const Choice& c, int first) {
  const LayerParams& p = r.s.layer.p;
  const unsigned long long dim = p.key_dim, visible = c.hi - c.lo, means = (b.intervals - first) * dim * 2;
  const unsigned long long scanned = (c.hi + 31) / 32 - c.lo / 32, found = ranks_again(c) ? c.picked : 0;
  auto* traffic = reinterpret_cast<unsigned long long*>(header(r.s.layer)->traffic);
  atomicAdd(&traffic[kReadBodyIndex], scanned * (dim / 4) * 16 + found * ((dim / 4 + 1) / 2));
  atomicAdd(&traffic[kReadBodyKeys], found * key_bytes(p));
  atomicAdd(&traffic[kReadBodyMeta], visible * 4 + dim * 64 + means + (found ? found * 4 + means * (p.q_heads / p.kv_heads) : 0));
}

EDGEKV_HOST_DEVICE size_t score_tables_shared_bytes(const LayerParams& p) { return sizeof(float) * (2 * p.key_dim + p.key_dim / 4 * 17 + kWarps); }

// Grid (kv_heads, T), kThreads threads. Writes r.table and r.bias.
__global__ void __launch_bounds__(kThreads) score_tables(const Retrieval r) {
  EDGEKV_SHARED(shared);
  const LayerParams& p = r.s.layer.p;
  const int dim = p.key_dim, groups = dim / 4;
  float* sum = reinterpret_cast<float*>(shared);  // [dim] query heads together, times the scale
  float* turned = sum + dim;                      // [dim] the same, transformed
  float* exact = turned + dim;                    // [groups][16]
  float* least = exact + 16 * groups;             // [groups]
  float* widest = least + groups;                 // [kWarps]
  const int kv_head = int(blockIdx.x), t = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const Choice c = read_choice(r, kv_head, t);
  if (!scans(c)) return;
  const PackedBody b = packed_body(r.s.layer, kv_head, c.tail.base);
  const int group = p.q_heads / p.kv_heads, first = interval_of(b, b.positions[c.lo]);
  if (threadIdx.x == 0) count_retrieval(r, b, c, first);
  for (int d = int(threadIdx.x); d < dim; d += kThreads) {
    float x = load_rotated(r.s, r.s.q, t, kv_head * group, kv_head, d);
    for (int g = 1; g < group; ++g) x = __fadd_rn(x, load_rotated(r.s, r.s.q, t, kv_head * group + g, kv_head, d));
    turned[d] = sum[d] = __fmul_rn(x, p.scale);
  }
  __syncthreads();
  if (warp == 0) warp_hadamard(turned, dim, lane);
  __syncthreads();

  const float* codebook = plane<float>(r.s.layer, r.s.layer.at.codebook) + size_t(kv_head) * groups * 64;
  for (int i = int(threadIdx.x); i < 16 * groups; i += kThreads) {
    const float4 x = *reinterpret_cast<const float4*>(codebook + 4 * i);
    const float* q = turned + i / 16 * 4;
    exact[i] = __fadd_rn(__fadd_rn(__fmul_rn(q[0], x.x), __fmul_rn(q[1], x.y)), __fadd_rn(__fmul_rn(q[2], x.z), __fmul_rn(q[3], x.w)));
  }
  __syncthreads();
  float most = 0.0f;
  for (int g = int(threadIdx.x); g < groups; g += kThreads) {
    float low = exact[16 * g], high = low;
    for (int code = 1; code < 16; ++code) low = fminf(low, exact[16 * g + code]), high = fmaxf(high, exact[16 * g + code]);
    least[g] = low;
    most = fmaxf(most, __fadd_rn(high, -low));
  }
  most = warp_max(most);
  if (lane == 0) widest[warp] = most;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, widest[w]);
  const float step = most > 0.0f ? most / kTableLevels : 1.0f;
  unsigned char* table = r.table + row_at(r, kv_head, t) * 16 * groups;
  for (int i = int(threadIdx.x); i < 16 * groups; i += kThreads) {
    const float level = __fadd_rn(__fadd_rn(exact[i], -least[i / 16]) / step, 0.5f);
    table[i] = static_cast<unsigned char>(level > 0.0f ? level < kTableLevels ? level : float(kTableLevels) : 0.0f);  // NaN becomes 0
  }

  // Sixteen lanes add up an interval as a register of 16 numbers does: first each its own, then in halves.
  int* bias = r.bias + row_at(r, kv_head, t) * p.intervals;
  const __half* newest = b.mean + size_t(b.intervals - 1) * dim;
  for (int base = first + 2 * warp; base < b.intervals; base += 2 * kWarps) {
    const int i = base + lane / 16;
    float x = 0.0f;
    if (i < b.intervals)
      for (int d = lane % 16; d < dim; d += 16)
        x = __fadd_rn(x, __fmul_rn(sum[d], __fadd_rn(to_float(b.mean[size_t(i) * dim + d]), -to_float(newest[d]))));
    for (int flip = 8; flip; flip >>= 1) x = __fadd_rn(x, __shfl_xor_sync(kFullWarp, x, flip));
    x = x / step;
    if (lane % 16 == 0 && i < b.intervals)
      bias[i] = x > float(-kBiasLimit) ? x < float(kBiasLimit) ? int(rintf(x)) : kBiasLimit : x == x ? -kBiasLimit : 0;
  }
}

constexpr int kScanSlots = 512;  // per block
EDGEKV_HOST_DEVICE size_t scan_shared_bytes(const LayerParams& p) { return size_t(p.key_dim) * 4; }

// Grid (splits of kScanSlots, kv_heads, T), kThreads threads. Writes r.score of the visible slots' blocks of 32.
//
// A warp takes 32 tokens. Its loads are 128 consecutive bytes: lane l has, of group l / 4, the codes of tokens 4 (l % 4) .. + 3 and
// of those 16 further. Sums of two tokens share a register: 16 bits hold 256 entries of 63.
__global__ void __launch_bounds__(kThreads) scan_codes(const Retrieval r) {
  EDGEKV_SHARED(shared);
  unsigned char* table = shared;
  const LayerParams& p = r.s.layer.p;
  const int kv_head = int(blockIdx.y), t = int(blockIdx.z), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, groups = p.key_dim / 4;
  const Choice c = read_choice(r, kv_head, t);
  const int begin = int(blockIdx.x) * kScanSlots, end = begin + kScanSlots < c.hi ? begin + kScanSlots : c.hi;
  if (!scans(c) || end <= c.lo || begin >= end) return;
  const PackedBody b = packed_body(r.s.layer, kv_head, c.tail.base);
  const size_t row = row_at(r, kv_head, t);
  for (int i = int(threadIdx.x); i < 4 * groups; i += kThreads)
    reinterpret_cast<unsigned*>(table)[i] = reinterpret_cast<const unsigned*>(r.table + row * 16 * groups)[i];
  __syncthreads();
  for (int slot = begin + 32 * warp; slot < end; slot += 32 * kWarps) {
    const unsigned* codes = reinterpret_cast<const unsigned*>(b.index + size_t(slot / 32) * groups * 16);
    unsigned low[2] = {0, 0}, high[2] = {0, 0};  // tokens 0 and 2, 1 and 3
    for (int g = lane / 4; g < groups; g += 8) {
      const unsigned word = codes[4 * g + lane % 4];
      const unsigned char* entry = table + 16 * g;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        low[i] += entry[word >> (8 * i) & 15u] | unsigned(entry[word >> (8 * i + 16) & 15u]) << 16;
        high[i] += entry[word >> (8 * i + 4) & 15u] | unsigned(entry[word >> (8 * i + 20) & 15u]) << 16;
      }
    }
    for (int flip = 4; flip < 32; flip *= 2)
      for (int i = 0; i < 2; ++i) {
        low[i] += __shfl_xor_sync(kFullWarp, low[i], flip);
        high[i] += __shfl_xor_sync(kFullWarp, high[i], flip);
      }
    // Lanes with the same l % 4 hold the same eight sums; each takes one of them.
    const int which = lane / 4, token = slot + lane % 4 * 4 + which % 4 + which / 4 * 16;
    const unsigned pair = which / 4 ? high[which & 1] : low[which & 1];
    if (token >= c.lo && token < end)
      r.score[row * p.body_slots + token] = short(int(pair >> (which & 2 ? 16 : 0) & 0xffffu) + r.bias[row * p.intervals + interval_of(b, b.positions[token])]);
  }
}

// Sets the bits of the `need` slots of [lo, hi) with the largest keys, ties to the lowest slot, and clears all others.
template <typename Key>
EDGEKV_DEVICE void choose_best(const Selection& selection, int lo, int hi, int need, int bits, unsigned* out, int words, const Key& key) {
  const Threshold threshold = find_threshold(selection, lo, hi, need, bits, key);
  int ties = need - threshold.better;
  const bool all_ties = threshold.equal == ties;  // the usual case: nobody has to be counted
  for (int base = 0; base < 32 * words; base += kChooseThreads) {
    const int i = base + int(threadIdx.x);
    const bool candidate = i >= lo && i < hi;
    const unsigned k = candidate ? key(i) : 0u;
    bool stays = candidate && k > threshold.key;
    const bool tie = candidate && k == threshold.key;
    if (all_ties) {
      stays = stays || tie;
    } else {
      int equal = 0;
      const int rank = count_before(tie, selection.scratch, &equal);
      stays = stays || (tie && rank < ties);
      ties -= equal;
    }
    const unsigned word = __ballot_sync(kFullWarp, stays);
    if (threadIdx.x % 32 == 0 && i < 32 * words) out[i / 32] = word;
  }
}

// Grid (kv_heads, T), kChooseThreads threads. Writes r.candidates when they are ranked again, else r.out.
__global__ void __launch_bounds__(kChooseThreads) choose_by_codes(const Retrieval r) {
  EDGEKV_SHARED(shared);
  const LayerParams& p = r.s.layer.p;
  const int kv_head = int(blockIdx.x), t = int(blockIdx.y), words = slot_words(p);
  const Choice c = read_choice(r, kv_head, t);
  const size_t row = row_at(r, kv_head, t);
  unsigned* out = (ranks_again(c) ? r.candidates : r.out) + row * words;
  if (!scans(c) || c.picked == c.hi - c.lo) {
    for (int i = int(threadIdx.x); i < words; i += kChooseThreads) out[i] = range_bits(32 * i, c.lo, c.wanted ? c.hi : c.lo);
    return;
  }
  const short* score = r.score + row * p.body_slots;
  choose_best(Selection(shared), c.lo, c.hi, c.picked, 16, out, words, [&](int i) { return unsigned(int(score[i]) + 32768); });
}

}  // namespace cuda
}  // namespace edgekv
