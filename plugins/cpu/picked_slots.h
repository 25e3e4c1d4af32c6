// Tokens picked here and there from a compressed body: where they lie. What is read of them is up to picked.h or picked_avx2.h.
#pragma once
#include "cpu/packed_body.h"

namespace {

constexpr int kRecordsAhead = 40;  // tokens: their records wait in the second cache

struct PickedSlots {
  const PackedBody& body;
  const int32_t* slots;
  int count, listed;  // tokens in this tile of up to kTile, and in this and those that follow it

  const uint8_t* record(int i) const { return body.payload + int64_t(slots[i]) * int64_t(body.record.bytes); }

  // Ask for what will be read of a token that comes soon after token i. Tokens are picked here and there, where no processor foresees them.
  __attribute__((always_inline)) void fetch_value(int i) const {
    if (i + kRecordsAhead < listed) body.fetch_value(slots[i + kRecordsAhead]);
  }
  __attribute__((always_inline)) void fetch_key(int i) const {
    if (i + kRecordsAhead < listed) body.fetch_key(slots[i + kRecordsAhead]);
  }
  // With the codes of its block.
  __attribute__((always_inline)) void fetch_key_and_codes(int i) const {
    if (i + kRecordsAhead >= listed) return;
    const int slot = slots[i + kRecordsAhead];
    body.fetch_key(slot);
    if (slot / EDGEKV_INDEX_TOKENS != slots[i + kRecordsAhead - 1] / EDGEKV_INDEX_TOKENS) body.fetch_codes(slot);
  }
};

// The intervals of up to kLanes tokens of a list, which ascends as positions do: tokens [from[n], from[n + 1]) are of interval of[n]. What
// a position is need be known only where one begins.
struct IntervalRuns {
  int count = 0, from[kLanes], of[kLanes];

  void find(const PickedSlots& t, int first, int lanes) {
    const int32_t* slots = t.slots + first;
    count = 0;
    for (int i = 0; i < lanes;) {
      if (slots[i] >= end_) {
        interval_ = t.body.interval_of(t.body.positions[slots[i]]);
        end_ = interval_end(t.body, slots[i], t.slots[t.listed - 1] + 1);
      }
      from[count] = i, of[count++] = interval_;
      if (slots[lanes - 1] < end_) return;
      for (++i; i < lanes && slots[i] < end_;) ++i;
    }
  }

 private:
  int interval_ = 0, end_ = 0;  // of the tokens looked at last
};

// Asks for the first keys or values of a list; the sooner before they are read, the better. Inlined for the reason given at
// PackedBody::fetch_key.
__attribute__((always_inline)) inline void fetch_first(const PackedBody& b, const int32_t* slots, int listed, bool keys) {
  for (int i = 0; i < listed && i < kTile; ++i) keys ? b.fetch_key(slots[i]) : b.fetch_value(slots[i]);
}

}  // namespace
