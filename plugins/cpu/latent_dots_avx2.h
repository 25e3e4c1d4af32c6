// latent_dots_any.h for AVX2. Two products of a code up to 15 and a level up to 127, eight times, fit 16 bits.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "cpu/latent_records.h"

namespace {

constexpr int kTokensAtOnce = 2, kColumnsAtOnce = 2;

template <int N, int B>
inline void latent_dots(const uint8_t* const* codes, const int8_t* levels, int stride, int quads, Vec (*out)[B]) {
  __m256i sum[N][2 * B];
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < 2 * B; ++b) sum[n][b] = _mm256_setzero_si256();
  for (int j = 0; j < quads; ++j, levels += int64_t(stride) * 4) {
    __m256i four[N];
    for (int n = 0; n < N; ++n) {
      int32_t bytes;
      std::memcpy(&bytes, codes[n] + 4 * j, 4);
      four[n] = _mm256_set1_epi32(bytes);
    }
    for (int b = 0; b < 2 * B; ++b) {
      const __m256i level = _mm256_load_si256(reinterpret_cast<const __m256i*>(levels + 32 * b));
      for (int n = 0; n < N; ++n) sum[n][b] = _mm256_add_epi16(sum[n][b], _mm256_maddubs_epi16(four[n], level));
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) {
      const __m256 low = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[n][2 * b], ones)), high = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[n][2 * b + 1], ones));
      out[n][b] = Vec{low, high};
    }
}

#define EDGEKV_TARGET
#include "cpu/latent_columns.h"
#undef EDGEKV_TARGET

template <int N, int B>
inline void rebuild_columns_of(const QuantisedLatents& x, int column, float* const* out) { rebuild_columns<N, B>(x, column, out); }

}  // namespace
