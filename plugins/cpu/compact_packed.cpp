#include "cpu/compact_packed.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/compaction.h"
#include "cpu/error.h"
#include "cpu/keep_rules/keep_rule.h"
#include "cpu/quantise.h"
#include "cpu/scratch.h"

namespace edgekv {
namespace {

constexpr int kSub = 4, kCodes = 16;  // numbers per sign code, codes

// One compaction of one compressed layer. Candidates are the body's tokens, then the tail's behind the sinks.
struct Packing {
  LayerParams params;
  StateView state;
  RecordLayout record;
  int body_count, sinks_before, to_sinks, added, candidates, new_count, interval;
  int64_t tail_base, position;
  int block;  // of the transform
  float factor;
  bool scored, by_keys;

  float number(const void* plane, int64_t at) const {
    return params.element == kFloat16 ? from_half(static_cast<const uint16_t*>(plane)[at]) : static_cast<const float*>(plane)[at];
  }
  // Number 0 of a key in a plane interleaved by 16 tokens; number d lies 16 d further.
  int64_t key_at(int head, int slot, int slots) const {
    return (int64_t(head) * slots + slot / EDGEKV_LANES * EDGEKV_LANES) * params.key_dim + slot % EDGEKV_LANES;
  }
  void read_key(const void* plane, int head, int slot, int slots, float* to) const {
    const int64_t at = key_at(head, slot, slots);
    for (int d = 0; d < params.key_dim; ++d) to[d] = number(plane, at + int64_t(d) * EDGEKV_LANES);
  }
  uint8_t* record_of(int head, int slot) const { return state.payload + (int64_t(head) * params.body_slots + slot) * int64_t(record.bytes); }
  // The byte that holds code `group` of a slot, and how far its bits are shifted.
  uint8_t* code_byte(int head, int slot, int group) const {
    const int64_t block_of = int64_t(head) * (params.body_slots / EDGEKV_INDEX_TOKENS) + slot / EDGEKV_INDEX_TOKENS;
    return state.index + (block_of * (params.key_dim / kSub) + group) * 16 + slot % 16;
  }
  static int code_shift(int slot) { return slot % EDGEKV_INDEX_TOKENS >= 16 ? 4 : 0; }
  void set_code(int head, int slot, int group, unsigned code) const {
    uint8_t* at = code_byte(head, slot, group);
    *at = uint8_t((*at & (0xf0 >> code_shift(slot))) | code << code_shift(slot));
  }
  unsigned code(int head, int slot, int group) const { return *code_byte(head, slot, group) >> code_shift(slot) & 15u; }
  int32_t* positions(int head) const { return state.body_pos + int64_t(head) * params.body_slots; }
  const uint16_t* mean_of(int head, int interval_of) const { return state.mean + (int64_t(head) * params.intervals + interval_of) * params.key_dim; }

