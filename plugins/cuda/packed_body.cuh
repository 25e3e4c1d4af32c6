// Reading the compressed body of one kv head: signs from the index plane, magnitudes and values from the records.
#pragma once
#include "hadamard.cuh"
#include "rows.cuh"
#include "tile.cuh"

namespace edgekv {
namespace cuda {

constexpr int kWindow = 1024;  // body slots whose chosen ones are listed at a time: a word of 32 bits for each lane of a warp

// Words of one bit per body slot, of one row and kv head.
EDGEKV_HOST_DEVICE int slot_words(const LayerParams& p) { return p.body_slots / 32; }

struct PackedBody {
  const int32_t* positions;
  const unsigned char *index, *payload;
  const __half* mean;
  RecordLayout record;
  int key_dim, value_dim, key_bits, value_bits;
  int interval, intervals;  // tokens per boundary interval; intervals so far, each with a mean key
};

EDGEKV_DEVICE PackedBody packed_body(const Layer& l, int head, int tail_base) {
  const LayerParams& p = l.p;
  return {plane<int32_t>(l, l.at.body_pos) + size_t(head) * p.body_slots,
          plane<unsigned char>(l, l.at.index) + size_t(head) * (p.body_slots / EDGEKV_INDEX_TOKENS) * (p.key_dim / 4) * 16,
          plane<unsigned char>(l, l.at.payload) + size_t(head) * p.body_slots * l.record.bytes,
          plane<__half>(l, l.at.mean) + size_t(head) * p.intervals * p.key_dim,
          l.record, p.key_dim, p.value_dim, p.key_bits, p.value_bits, p.tail_slots, tail_base / p.tail_slots};
}

// Which mean key a position's token was coded against; in range whatever a damaged state holds.
EDGEKV_DEVICE int interval_of(const PackedBody& b, int position) {
  const int i = position / b.interval;
  return position < 0 ? 0 : i < b.intervals ? i : b.intervals - 1;
}

EDGEKV_DEVICE unsigned sign_code(const PackedBody& b, int slot, int group) {
  const unsigned char byte = b.index[(size_t(slot / EDGEKV_INDEX_TOKENS) * (b.key_dim / 4) + group) * 16 + slot % 16];
  return slot % EDGEKV_INDEX_TOKENS >= 16 ? byte >> 4 : byte & 15u;
}

// Bytes of a token's magnitudes with their pairs.
EDGEKV_HOST_DEVICE unsigned long long key_bytes(const LayerParams& p) {
  return 4ull * (p.key_bits + 1) * ((p.key_dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP);
}

// Codes and signs of numbers 8 i + 4 part + c (i, c = 0..3) of a group of 32 of a token's key, part 0 or 1: byte c of codes[i], and bit c of
// positive[i]. Those from key_dim on have no meaning.
EDGEKV_DEVICE void key_codes(const PackedBody& b, int slot, int group, int part, unsigned (&codes)[4], unsigned (&positive)[4]) {
  const unsigned* words = reinterpret_cast<const unsigned*>(b.payload + size_t(slot) * b.record.bytes + 4 * b.key_bits * group) + part;
  const bool wide = b.key_bits == 4;  // then a word has numbers 4 part + c and 16 + 4 part + c, the next but one those 8 above
  const unsigned first = words[0], second = wide ? words[2] : first >> 2, mask = wide ? 0x0f0f0f0fu : 0x03030303u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int signs = 8 * group + 2 * i + part;  // their code
    codes[i] = (i % 2 ? second : first) >> i / 2 * 4 & mask;
    positive[i] = signs < b.key_dim / 4 ? sign_code(b, slot, signs) : 0u;
  }
}

// Zero point and scale of a group of a token's key.
EDGEKV_DEVICE float2 key_pair(const PackedBody& b, int slot, int group) {
  return load_pair(reinterpret_cast<const __half*>(b.payload + size_t(slot) * b.record.bytes + b.record.key_pairs + 4 * group));
}

// The same numbers without the token's mean key, still transformed: out[4 i + c].
EDGEKV_DEVICE void unpack_key(const PackedBody& b, int slot, int group, int part, float (&out)[16]) {
  unsigned codes[4], positive[4];
  key_codes(b, slot, group, part, codes, positive);
  const float2 pair = key_pair(b, slot, group);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float x = fmaf(pair.y, float(codes[i] >> 8 * c & 255u), pair.x);
      out[4 * i + c] = positive[i] >> c & 1u ? x : -x;
    }
}

// Dimensions [first, first + width) of the listed tokens' keys into a stage (tile.cuh), without their means, still transformed.
EDGEKV_DEVICE void unpack_keys(float* stage, const PackedBody& b, const int* list, int tokens, int first, int width) {
  for (int item = int(threadIdx.x); item < kTile * kTileDims / 16; item += kThreads) {
    const int token = item % kTile, part = item / kTile, word = part % 2;
    if (token >= tokens || part / 2 * EDGEKV_GROUP >= width) continue;
    float x[16];
    unpack_key(b, list[token], first / EDGEKV_GROUP + part / 2, word, x);
    float* to = stage + token / EDGEKV_LANES * kKeyBlock + token % EDGEKV_LANES;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int d = part / 2 * EDGEKV_GROUP + i / 4 * 8 + word * 4 + i % 4;
      if (d < width) to[d * EDGEKV_LANES] = x[i];
    }
  }
}

