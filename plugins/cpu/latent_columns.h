// Rebuilding 16 B numbers of the keys of N tokens with the latent_dots in front of this. No guard: included once for each of them, with the
// instruction set of the function, if it is not the file's own, in EDGEKV_TARGET.
template <int N, int B>
EDGEKV_TARGET inline void rebuild_columns(const QuantisedLatents& x, int column, float* const* out) {
  const auto& l = x.levels;
  const int8_t* levels = l.numbers + x.head * l.head_numbers + 4 * column;
  const float* factors = l.factors + x.head * l.head_factors + column;
  Vec sum[N][B];
  for (int b = 0; b < B; ++b)
    for (int n = 0; n < N; ++n) sum[n][b] = load(factors + int64_t(2 * l.groups) * l.stride + 16 * b);
  const uint8_t* codes[N];
  for (int n = 0; n < N; ++n) codes[n] = x.codes[n];
  for (int g = 0; g < l.groups; ++g, factors += int64_t(2) * l.stride) {
    const int quads = x.quads - 8 * g < 8 ? x.quads - 8 * g : 8;
    Vec product[N][B];
    latent_dots<N, B>(codes, levels, l.stride, quads, product);
    levels += int64_t(quads) * 4 * l.stride;
    for (int n = 0; n < N; ++n) codes[n] += EDGEKV_GROUP;
    for (int b = 0; b < B; ++b) {
      const Vec step = load(factors + 16 * b), total = load(factors + l.stride + 16 * b);
      for (int n = 0; n < N; ++n)
        sum[n][b] = fma(product[n][b], mul(step, splat(x.pairs[n][2 * g + 1])), fma(total, splat(x.pairs[n][2 * g]), sum[n][b]));
    }
  }
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) store(out[n] + column + 16 * b, sum[n][b]);
}
