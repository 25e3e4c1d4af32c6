#include "cpu/state.h"

#include <cinttypes>
#include <cstring>

#include "cpu/error.h"

namespace edgekv {

StateView view_state(const LayerParams& params, void* state) {
  const StateLayout at = state_layout(params);
  uint8_t* base = static_cast<uint8_t*>(state);
  StateView s;
  s.header = reinterpret_cast<StateHeader*>(base);
  s.body_pos = reinterpret_cast<int32_t*>(base + at.body_pos);
  s.body_score = reinterpret_cast<float*>(base + at.body_score);
  s.body_seen = reinterpret_cast<float*>(base + at.body_seen);
  s.body_k = base + at.body_k;
  s.body_v = base + at.body_v;
  s.body_z = base + at.body_z;
  s.index = base + at.index;
  s.payload = base + at.payload;
  s.mean = reinterpret_cast<uint16_t*>(base + at.mean);
  s.codebook = reinterpret_cast<float*>(base + at.codebook);
  s.code_seen = reinterpret_cast<float*>(base + at.code_seen);
  s.sink_k = base + at.sink_k;
  s.sink_v = base + at.sink_v;
  s.tail_k = base + at.tail_k;
  s.tail_v = base + at.tail_v;
  s.tail_z = base + at.tail_z;
  s.tail_q = base + at.tail_q;
  return s;
}

static int check_block(const LayerParams& params, const void* state, int64_t bytes) {
  if (const char* sentence = check_params(params)) return fail("%s", sentence);
  const StateLayout at = state_layout(params);
  if (bytes < 0 || uint64_t(bytes) != at.bytes)
    return fail("the state has %" PRId64 " bytes but these parameters need %zu", bytes, at.bytes);
  if (state == nullptr) return fail("the state is a null pointer");
  if (reinterpret_cast<uintptr_t>(state) % 64) return fail("the state must be aligned to 64 bytes");
  return 0;
}

int init_state(const LayerParams& params, void* state, int64_t bytes) {
  if (check_block(params, state, bytes)) return 1;
  std::memset(state, 0, size_t(bytes));
  const StateView s = view_state(params, state);
  s.header->magic = EDGEKV_STATE_MAGIC;
  s.header->layout_version = EDGEKV_LAYOUT_VERSION;
  s.header->params_hash = params_hash(params);
  std::memset(s.body_pos, 0xff, size_t(params.kv_heads) * params.body_slots * 4);
  return 0;
}

int check_state(const LayerParams& params, const void* state, int64_t bytes, int64_t position) {
  if (check_block(params, state, bytes)) return 1;
  const StateHeader& h = *static_cast<const StateHeader*>(state);
  if (h.magic != EDGEKV_STATE_MAGIC) return fail("the state was never initialised or is damaged (wrong magic number)");
  if (h.layout_version != EDGEKV_LAYOUT_VERSION)
    return fail("the state has layout version %u but this library writes version %d", h.layout_version, EDGEKV_LAYOUT_VERSION);
  if (h.params_hash != params_hash(params)) return fail("the state was made for a layer with other parameters");
  if (h.body_count < 0 || h.body_count > params.body_slots)
    return fail("the state is damaged: %d filled body slots of %d", h.body_count, params.body_slots);
  // Positions are stored as int32, and rotations are computed from differences of the fields below.
  const int64_t limit = int64_t(1) << 31;
  if (h.tail_base < h.body_count || h.tail_base >= limit || h.rank_base < h.body_count || h.rank_base > h.tail_base || h.evicted < 0 ||
      h.evicted != h.tail_base - h.body_count - sinks_moved(params, h.tail_base))
    return fail("the state is damaged: tail_base %" PRId64 ", rank_base %" PRId64 ", evicted %" PRId64 " do not fit together",
                h.tail_base, h.rank_base, h.evicted);
  if (params.format == kFormatSelfIndex && (h.tail_base % params.tail_slots || h.tail_base / params.tail_slots > params.intervals))
    return fail("the state is damaged: tail_base %" PRId64 " is no boundary among %d intervals of %d", h.tail_base, params.intervals,
                params.tail_slots);
  if (h.hidden_from < 0 || h.hidden_to < h.hidden_from || h.hidden_to > h.body_count || h.hidden_from % EDGEKV_LANES ||
      h.hidden_to % EDGEKV_LANES)
    return fail("body slots %d to %d cannot be hidden: multiples of %d up to %d are possible", h.hidden_from, h.hidden_to, EDGEKV_LANES,
                h.body_count);
  if (h.retrieve < 0 || h.candidates < 0) return fail("retrieve and candidates must not be negative");
  if (position < h.tail_base || position - h.tail_base > params.tail_slots || position >= limit)
    return fail("position %" PRId64 " lies outside the tail, which starts at %" PRId64 " and has %d slots", position, h.tail_base,
                params.tail_slots);
  return 0;
}

namespace {

// Multiply-and-fold over 8-byte words: a fingerprint for equality checks, not a cryptographic hash.
struct Hasher {
  uint64_t value = 0x9E3779B97F4A7C15ull;
  void word(uint64_t w) {
    value = (value ^ w) * 0xD6E8FEB86659FD93ull;
    value ^= value >> 32;
  }
  void bytes(const void* data, size_t count) {
    const uint8_t* p = static_cast<const uint8_t*>(data);
    for (; count >= 8; count -= 8, p += 8) {
      uint64_t w;
      std::memcpy(&w, p, 8);
      word(w);
    }
    uint64_t w = 0;
    std::memcpy(&w, p, count);
    word(w ^ (uint64_t(count) << 56));
  }
};

}  // namespace

uint64_t hash_state(const LayerParams& params, const void* state, int64_t position) {
  const StateView s = view_state(params, const_cast<void*>(state));
  const StateLayout at = state_layout(params);
  const size_t element = element_bytes(params);
  const int64_t tail = position - s.header->tail_base;
  Hasher hash;
  hash.word(uint64_t(position));
  hash.bytes(s.header, offsetof(StateHeader, hidden_from));
  hash.bytes(s.body_pos, at.tail_k - at.body_pos);
  // The first `tail` tokens of numbers that lie sixteen tokens side by side, [tail_slots / 16][dim][16].
  auto interleaved = [&](const uint8_t* plane, int dim) {
    const size_t block = size_t(dim) * EDGEKV_LANES * element;
    for (int64_t slot = 0; slot < tail; slot += EDGEKV_LANES, plane += block) {
      const size_t lanes = size_t(tail - slot < EDGEKV_LANES ? tail - slot : EDGEKV_LANES);
      for (int d = 0; d < dim; ++d) hash.bytes(plane + d * EDGEKV_LANES * element, lanes * element);
    }
  };
  packs_latents(params) ? hash.bytes(s.tail_z, size_t(tail / EDGEKV_LANES * EDGEKV_LANES) * latent_record_bytes(params)) : interleaved(s.tail_z, params.latent);
  for (int head = 0; head < params.kv_heads; ++head) {
    interleaved(s.tail_k + size_t(head) * params.tail_slots * params.key_dim * element, params.key_dim);
    const size_t row = size_t(params.value_dim) * element;
    hash.bytes(s.tail_v + size_t(head) * params.tail_slots * row, size_t(tail) * row);
  }
  if (keeps_scores(params)) {
    const int64_t first = params.tail_slots - params.observe, rows = tail > first ? tail - first : 0;
    const size_t row = size_t(params.key_dim) * element;
    for (int head = 0; head < params.q_heads; ++head) hash.bytes(s.tail_q + size_t(head) * params.observe * row, size_t(rows) * row);
  }
  return hash.value;
}

}  // namespace edgekv
