// Latents of a compressed cache, made of sixteen tokens at a time when the last of them has come: their rotated keys are read from the tail,
// turned back, and meet the encoder together. One token at a time would read the encoder for each.
//
// The sum of a number adds the products in order, so a token's latent has the same bits however its text was cut into steps.
#pragma once
#include "cpu/attend_latent.h"

namespace {

// Numbers j .. j + N - 1 of 16 tokens: given [all][16], encode [all][latent], z [latent][16].
template <int N>
inline void encode_numbers(const float* given, const float* encode, int all, int latent, int j, float* z) {
  Vec sum[N];
  for (int n = 0; n < N; ++n) sum[n] = zero();
  for (int i = 0; i < all; ++i) {
    const Vec x = load(given + int64_t(i) * kLanes);
    const float* row = encode + int64_t(i) * latent + j;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[n] = fma(x, splat(row[n]), sum[n]);
  }
  for (int n = 0; n < N; ++n) store(z + int64_t(j + n) * kLanes, sum[n]);
}

template <class E>
inline void read_run(const Step& s, int run, const float* cos, const float* sin, float* given) {
  const auto& p = s.params;
  const int dim = p.key_dim, half = p.rotary_dim / 2;
  for (int head = 0; head < p.kv_heads; ++head, given += int64_t(dim) * kLanes) {
    const E* key = reinterpret_cast<const E*>(s.state.tail_k) + (int64_t(head) * p.tail_slots + run * kLanes) * dim;
    const float* mean = s.latent.decode + (int64_t(head + 1) * (p.latent + 1) - 1) * dim;
    auto put = [&](int d, Vec x) { store(given + d * kLanes, sub(x, splat(mean[d]))); };
    for (int i = 0; i < half; ++i) {
      const int first = p.rotary_interleaved ? 2 * i : i, second = p.rotary_interleaved ? 2 * i + 1 : i + half;
      const Vec a = load(key + first * kLanes), b = load(key + second * kLanes), c = load(cos + i * kLanes), turn = load(sin + i * kLanes);
      put(first, add(mul(a, c), mul(b, turn)));
      put(second, sub(mul(b, c), mul(a, turn)));
    }
    for (int d = p.rotary_dim; d < dim; ++d) put(d, load(key + d * kLanes));
  }
}

void encode_run(const Step& s, int run, float* z, float* work) {
  const auto& p = s.params;
  const int all = p.kv_heads * p.key_dim, latent = p.latent, half = p.rotary_dim / 2;
  float *given = work, *numbers = given + int64_t(all) * kLanes, *cos = numbers + int64_t(latent + kLanes) * kLanes, *sin = cos + half * kLanes;
  int32_t positions[kLanes];
  for (int i = 0; i < kLanes; ++i) positions[i] = int32_t(s.position - s.first_tail + run * kLanes + i);
  if (half > 0) turns_of(*s.latent.rotations, positions, kLanes, cos, sin);
  p.element == edgekv::kFloat16 ? read_run<uint16_t>(s, run, cos, sin, given) : read_run<float>(s, run, cos, sin, given);
  constexpr int kAtOnce = kAccumulators >= 16 ? 16 : 4;
  int j = 0;
  for (; j + kAtOnce <= latent; j += kAtOnce) encode_numbers<kAtOnce>(given, s.latent.encode, all, latent, j, numbers);
  for (; j + 4 <= latent; j += 4) encode_numbers<4>(given, s.latent.encode, all, latent, j, numbers);
  for (; j < latent; ++j) encode_numbers<1>(given, s.latent.encode, all, latent, j, numbers);
  for (int first = 0; first < latent; first += kLanes) {
    Vec x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = load(numbers + int64_t(first + i) * kLanes);  // those beyond the last are written nowhere
    transpose(x);
    const int count = latent - first < kLanes ? latent - first : kLanes;
    for (int i = 0; i < kLanes; ++i) store_first(z + int64_t(i) * latent + first, x[i], count);
  }
}

}  // namespace