  // The stored key of a body slot. A damaged position must not lead out of the plane of means.
  void body_key(int head, int slot, float* to) const {
    const uint8_t* from = record_of(head, slot);
    dequantise(from, from + record.key_pairs, params.key_dim, params.key_bits, to);
    for (int d = 0; d < params.key_dim; ++d)
      if (!(code(head, slot, d / kSub) >> d % kSub & 1u)) to[d] = -to[d];
    transform(to, params.key_dim, block, factor);
    const int of = std::min(std::max(positions(head)[slot] / params.tail_slots, 0), params.intervals - 1);
    const uint16_t* mean = mean_of(head, of);
    for (int d = 0; d < params.key_dim; ++d) to[d] += from_half(mean[d]);
  }
};

// Adds the attention of the observed queries to score and seen of the candidates. keys [sinks + candidates][key_dim] in order of
// position; work has room for the queries and for one score per key and query.
void observe_keys(const Packing& c, int head, const float* keys, float* work, float* score, float* seen) {
  const LayerParams& p = c.params;
  const int group = p.q_heads / p.kv_heads, rows = p.observe * group, sinks = c.sinks_before + c.to_sinks, all = sinks + c.candidates;
  float *queries = work, *weights = work + int64_t(rows) * p.key_dim;
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < p.key_dim; ++d)
      queries[int64_t(d) * rows + r] = c.number(c.state.tail_q, (int64_t(head * group + r % group) * p.observe + r / group) * p.key_dim + d);
  for (int i = 0; i < all; ++i) {
    float* row = weights + int64_t(i) * rows;
    std::fill(row, row + rows, 0.0f);
    for (int d = 0; d < p.key_dim; ++d) {
      const float x = keys[int64_t(i) * p.key_dim + d], *q = queries + int64_t(d) * rows;
      for (int r = 0; r < rows; ++r) row[r] += x * q[r];
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int64_t query = c.tail_base + p.tail_slots - p.observe + r / group;
    auto visible = [&](int i) {
      const int64_t key = i < sinks ? i : i - sinks < c.body_count ? c.positions(head)[i - sinks] : c.tail_base + c.to_sinks + i - sinks - c.body_count;
      return key >= 0 && key <= query && (p.sliding_window == 0 || query - key < p.sliding_window);
    };
    float top = -HUGE_VALF, sum = 0.0f;
    for (int i = 0; i < all; ++i) {
      float& x = weights[int64_t(i) * rows + r];
      x *= p.scale;
      if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
      if (!visible(i)) x = -HUGE_VALF;
      top = std::max(top, x);
    }
    for (int i = 0; i < all; ++i) sum += weights[int64_t(i) * rows + r] = std::exp(weights[int64_t(i) * rows + r] - top);
    for (int i = sinks; i < all; ++i)
      if (visible(i)) {
        score[i - sinks] += weights[int64_t(i) * rows + r] / sum;
        seen[i - sinks] += 1.0f;
      }
  }
}

// As rank_keys in compact.h, over keys [candidates][key_dim].
void rank_keys(const Packing& c, const float* keys, float* ranking) {
  const int dim = c.params.key_dim;
  std::vector<float> sum(size_t(dim), 0.0f);
  for (int i = 0; i < c.candidates; ++i) {
    float squares = 0.0f;
    for (int d = 0; d < dim; ++d) squares += keys[int64_t(i) * dim + d] * keys[int64_t(i) * dim + d];
    ranking[i] = 1.0f / std::sqrt(std::max(squares, FLT_MIN));
    for (int d = 0; d < dim; ++d) sum[size_t(d)] += keys[int64_t(i) * dim + d] * ranking[i];
  }
  for (int i = 0; i < c.candidates; ++i) {
    float along = 0.0f;
    for (int d = 0; d < dim; ++d) along += keys[int64_t(i) * dim + d] * sum[size_t(d)];
    ranking[i] *= -along;
  }
}

void copy_sinks(const Packing& c, int head) {
  const LayerParams& p = c.params;
  const int64_t e = int64_t(element_bytes(p));
  const int slots = (p.sinks + EDGEKV_LANES - 1) / EDGEKV_LANES * EDGEKV_LANES;
  for (int i = 0; i < c.to_sinks; ++i) {
    const int64_t from = c.key_at(head, i, p.tail_slots), to = c.key_at(head, c.sinks_before + i, slots);
    for (int64_t d = 0; d < int64_t(p.key_dim) * EDGEKV_LANES; d += EDGEKV_LANES)
      std::memcpy(c.state.sink_k + (to + d) * e, c.state.tail_k + (from + d) * e, size_t(e));
  }
  const int64_t row = p.value_dim * e;
  std::memcpy(c.state.sink_v + (int64_t(head) * slots + c.sinks_before) * row, c.state.tail_v + int64_t(head) * p.tail_slots * row, size_t(c.to_sinks * row));
}

// Body tokens that stay close up; they only ever move towards slot 0. Returns how many changed their slot.
int move_body(const Packing& c, int head, const int32_t* kept, int stay) {
  int moved = 0;
  for (int i = 0; i < stay; ++i) {
    if (kept[i] == i) continue;
    std::memcpy(c.record_of(head, i), c.record_of(head, kept[i]), c.record.bytes);
    for (int g = 0; g < c.params.key_dim / kSub; ++g) c.set_code(head, i, g, c.code(head, kept[i], g));
    c.positions(head)[i] = c.positions(head)[kept[i]];
    ++moved;
  }
  return moved;
}

// Latents stand for the keys of all kv heads, which keep the same tokens. Returns how many that stay changed their slot.
int move_latents(const Packing& c, const int32_t* kept, int stay) {
  const int64_t size = int64_t(latent_record_bytes(c.params));
  int moved = 0;
  for (int i = 0; i < c.new_count; ++i) {
    if (kept[i] == i && i < stay) continue;
    const uint8_t* from = i < stay ? c.state.body_z + kept[i] * size : c.state.tail_z + (c.to_sinks + kept[i] - c.body_count) * size;
    std::memcpy(c.state.body_z + i * size, from, size_t(size));
    moved += i < stay;
  }
  return moved;
}

// The interval's mean, the codebook, and codes and records of the new tokens that stay. work: keys [added][key_dim], a value, a key.
void compress(const Packing& c, int head, const int32_t* kept, int stay, float* work) {
  const LayerParams& p = c.params;
  const int dim = p.key_dim, groups = dim / kSub;
  if (c.added == 0) return;
  float *keys = work, *value = work + int64_t(c.added) * dim, *sum = value + p.value_dim;
  std::fill(sum, sum + dim, 0.0f);
  for (int t = 0; t < c.added; ++t) {
    float* key = keys + int64_t(t) * dim;
    c.read_key(c.state.tail_k, head, c.to_sinks + t, p.tail_slots, key);
    for (int d = 0; d < dim; ++d) sum[d] += key[d];
  }
  uint16_t* mean = c.state.mean + (int64_t(head) * p.intervals + c.interval) * dim;
  for (int d = 0; d < dim; ++d) {
    mean[d] = to_half(sum[d] / float(c.added));
    sum[d] = from_half(mean[d]);
  }
  int64_t value_block = p.value_dim & -p.value_dim;
  const float value_factor = float(1 / std::sqrt(double(value_block)));
  float* codebook = c.state.codebook + int64_t(head) * groups * kCodes * kSub;
  float* seen = c.state.code_seen + int64_t(head) * groups * kCodes;
  int to = stay;
  for (int t = 0; t < c.added; ++t) {
    float* key = keys + int64_t(t) * dim;
    for (int d = 0; d < dim; ++d) key[d] -= sum[d];
    transform(key, dim, c.block, c.factor);
    const bool stays = to < c.new_count && kept[to] == c.body_count + t;
    for (int g = 0; g < groups; ++g) {
      unsigned code = 0;
      for (int i = 0; i < kSub; ++i) code |= unsigned(key[g * kSub + i] >= 0) << i;
      float& count = seen[g * kCodes + code];
      float* centroid = codebook + (g * kCodes + int(code)) * kSub;
      count += 1.0f;
      for (int i = 0; i < kSub; ++i) centroid[i] += (key[g * kSub + i] - centroid[i]) / count;
      if (stays) c.set_code(head, to, g, code);
    }
    if (!stays) continue;
    for (int d = 0; d < dim; ++d) key[d] = std::fabs(key[d]);
    uint8_t* record = c.record_of(head, to);
    std::memset(record, 0, c.record.bytes);
    if (p.latent == 0) quantise(key, dim, p.key_bits, true, record, record + c.record.key_pairs);
    for (int d = 0; d < p.value_dim; ++d)
      value[d] = c.number(c.state.tail_v, (int64_t(head) * p.tail_slots + c.to_sinks + t) * p.value_dim + d);
    transform(value, p.value_dim, int(value_block), value_factor);
    quantise(value, p.value_dim, p.value_bits, false, record + c.record.values, record + c.record.value_pairs);
    c.positions(head)[to] = int32_t(c.tail_base + c.to_sinks + t);
    ++to;
  }
}

}  // namespace

int compact_packed(const LayerParams& params, void* state, int64_t position, int64_t rank_base, Parallel& parallel) {
  Packing c = {};
  c.params = params;
  c.state = view_state(params, state);
  c.record = record_layout(params);
  StateHeader& header = *c.state.header;
  c.tail_base = header.tail_base;
  c.position = position;
  if (position - c.tail_base != params.tail_slots)
    return fail("compaction is for boundaries: position %" PRId64 " is %d tokens after the last one and the interval is %d", position,
                int(position - c.tail_base), params.tail_slots);
  if (rank_base != position)
    return fail("with original positions rank_base must be the position, %" PRId64 ", not %" PRId64, position, rank_base);
  if (c.tail_base / params.tail_slots >= params.intervals)
    return fail("the text has all its %d boundary intervals already", params.intervals);
  c.interval = int(c.tail_base / params.tail_slots);
  c.body_count = header.body_count;
  c.sinks_before = int(std::min<int64_t>(params.sinks, c.tail_base));
  c.to_sinks = int(std::min<int64_t>(params.sinks - c.sinks_before, params.tail_slots));
  c.added = params.tail_slots - c.to_sinks;
  c.candidates = c.body_count + c.added;
  c.new_count = std::min(c.candidates, params.body_slots);
  c.block = params.key_dim & -params.key_dim;
  c.factor = float(1 / std::sqrt(double(c.block)));
  c.scored = keeps_scores(params);
  c.by_keys = ranks_by_keys(params) && c.candidates > params.body_slots;

  const int64_t heads = params.kv_heads, dim = params.key_dim, sinks = c.sinks_before + c.to_sinks, queries = int64_t(params.observe) * (params.q_heads / heads);
  const int64_t work = std::max((c.scored ? (sinks + c.candidates) * (dim + queries) + queries * dim : c.by_keys ? c.candidates * dim : 0),
                                (c.added + 1) * dim + params.value_dim);
  const int64_t per_head = 5 * int64_t(c.candidates) + work;
  Scratch scratch;
  float* memory = static_cast<float*>(scratch.reserve(size_t(heads * per_head) * sizeof(float)));
  if (memory == nullptr) return fail("out of memory: compaction needs more working memory than there is");
  struct Head {
    float *score, *seen, *ranking, *work;
    int32_t *kept, *rule_work;
  };
  auto head_memory = [&](size_t head) {
    float* at = memory + int64_t(head) * per_head;
    const int64_t n = c.candidates;
    return Head{at, at + n, at + 2 * n, at + 5 * n, reinterpret_cast<int32_t*>(at + 3 * n), reinterpret_cast<int32_t*>(at + 4 * n)};
  };

  // First choose for every head, then write, so that a rule that refuses leaves the state alone. Sinks have planes of their own, so
  // the rule sees none.
  LayerParams without_sinks = params;
  without_sinks.sinks = 0;
  std::atomic<bool> refused{false};
  char sentence[512] = "";
  parallel.each(size_t(heads), [&](size_t index) {
    const Head h = head_memory(index);
    const int head = int(index);
    if (c.scored || c.by_keys) {
      float* key = h.work;
      const int slots = (params.sinks + EDGEKV_LANES - 1) / EDGEKV_LANES * EDGEKV_LANES;
      for (int i = 0; c.scored && i < c.sinks_before; ++i, key += dim) c.read_key(c.state.sink_k, head, i, slots, key);
      for (int i = 0; c.scored && i < c.to_sinks; ++i, key += dim) c.read_key(c.state.tail_k, head, i, params.tail_slots, key);
      for (int i = 0; i < c.body_count; ++i, key += dim) c.body_key(head, i, key);
      for (int i = 0; i < c.added; ++i, key += dim) c.read_key(c.state.tail_k, head, c.to_sinks + i, params.tail_slots, key);
      if (c.by_keys) rank_keys(c, h.work, h.ranking);
      if (c.scored) {
        const int64_t at = int64_t(index) * params.body_slots;
        for (int i = 0; i < c.candidates; ++i) {
          h.score[i] = i < c.body_count ? c.state.body_score[at + i] * params.score_decay : 0.0f;
          h.seen[i] = i < c.body_count ? c.state.body_seen[at + i] * params.score_decay : 0.0f;
        }
        observe_keys(c, head, h.work, key, h.score, h.seen);
        for (int i = 0; i < c.candidates; ++i) h.ranking[i] = params.score_normalise ? h.score[i] / std::max(h.seen[i], FLT_MIN) : h.score[i];
      }
    }
    if (c.candidates <= params.body_slots)
      std::iota(h.kept, h.kept + c.candidates, 0);
    else if (keep_rule(params.keep)(without_sinks, c.candidates, h.ranking, h.kept, h.rule_work) && !refused.exchange(true))
      std::memcpy(sentence, error_text(), sizeof(sentence));
  });
  if (refused) {
    fail("%s", sentence);
    return kCompactionFull;
  }

  std::atomic<int64_t> moved{0}, filled{0}, latents_moved{0}, latents_filled{0};
  parallel.each(size_t(heads), [&](size_t index) {
    const Head h = head_memory(index);
    const int stay = int(std::lower_bound(h.kept, h.kept + c.new_count, c.body_count) - h.kept);
    copy_sinks(c, int(index));
    moved += move_body(c, int(index), h.kept, stay);
    filled += c.new_count - stay;
    if (params.latent > 0 && index == 0) {
      latents_moved = move_latents(c, h.kept, stay);
      latents_filled = c.new_count - stay;
    }
    compress(c, int(index), h.kept, stay, h.work);
    if (!c.scored) return;
    const int64_t at = int64_t(index) * params.body_slots;
    for (int i = 0; i < c.new_count; ++i) {
      c.state.body_score[at + i] = h.score[h.kept[i]];
      c.state.body_seen[at + i] = h.seen[h.kept[i]];
    }
  });

  // What edgekv/memory/traffic.py has as a formula.
  const int64_t e = int64_t(element_bytes(params)), token = dim / 8 + int64_t(c.record.bytes) + 4;
  const int64_t key_parts = dim / 8 + int64_t(c.record.values) + int64_t(c.record.value_pairs - c.record.key_pairs);
  const int64_t taught = c.added ? heads * dim * 80 : 0;
  int64_t read = heads * params.tail_slots * (dim + params.value_dim) * e + moved * token + taught;
  int64_t written = heads * c.to_sinks * (dim + params.value_dim) * e + (moved + filled) * token + taught + (c.added ? heads * dim * 2 : 0);
  const int64_t latents = (latents_moved + latents_filled) * int64_t(params.latent > 0 ? latent_record_bytes(params) : 0);
  read += latents;
  written += latents;
  if (c.scored || c.by_keys) read += heads * (c.body_count * key_parts + c.added * dim * e);
  if (c.scored) {
    read += heads * (sinks * dim * e + queries * dim * e + 8 * int64_t(c.body_count));
    written += heads * 8 * int64_t(c.new_count);
  }
  header.traffic[kCompactRead] += uint64_t(read);
  header.traffic[kCompactWrite] += uint64_t(written);
  header.evicted += c.candidates - c.new_count;
  header.body_count = c.new_count;
  header.tail_base = header.rank_base = position;
  return 0;
}

}  // namespace edgekv
