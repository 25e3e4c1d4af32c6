#include "cpu/compaction.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <numeric>

#include "cpu/compact_packed.h"
#include "cpu/dispatch.h"
#include "cpu/error.h"
#include "cpu/keep_rules/keep_rule.h"
#include "cpu/scratch.h"

namespace edgekv {
namespace {

// Scratch is laid out by adding up rounded sizes.
int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

// Cosines and sines of `turns` successive moves from c.least_turn on, [rotary_dim / 2][turns]. Each frequency is followed by
// rotating a double step by step, whose error stays far below what float can hold.
void fill_turns(const Compaction& c, const float* inv_freq, float* cos, float* sin) {
  for (int i = 0; i < c.params.rotary_dim / 2; ++i) {
    const double step_cos = std::cos(double(inv_freq[i])), step_sin = std::sin(double(inv_freq[i]));
    double x = std::cos(double(c.least_turn) * inv_freq[i]), y = std::sin(double(c.least_turn) * inv_freq[i]);
    for (int t = 0; t < c.turns; ++t) {
      cos[int64_t(i) * c.turns + t] = float(x);
      sin[int64_t(i) * c.turns + t] = float(y);
      const double next = x * step_cos - y * step_sin;
      y = y * step_cos + x * step_sin;
      x = next;
    }
    if (c.least_turn <= 0 && -c.least_turn < c.turns) {
      // A lane that does not move beside lanes that do must keep its bits.
      cos[int64_t(i) * c.turns - c.least_turn] = 1.0f;
      sin[int64_t(i) * c.turns - c.least_turn] = 0.0f;
    }
  }
}

int check(const Compaction& c, const float* inv_freq, int64_t position, int64_t rank_base) {
  const LayerParams& p = c.params;
  if (c.tail_count != p.tail_slots)
    return fail("compaction is for boundaries: position %" PRId64 " is %d tokens after the last one and the interval is %d", position,
                c.tail_count, p.tail_slots);
  if (p.positions == kPositionsOriginal && rank_base != position)
    return fail("with original positions rank_base must be the position, %" PRId64 ", not %" PRId64, position, rank_base);
  if (rank_base < c.new_count || rank_base > position)
    return fail("rank_base %" PRId64 " is not possible at position %" PRId64 " with %d kept tokens", rank_base, position, c.new_count);
  if (p.positions == kPositionsCache && p.rotary_dim > 0 && inv_freq == nullptr)
    return fail("positions = cache needs inv_freq to rotate keys to their new places");
  return 0;
}

}  // namespace

int compact_state(const LayerParams& params, const float* inv_freq, void* state, int64_t bytes, int64_t position, int64_t rank_base,
                  Parallel& parallel) {
  if (check_state(params, state, bytes, position)) return 1;
  if (params.format == kFormatSelfIndex) return compact_packed(params, state, position, rank_base, parallel);
  const Kernels& kernel = kernels();
  Compaction c = {};
  c.params = params;
  c.state = view_state(params, state);
  StateHeader& header = *c.state.header;
  c.group = params.q_heads / params.kv_heads;
  c.body_count = header.body_count;
  c.tail_count = int(position - header.tail_base);
  c.tail_base = header.tail_base;
  const int candidates = c.body_count + c.tail_count;
  c.new_count = std::min(candidates, params.body_slots);
  if (check(c, inv_freq, position, rank_base)) return 1;

  c.turn = (rank_base - c.new_count) - (header.rank_base - c.body_count);
  c.least_turn = c.turn - (candidates - c.new_count);
  c.turns = candidates - c.new_count + 1;
  const bool scored = keeps_scores(params), by_keys = ranks_by_keys(params) && candidates > params.body_slots;
  const bool rotates = params.positions == kPositionsCache && params.rotary_dim > 0;

  // Latent keys stand for those of all kv heads: one choice holds for all, and what moves are the keys of one head with `latent` numbers.
  const bool joint = params.latent > 0;
  const int64_t heads = params.kv_heads, choices = joint ? 1 : heads, per_head = rounded(candidates);
  const int key_dim = joint ? params.latent : params.key_dim;
  int64_t work = 0;
  if (scored) work = rounded(kernel.row_block * (padded_candidates(c) + params.key_dim));
  if (by_keys) work = rounded(padded_candidates(c) + int64_t(EDGEKV_LANES) * key_dim);
  const int64_t table = rotates ? rounded(int64_t(params.rotary_dim / 2) * c.turns) : 0;
  Scratch scratch;
  float* memory = static_cast<float*>(scratch.reserve(size_t(2 * table + heads * (5 * per_head + work)) * sizeof(float)));
  if (memory == nullptr) return fail("out of memory: compaction needs more working memory than there is");
  if (rotates) {
    fill_turns(c, inv_freq, memory, memory + table);
    c.cos = memory;
    c.sin = memory + table;
  }
  struct Head {
    float *score, *seen, *ranking, *work;
    int32_t *kept, *rule_work;
  };
  auto head_memory = [&](size_t head) {
    float* at = memory + 2 * table + int64_t(head) * (5 * per_head + work);
    return Head{at, at + per_head, at + 2 * per_head, at + 5 * per_head, reinterpret_cast<int32_t*>(at + 3 * per_head),
                reinterpret_cast<int32_t*>(at + 4 * per_head)};
  };
  uint64_t read = 0, written = 0;
  c.read = &read;
  c.written = &written;
  Compaction keys = c;
  if (joint) {
    keys.params.kv_heads = 1;
    keys.params.key_dim = params.latent;
    keys.state.body_k = c.state.body_z;
    keys.state.tail_k = c.state.tail_z;
  }

  // First choose for every head, then move, so that a rule that refuses leaves the state alone.
  std::atomic<bool> refused{false};
  char sentence[512] = "";
  parallel.each(size_t(choices), [&](size_t index) {
    const Head h = head_memory(index);
    if (scored) {
      const int64_t at = int64_t(index) * params.body_slots;
      for (int i = 0; i < candidates; ++i) {
        h.score[i] = i < c.body_count ? c.state.body_score[at + i] * params.score_decay : 0.0f;
        h.seen[i] = i < c.body_count ? c.state.body_seen[at + i] * params.score_decay : 0.0f;
      }
      if (params.observe > 0) kernel.observe(c, int(index), h.score, h.seen, h.work);
      for (int i = 0; i < candidates; ++i)
        h.ranking[i] = params.score_normalise ? h.score[i] / std::max(h.seen[i], FLT_MIN) : h.score[i];
    }
    if (by_keys) kernel.rank_keys(keys, int(index), h.ranking, h.work);
    if (candidates <= params.body_slots)
      std::iota(h.kept, h.kept + candidates, 0);
    else if (keep_rule(params.keep)(params, candidates, h.ranking, h.kept, h.rule_work) && !refused.exchange(true))
      std::memcpy(sentence, error_text(), sizeof(sentence));
  });
  if (refused) {
    fail("%s", sentence);
    return kCompactionFull;
  }

  parallel.each(size_t(heads), [&](size_t index) {
    const Head h = head_memory(joint ? 0 : index);
    if (int64_t(index) < choices) kernel.move_keys(keys, int(index), h.kept);
    kernel.move_values(c, int(index), h.kept);
    if (!scored) return;
    const int64_t at = int64_t(index) * params.body_slots;
    for (int i = 0; i < c.new_count; ++i) {
      c.state.body_score[at + i] = h.score[h.kept[i]];
      c.state.body_seen[at + i] = h.seen[h.kept[i]];
    }
  });
  if (scored) {
    const uint64_t blocks = (uint64_t(params.observe) * c.group + kernel.row_block - 1) / kernel.row_block;
    read += blocks * heads * padded_candidates(c) * params.key_dim * element_bytes(params) + uint64_t(heads) * c.body_count * 8;
    written += uint64_t(heads) * c.new_count * 8;
  }
  if (by_keys) read += 2 * choices * padded_candidates(c) * key_dim * element_bytes(params);
  header.traffic[kCompactRead] += read;
  header.traffic[kCompactWrite] += written;
  header.evicted += candidates - c.new_count;
  header.body_count = c.new_count;
  header.tail_base = position;
  header.rank_base = rank_base;
  return 0;
}

}  // namespace edgekv
