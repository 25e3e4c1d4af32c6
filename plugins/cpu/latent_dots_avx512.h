// latent_dots_any.h for AVX-512: with the instructions for products of bytes (VNNI) where the processor has them, which add four products to
// 32 bits at once; else as for AVX2.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "cpu/latent_records.h"

namespace {

constexpr int kTokensAtOnce = 2, kColumnsAtOnce = 4;

inline __m512i same_codes(const uint8_t* codes) {
  int32_t bytes;
  std::memcpy(&bytes, codes, 4);
  return _mm512_set1_epi32(bytes);
}

namespace pairs_of_bytes {

template <int N, int B>
inline void latent_dots(const uint8_t* const* codes, const int8_t* levels, int stride, int quads, Vec (*out)[B]) {
  __m512i sum[N][B];
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) sum[n][b] = _mm512_setzero_si512();
  for (int j = 0; j < quads; ++j, levels += int64_t(stride) * 4) {
    __m512i four[N];
    for (int n = 0; n < N; ++n) four[n] = same_codes(codes[n] + 4 * j);
    for (int b = 0; b < B; ++b) {
      const __m512i level = _mm512_load_si512(levels + 64 * b);
      for (int n = 0; n < N; ++n) sum[n][b] = _mm512_add_epi16(sum[n][b], _mm512_maddubs_epi16(four[n], level));
    }
  }
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) out[n][b] = {_mm512_cvtepi32_ps(_mm512_madd_epi16(sum[n][b], _mm512_set1_epi16(1)))};
}

#define EDGEKV_TARGET
#include "cpu/latent_columns.h"
#undef EDGEKV_TARGET

}  // namespace pairs_of_bytes

namespace fours_of_bytes {

#define EDGEKV_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")))

template <int N, int B>
EDGEKV_TARGET inline void latent_dots(const uint8_t* const* codes, const int8_t* levels, int stride, int quads, Vec (*out)[B]) {
  __m512i sum[N][B];
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) sum[n][b] = _mm512_setzero_si512();
  for (int j = 0; j < quads; ++j, levels += int64_t(stride) * 4) {
    __m512i four[N];
    for (int n = 0; n < N; ++n) four[n] = same_codes(codes[n] + 4 * j);
    for (int b = 0; b < B; ++b) {
      const __m512i level = _mm512_load_si512(levels + 64 * b);
      for (int n = 0; n < N; ++n) sum[n][b] = _mm512_dpbusd_epi32(sum[n][b], four[n], level);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) out[n][b].v = _mm512_cvtepi32_ps(sum[n][b]);
}

#include "cpu/latent_columns.h"
#undef EDGEKV_TARGET

}  // namespace fours_of_bytes

template <int N, int B>
inline void rebuild_columns_of(const QuantisedLatents& x, int column, float* const* out) {
  static const bool fours = __builtin_cpu_supports("avx512vnni");
  fours ? fours_of_bytes::rebuild_columns<N, B>(x, column, out) : pairs_of_bytes::rebuild_columns<N, B>(x, column, out);
}

}  // namespace