// The same for values.
EDGEKV_DEVICE void unpack_values(float* stage, const PackedBody& b, const int* list, int tokens, int first, int width) {
  const int bits = b.value_bits, words = kTileDims / EDGEKV_GROUP * bits;  // per token
  for (int item = int(threadIdx.x); item < tokens * words; item += kThreads) {
    const int token = item / words, part = item % words / bits, word = item % bits, group = first / EDGEKV_GROUP + part;
    if (part * EDGEKV_GROUP >= width) continue;
    const unsigned char* record = b.payload + size_t(list[token]) * b.record.bytes;
    const unsigned levels = *reinterpret_cast<const unsigned*>(record + b.record.values + 4 * bits * group + 4 * word);
    const float2 pair = load_pair(reinterpret_cast<const __half*>(record + b.record.value_pairs + 4 * group));
    for (int i = 0; i < 8 / bits; ++i)
      for (int c = 0; c < 4; ++c) {
        const int d = part * EDGEKV_GROUP + 4 * bits * i + 4 * word + c;
        if (d < width) stage[token * kTileDims + d] = fmaf(pair.y, float(levels >> (8 * c + bits * i) & ((1u << bits) - 1u)), pair.x);
      }
  }
}

// Bits of the slots first .. first + 31 that lie in [from, to).
EDGEKV_DEVICE unsigned range_bits(int first, int from, int to) {
  const int low = from > first ? from - first : 0, high = to - first < 32 ? to - first : 32;
  if (low >= high) return 0u;
  return (high == 32 ? 0xffffffffu : (1u << high) - 1u) & ~((1u << low) - 1u);
}

// Lists the slots whose bits are set, ascending: each lane gives the word of the 32 slots from `first` on. Returns how many there are,
// in every lane. list null: only counts.
EDGEKV_DEVICE int list_slots(unsigned word, int first, int* list, int lane) {
  const int own = __popc(word);
  int before = own;
  for (int k = 1; k < 32; k *= 2) {
    const int other = __shfl_sync(kFullWarp, before, lane - k);
    if (lane >= k) before += other;
  }
  const int all = __shfl_sync(kFullWarp, before, 31);
  if (list)
    for (int at = before - own; word; word &= word - 1) list[at++] = first + __ffs(int(word)) - 1;
  return all;
}

}  // namespace cuda
}  // namespace edgekv
