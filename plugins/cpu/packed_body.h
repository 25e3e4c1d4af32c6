// Reading the compressed body of one kv head: signs from the index plane, magnitudes and values from the records.
#pragma once
#include <cstring>

#include "cpu/kernels.h"

namespace {

using edgekv::kTile;

constexpr int kLanes = EDGEKV_LANES;
constexpr float kNothing = -__builtin_inff();  // the score of what is not attended to

struct PackedBody {
  const int32_t* positions;
  const uint8_t *index, *payload;
  const uint16_t* mean;
  edgekv::RecordLayout record;
  int key_dim, value_dim, key_bits, value_bits, interval, intervals;  // the last: boundaries so far, each with a mean key

  PackedBody(const edgekv::LayerParams& p, const edgekv::StateView& s, int head, int64_t tail_base)
      : positions(s.body_pos + int64_t(head) * p.body_slots),
        index(s.index + int64_t(head) * (p.body_slots / EDGEKV_INDEX_TOKENS) * (p.key_dim / 4) * 16),
        payload(s.payload + int64_t(head) * p.body_slots * int64_t(edgekv::record_layout(p).bytes)),
        mean(s.mean + int64_t(head) * p.intervals * p.key_dim),
        record(edgekv::record_layout(p)),
        key_dim(p.key_dim),
        value_dim(p.value_dim),
        key_bits(p.key_bits),
        value_bits(p.value_bits),
        interval(p.tail_slots),
        intervals(int(tail_base / p.tail_slots)) {}

