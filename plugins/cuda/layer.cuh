// One layer's state on the device: where its planes lie, and what a step or a compaction finds in its header.
#pragma once
#include "../layout/state_layout.h"
#include "numbers.cuh"

namespace edgekv {
namespace cuda {

// Passed to kernels by value.
struct Layer {
  LayerParams p;
  StateLayout at;
  RecordLayout record;         // of a compressed body
  uint64_t hash;               // of the state's parameters: a state of others is refused
  unsigned char* state;        // device memory, at.bytes
  int body_slots;              // of the state; p.body_slots is less in a view of its sinks
  int sinks_as_body;           // a view for the dense kernels, in which the sinks of a compressed state are the body (sinks_view)
};

inline Layer make_layer(const LayerParams& p, void* state) {
  return {p, state_layout(p), record_layout(p), params_hash(p), static_cast<unsigned char*>(state), p.body_slots, 0};
}

// Tokens that the planes of sinks have room for, per kv head.
EDGEKV_HOST_DEVICE int sink_slots(const LayerParams& p) { return (p.sinks + EDGEKV_LANES - 1) / EDGEKV_LANES * EDGEKV_LANES; }

// Sinks and tail of a compressed state lie in full, as body and tail of a dense one do.
inline Layer sinks_view(Layer l) {
  l.p.body_slots = sink_slots(l.p);
  l.at.body_k = l.at.sink_k;
  l.at.body_v = l.at.sink_v;
  l.sinks_as_body = 1;
  return l;
}

template <typename T>
EDGEKV_DEVICE T* plane(const Layer& l, size_t offset) { return reinterpret_cast<T*>(l.state + offset); }
EDGEKV_DEVICE StateHeader* header(const Layer& l) { return reinterpret_cast<StateHeader*>(l.state); }

// What the committed position says about the tail. Not ok: the state is damaged, or the caller would overrun the tail; kernels
// then leave the state alone.
struct Tail {
  int base;            // position of tail slot 0
  int committed;       // tail rows before this step
  int body;            // filled body slots; in a view of the sinks, those
  int hidden_from, hidden_to;  // body slots that steps do not attend to, multiples of 16 (drafting with a part of the cache)
  int retrieve;        // compressed tokens each row of a step attends to; 0: all
  bool ok;
};

EDGEKV_DEVICE Tail read_tail(const Layer& l, long long position, int new_rows) {
  const StateHeader* h = header(l);
  Tail t;
  const long long base = h->tail_base, committed = position - base;
  t.body = h->body_count;
  t.hidden_from = h->hidden_from;
  t.hidden_to = h->hidden_to;
  t.ok = h->magic == EDGEKV_STATE_MAGIC && h->layout_version == EDGEKV_LAYOUT_VERSION && h->params_hash == l.hash &&
         committed >= 0 && committed + new_rows <= l.p.tail_slots && t.body >= 0 && t.body <= l.body_slots && base >= 0 &&
         base <= 0x7fffffffll - l.p.tail_slots &&  // positions are stored as int32
         0 <= t.hidden_from && t.hidden_from <= t.hidden_to && t.hidden_to <= t.body && (t.hidden_from | t.hidden_to) % EDGEKV_LANES == 0;
  t.retrieve = 0;
  if (l.p.format == kFormatSelfIndex) {
    // Every token of the body has a mean key.
    t.ok = t.ok && base % l.p.tail_slots == 0 && base / l.p.tail_slots <= l.p.intervals && (t.body == 0 || base > 0) && h->retrieve >= 0;
    t.retrieve = h->retrieve < t.body ? h->retrieve : t.body;
    if (l.sinks_as_body) {
      t.body = l.p.sinks < base ? l.p.sinks : int(base);
      t.hidden_from = t.hidden_to = 0;
    }
  }
  t.base = t.ok ? int(base) : 0;
  t.committed = t.ok ? int(committed) : 0;
  return t;
}

// Offset of number d of a key in a plane interleaved by 16 tokens, in elements; `slots` per head.
EDGEKV_DEVICE size_t key_offset(int head, int slot, int d, int slots, int key_dim) {
  return (size_t(head) * slots / EDGEKV_LANES + slot / EDGEKV_LANES) * key_dim * EDGEKV_LANES + size_t(d) * EDGEKV_LANES + slot % EDGEKV_LANES;
}

EDGEKV_DEVICE bool visible(const LayerParams& p, int key, int query) {
  return key >= 0 && key <= query && (p.sliding_window == 0 || query - key < p.sliding_window);
}

EDGEKV_DEVICE float soft_limit(float score, float cap) { return cap > 0.0f ? __fmul_rn(cap, tanhf(score / cap)) : score; }

}  // namespace cuda
}  // namespace edgekv
