// Tokens picked here and there from a compressed body: where they lie. What is read of them is up to picked.h or picked_avx2.h.
#pragma once
#include "cpu/packed_body.h"

namespace {

constexpr int kRecordsAhead = 40;  // tokens: their records wait in the first cache

struct PickedSlots {
  const PackedBody& body;
  const int32_t* slots;
  int count, listed;  // tokens in this tile of up to kTile, and in this and those that follow it

  const uint8_t* record(int i) const { return body.payload + int64_t(slots[i]) * int64_t(body.record.bytes); }

  // The interval of each token, [count].
  void find_intervals(int32_t* interval) const {
    IntervalCursor cursor;
    for (int i = 0; i < count; i += kLanes) {
      const int end = i + kLanes < count ? i + kLanes : count;
      const int of_first = cursor.at(body, slots[i]);
      // Positions ascend with slots.
      if (cursor.holds(body, slots[end - 1]))
        for (int j = i; j < end; ++j) interval[j] = of_first;
      else
        for (int j = i; j < end; ++j) interval[j] = cursor.at(body, slots[j]);
    }
  }

  // Asks for the record of a token that comes soon after token i. Tokens are picked here and there, where no processor foresees them.
  __attribute__((always_inline)) void fetch_record(int i) const {
    if (i + kRecordsAhead < listed) body.fetch(slots[i + kRecordsAhead]);
  }

  // The same, and for the codes of its block and the positions that will be looked at.
  __attribute__((always_inline)) void fetch_next(int i) const {
    if (i + kRecordsAhead >= listed) return;
    fetch_record(i);
    const int slot = slots[i + kRecordsAhead];
    if (slot / EDGEKV_INDEX_TOKENS != slots[i + kRecordsAhead - 1] / EDGEKV_INDEX_TOKENS) body.fetch_codes(slot);
    if (i % kLanes == 0 || i % kLanes == kLanes - 1) __builtin_prefetch(body.positions + slot, 0, 2);
  }
};

// Asks for the records of a list's first tile; the sooner before it is read, the better. Inlined for the reason given at
// PackedBody::fetch.
__attribute__((always_inline)) inline void fetch_first(const PackedBody& b, const int32_t* slots, int listed) {
  for (int i = 0; i < listed && i < kTile; ++i) b.fetch(slots[i]);
}

}  // namespace