  int key_groups() const { return (key_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP; }
  int value_groups() const { return (value_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP; }
  // Bytes of one token's magnitudes and values, with their pairs, and of its sign codes.
  uint64_t key_bytes() const { return uint64_t(4) * (key_bits + 1) * key_groups(); }
  uint64_t value_bytes() const { return uint64_t(4) * (value_bits + 1) * value_groups(); }
  uint64_t sign_bytes() const { return uint64_t(key_dim / 4 + 1) / 2; }
  // Codes of the 32 tokens from `slot`, a multiple of 32.
  const uint8_t* codes(int slot) const { return index + int64_t(slot) / EDGEKV_INDEX_TOKENS * (key_dim / 4) * 16; }
  // Ask for the key or the value of a record that is needed soon: records are picked here and there, where no processor foresees them.
  // Always inlined, or GCC takes a call that only prefetches for one without effect.
  __attribute__((always_inline)) void fetch_key(int slot) const {
    fetch_part(slot, 0, record.values);
    fetch_part(slot, record.key_pairs, record.value_pairs);
  }
  __attribute__((always_inline)) void fetch_value_codes(int slot) const { fetch_part(slot, record.values, record.key_pairs); }
  __attribute__((always_inline)) void fetch_value_pairs(int slot) const { fetch_part(slot, record.value_pairs, record.bytes); }
  __attribute__((always_inline)) void fetch_value(int slot) const {
    fetch_value_codes(slot);
    fetch_value_pairs(slot);
  }
  // Asks for the codes of a slot's block.
  __attribute__((always_inline)) void fetch_codes(int slot) const {
    const uint8_t* at = codes(slot);
    for (int i = 0; i < 4 * key_dim; i += 64) __builtin_prefetch(at + i, 0, 2);
  }
  // Bytes [from, to) of a record, which lie in two lines at most but for values of 8 bits. Into the second cache: a processor waits for few lines of
  // memory in front of its first one, and there they would keep the codes waiting that lie in the second.
  __attribute__((always_inline)) void fetch_part(int slot, size_t from, size_t to) const {
    const uint8_t* at = payload + int64_t(slot) * int64_t(record.bytes);
    if (to - from > 16) __builtin_prefetch(at + from, 0, 2);
    __builtin_prefetch(at + to - 1, 0, 2);
  }
  // Which mean key a position's token was coded against; in range whatever a damaged state holds.
  int interval_of(int32_t position) const {
    const int i = position / interval;
    return position < 0 ? 0 : i < intervals ? i : intervals - 1;
  }
};

// The interval of one token after the other: a division only where it changes.
struct IntervalCursor {
  int64_t from = 0, to = 0;
  int interval = 0;

  bool holds(const PackedBody& b, int slot) const { return b.positions[slot] >= from && b.positions[slot] < to; }
  int at(const PackedBody& b, int slot) {
    if (!holds(b, slot)) {
      interval = b.interval_of(b.positions[slot]);
      from = int64_t(interval) * b.interval, to = from + b.interval;
    }
    return interval;
  }
};

// Behind the last of the slots [slot, end) whose token is of the interval of the one at `slot`. Positions ascend with slots and no two
// are the same, so few of them need to be read: where no token was evicted, the interval ends exactly as many slots on as positions.
inline int interval_end(const PackedBody& b, int slot, int end) {
  const int64_t next = (int64_t(b.interval_of(b.positions[slot])) + 1) * b.interval, most = slot + next - b.positions[slot];
  int low = slot + 1, high = most < end ? int(most > low ? most : low) : end;
  if (b.positions[high - 1] < next) return high;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (b.positions[middle] < next)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// The signs of 32 tokens, token by token: bit d of row(slot) is 1 where number d is positive. A block of the index plane holds them
// the other way round, and is turned once for all tokens wanted from it.
struct BlockSigns {
  using Bytes = uint8_t __attribute__((vector_size(16), aligned(16)));
  int block = -1;
  uint8_t rows[32][128 + 16] __attribute__((aligned(16)));

  // Slots must come in an order that visits a block once to be fast.
  const uint8_t* row(const PackedBody& b, int slot) {
    if (slot / EDGEKV_INDEX_TOKENS != block) {
      block = slot / EDGEKV_INDEX_TOKENS;
      for (int first = 0; first < b.key_dim / 4; first += 32) turn(b.codes(slot), first, b.key_dim / 4);
    }
    return rows[slot % EDGEKV_INDEX_TOKENS];
  }

 private:
  static Bytes low_halves(Bytes x, Bytes y) {
    return __builtin_shuffle(x, y, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  }
  static Bytes high_halves(Bytes x, Bytes y) {
    return __builtin_shuffle(x, y, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
  }

  // Groups first .. first + 31: two make a byte of each token, sixteen such bytes are turned by interleaving four times.
  void turn(const uint8_t* codes, int first, int groups) {
    Bytes x[2][16], y[16];
    for (int i = 0; i < 16; ++i) {
      Bytes one = {}, two = {};
      const int g = first + 2 * i;
      if (g < groups) std::memcpy(&one, codes + 16 * g, 16);
      if (g + 1 < groups) std::memcpy(&two, codes + 16 * (g + 1), 16);
      x[0][i] = (one & 15) | (two << 4);
      x[1][i] = (one >> 4) | (two & 0xf0);
    }
    for (int half = 0; half < 2; ++half) {
      Bytes *from = x[half], *to = y;
      for (int stage = 0; stage < 4; ++stage) {
        for (int i = 0; i < 8; ++i) {
          to[2 * i] = low_halves(from[i], from[i + 8]);
          to[2 * i + 1] = high_halves(from[i], from[i + 8]);
        }
        Bytes* swapped = from;
        from = to, to = swapped;
      }
      for (int i = 0; i < 16; ++i) std::memcpy(rows[16 * half + i] + first / 2, &from[i], 16);
    }
  }
};

// The 32 codes of a group, of kBits each, as zero_point + scale * code.
template <int kBits>
inline void numbers_of(const uint8_t* codes, Vec zero_point, Vec scale, Vec out[2]) {
  if constexpr (kBits == 2) {
    levels(codes, zero_point, scale, out);
  } else {
    unpack<kBits>(codes, out);
    for (int half = 0; half < 2; ++half) out[half] = fma(out[half], scale, zero_point);
  }
}

template <int kBits>
inline void unpack_key_bits(const PackedBody& b, const uint8_t* record, const uint8_t* positive, float* out) {
  const uint16_t* pairs = reinterpret_cast<const uint16_t*>(record + b.record.key_pairs);
  const int groups = b.key_groups();
  float pair[16];
  for (int g = 0; g < groups; ++g) {
    // Eight pairs at a time; what is read behind the last of a record is the next record or the next plane.
    if (g % 8 == 0) store(pair, load(pairs + 2 * g));
    const Vec zero_point = splat(pair[g % 8 * 2]), scale = splat(pair[g % 8 * 2 + 1]);
    Vec level[2];
    numbers_of<kBits>(record + 4 * kBits * g, zero_point, scale, level);
    uint32_t bits;
    std::memcpy(&bits, positive + 4 * g, 4);
    store(out + 32 * g, with_signs(level[0], bits & 0xffff));
    store(out + 32 * g + 16, with_signs(level[1], bits >> 16));
  }
}

// One token's key without its mean, still transformed: [key_groups * 32] numbers, those from key_dim on without meaning.
inline void unpack_key(const PackedBody& b, BlockSigns& signs, int slot, float* out) {
  const uint8_t *record = b.payload + int64_t(slot) * int64_t(b.record.bytes), *positive = signs.row(b, slot);
  b.key_bits == 2 ? unpack_key_bits<2>(b, record, positive, out) : unpack_key_bits<4>(b, record, positive, out);
}

template <int kBits>
inline void unpack_value_bits(const PackedBody& b, const uint8_t* record, float* out) {
  const uint16_t* pairs = reinterpret_cast<const uint16_t*>(record + b.record.value_pairs);
  const int groups = b.value_groups();
  float pair[16];
  for (int g = 0; g < groups; ++g) {
    if (g % 8 == 0) store(pair, load(pairs + 2 * g));
    const Vec zero_point = splat(pair[g % 8 * 2]), scale = splat(pair[g % 8 * 2 + 1]);
    Vec level[2];
    numbers_of<kBits>(record + b.record.values + 4 * kBits * g, zero_point, scale, level);
    for (int half = 0; half < 2; ++half) store(out + 32 * g + 16 * half, level[half]);
  }
}

// One token's value, still transformed: [value_groups * 32] numbers, those from value_dim on without meaning.
inline void unpack_value(const PackedBody& b, int slot, float* out) {
  const uint8_t* record = b.payload + int64_t(slot) * int64_t(b.record.bytes);
  if (b.value_bits == 2) return unpack_value_bits<2>(b, record, out);
  if (b.value_bits == 4) return unpack_value_bits<4>(b, record, out);
  unpack_value_bits<8>(b, record, out);
}

// Sum of products of dim numbers, in an order that every instruction set keeps: lanes first, then their sum.
inline float dot_in_order(const float* a, const float* b, int dim) {
  Vec sum = zero();
  int i = 0;
  for (; i + 16 <= dim; i += 16) sum = add(sum, mul(load(a + i), load(b + i)));
  if (i < dim) sum = add(sum, mul(load_first(a + i, dim - i), load_first(b + i, dim - i)));
  return sum_lanes(sum);
}

}  // namespace
