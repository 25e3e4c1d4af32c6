// Tokens picked here and there from a compressed body: their weighted values. What picked.h does, for sixteen registers of eight numbers:
// codes are copied next to each other and levels looked up beforehand, so that the loops have nothing but unpacking and products. Four query
// heads meet a part of 16 numbers of a value in eight sums.
#pragma once
#include <cstring>

#include "cpu/attend_tile.h"
#include "cpu/picked_slots.h"

namespace {

using edgekv::picked_floats;

constexpr int kHeadsAtOnce = 4;

// What is kept of a group of 32 codes of `bits` bits: 16 bytes of levels, which are the four levels of codes of 2 bits, else the zero point
// and the scale, and then the codes.
inline int entry_bytes(int bits) { return 16 + 4 * bits; }

// Writes the entries of `groups` groups of one token, `stride` bytes apart.
template <int kBits>
inline void write_entries(const uint8_t* codes, const uint8_t* pairs, int groups, uint8_t* out, int64_t stride) {
  for (int g = 0; g < groups; g += 4) {
    // What is read behind the last pair of a record is the next record or the next plane; no more of it than need be, as it may be in a line of memory
    // that nobody has asked for.
    const __m128i* from = reinterpret_cast<const __m128i*>(pairs + 4 * g);
    const __m256 pair = _mm256_cvtph_ps(groups - g <= 2 ? _mm_loadl_epi64(from) : _mm_loadu_si128(from));
    __m256 even, odd;
    if constexpr (kBits == 2) {
      const __m256 code = _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3);
      even = _mm256_fmadd_ps(code, _mm256_permute_ps(pair, 0x55), _mm256_permute_ps(pair, 0x00));
      odd = _mm256_fmadd_ps(code, _mm256_permute_ps(pair, 0xFF), _mm256_permute_ps(pair, 0xAA));
    } else {
      even = _mm256_permute_ps(pair, 0x44), odd = _mm256_permute_ps(pair, 0xEE);
    }
    auto write = [&](__m128 levels) __attribute__((always_inline)) {
      _mm_storeu_ps(reinterpret_cast<float*>(out), levels);
      std::memcpy(out + 16, codes, 4 * kBits);
      out += stride, codes += 4 * kBits;
    };
    write(_mm256_castps256_ps128(even));
    if (g + 1 < groups) write(_mm256_castps256_ps128(odd));
    if (g + 2 < groups) write(_mm256_extractf128_ps(even, 1));
    if (g + 3 < groups) write(_mm256_extractf128_ps(odd, 1));
  }
}

inline void write(int bits, const uint8_t* codes, const uint8_t* pairs, int groups, uint8_t* out, int64_t stride) {
  if (bits == 2) return write_entries<2>(codes, pairs, groups, out, stride);
  if (bits == 4) return write_entries<4>(codes, pairs, groups, out, stride);
  write_entries<8>(codes, pairs, groups, out, stride);
}

// What is kept of the values of up to kTile tokens, in `memory`, which has picked_floats(): [value groups][kTile] entries.
struct Picked : PickedSlots {
  int value_entry;  // bytes
  uint8_t* values;

  Picked(const PickedSlots& t, float* memory) : PickedSlots(t), value_entry(entry_bytes(body.value_bits)), values(reinterpret_cast<uint8_t*>(memory)) {
    for (int i = 0; i < count; ++i) {
      fetch_value(i);
      const uint8_t* from = record(i);
      write(body.value_bits, from + body.record.values, from + body.record.value_pairs, body.value_groups(), values + i * value_entry, int64_t(kTile) * value_entry);
    }
  }
};

// The 32 numbers of an entry, eight at a time.
template <int kBits>
struct Entry {
  const uint8_t* codes;
  __m256i first;
  __m256 levels, scale;

  explicit Entry(const uint8_t* at) : codes(at + 16) {
    const float* four = reinterpret_cast<const float*>(at);
    if constexpr (kBits == 2) {
      first = bytes(0);
      levels = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(four));
    } else {
      levels = _mm256_broadcast_ss(four);
      scale = _mm256_broadcast_ss(four + 1);
    }
  }

  // Numbers 8n .. 8n + 7. The low two bits of a code of 2 choose one of four levels: nothing need be masked.
  __m256 eight(int n) const {
    if constexpr (kBits == 2) return _mm256_permutevar_ps(levels, n == 0 ? first : _mm256_srli_epi32(first, 2 * n));
    __m256i code = bytes(kBits == 4 ? n % 2 : n);
    if constexpr (kBits == 4) code = n < 2 ? _mm256_and_si256(code, _mm256_set1_epi32(15)) : _mm256_srli_epi32(code, 4);
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), scale, levels);
  }

 private:
  __m256i bytes(int n) const { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * n))); }
};

inline void order_values(int, const float* in, int dim, float* out) { std::memcpy(out, in, size_t(dim) * sizeof(float)); }

// Adds the weighted values of picked tokens to sums [R][stride], weights [R][kTile], 16 numbers of all tokens after the other.
template <int R, int kBits>
inline void add_heads(const Picked& t, const float* weights, float* sums, int64_t stride) {
  for (int part = 0; part < 2 * t.body.value_groups(); ++part) {
    const int g = part / 2, half = part % 2;
    float* to = sums + 16 * part;
    __m256 sum[R][2];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < 2; ++n) sum[r][n] = _mm256_loadu_ps(to + r * stride + 8 * n);
    auto add = [&](int half) __attribute__((always_inline)) {
      const uint8_t* entry = t.values + int64_t(g) * kTile * t.value_entry;
      for (int i = 0; i < t.count; ++i, entry += t.value_entry) {
        const Entry<kBits> value(entry);
        const __m256 x[2] = {value.eight(2 * half), value.eight(2 * half + 1)};
        for (int r = 0; r < R; ++r) {
          const __m256 w = _mm256_broadcast_ss(weights + r * kTile + i);
          for (int n = 0; n < 2; ++n) sum[r][n] = _mm256_fmadd_ps(x[n], w, sum[r][n]);
        }
      }
    };
    half == 0 ? add(0) : add(1);
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < 2; ++n) _mm256_storeu_ps(to + r * stride + 8 * n, sum[r][n]);
  }
}

template <int R>
inline void add_bits(const Picked& t, const float* weights, float* sums, int64_t stride) {
  switch (t.body.value_bits) {
    case 2: return add_heads<R, 2>(t, weights, sums, stride);
    case 4: return add_heads<R, 4>(t, weights, sums, stride);
    default: return add_heads<R, 8>(t, weights, sums, stride);
  }
}

inline void add_values_of(const Picked& t, int rows, const float* weights, float* sums, int64_t stride, float*) {
  for (int r = 0; r < rows; r += kHeadsAtOnce) {
    const float* w = weights + r * kTile;
    float* to = sums + r * stride;
    switch (rows - r) {
      case 1: add_bits<1>(t, w, to, stride); break;
      case 2: add_bits<2>(t, w, to, stride); break;
      case 3: add_bits<3>(t, w, to, stride); break;
      default: add_bits<4>(t, w, to, stride);
    }
  }
}

}  // namespace
