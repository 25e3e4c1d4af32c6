// Products of quantised latents with a decoder's levels, which are whole numbers: what every instruction set computes. Here as it is defined.
#pragma once
#include <cstdint>

#include "cpu/latent_records.h"

namespace {

constexpr int kTokensAtOnce = 1, kColumnsAtOnce = 1;  // tokens, and times 16 columns, that share what is loaded

// out[n][b] = sum over the codes of `quads` times four latents of codes [n] times their levels, for columns 16 b .. 16 b + 15: levels
// [quads][stride][4] from the first of these columns on.
template <int N, int B>
inline void latent_dots(const uint8_t* const* codes, const int8_t* levels, int stride, int quads, Vec (*out)[B]) {
  for (int n = 0; n < N; ++n) {
    for (int b = 0; b < B; ++b) {
      int32_t sum[16] = {};
      for (int j = 0; j < 4 * quads; ++j)
        for (int i = 0; i < 16; ++i) sum[i] += codes[n][j] * levels[(int64_t(j / 4) * stride + 16 * b + i) * 4 + j % 4];
      float numbers[16];
      for (int i = 0; i < 16; ++i) numbers[i] = float(sum[i]);
      out[n][b] = load(numbers);
    }
  }
}

#define EDGEKV_TARGET
#include "cpu/latent_columns.h"
#undef EDGEKV_TARGET

template <int N, int B>
inline void rebuild_columns_of(const QuantisedLatents& x, int column, float* const* out) { rebuild_columns<N, B>(x, column, out); }

}  // namespace
