// Numbers out of one record at a time, on the vector operations that every instruction set has. A record_*.h may hand the 32 numbers of a
// group over in an order of its own: `place` says which, and sums are brought out of it.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/packed_body.h"

namespace {

constexpr bool kSumsInRegisters = false;  // whether values are best added up as they are unpacked

// Where number n of a group of 32 codes of kBits bits is handed over.
template <int kBits>
constexpr int place(int n) {
  return n;
}

// The signs of `count` tokens, from blocks of 32 tokens of the index plane, [groups][16] codes each, to rows of row_bytes,
// (groups + 7) / 8 * 4: bit d of a row is 1 where number d is positive.
inline void gather_signs(const uint8_t* index, int groups, const int32_t* slots, int count, uint8_t* rows, int row_bytes) {
  for (int i = 0; i < count; ++i, rows += row_bytes) {
    const uint8_t* codes = index + int64_t(slots[i] / 32) * 16 * groups + slots[i] % 16;
    const int shift = slots[i] % 32 / 16 * 4;
    for (int first = 0; first < groups; first += 8) {
      uint32_t bits = 0;
      for (int g = first; g < first + 8 && g < groups; ++g) bits |= uint32_t(codes[16 * g] >> shift & 15) << 4 * (g - first);
      std::memcpy(rows + first / 2, &bits, 4);
    }
  }
}

// Pairs of a record from one on: `groups` of them or a whole vector. What is read behind the last is the next record or the next plane, but little
// of it: that may be in a line of memory that nobody has asked for.
inline Vec pairs_of_record(const uint16_t* pairs, int groups) { return groups >= kLanes / 2 ? load(pairs) : load_first(pairs, 2 * groups); }

// A group of a value: codes with zero point and scale pair[0], pair[1].
template <int kBits>
inline void value_group(const uint8_t* codes, const float* pair, Vec out[2]) {
  numbers_of<kBits>(codes, splat(pair[0]), splat(pair[1]), out);
}

}  // namespace
