// exp2 and tanh on sixteen floats. Include after a simd_*.h.
#pragma once

namespace {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x with relative error below 2e-7 for x in [-126, 126]; 0 below -126 (so that -infinity gives 0), exactly 1 at 0.
// 2^x = 2^n * 2^f with n the nearest integer; the polynomial for 2^f on [-1/2, 1/2] is our own fit of relative error 1e-7.
inline Vec exp2(Vec x) {
  const Vec lowest = splat(-126.0f);
  const Vec inside = min(splat(126.0f), max(lowest, x));
  const Vec n = nearest(inside), f = sub(inside, n);
  Vec p = fma(splat(0.00132647273f), f, splat(0.00967151299f));
  p = fma(p, f, splat(0.0555073358f));
  p = fma(p, f, splat(0.240222424f));
  p = fma(p, f, splat(0.693147004f));
  p = fma(p, f, splat(1.0f));
  return where_less(x, lowest, zero(), times_power_of_two(p, n));
}

inline float exp2_one(float x) {
  float all[16];
  store(all, exp2(splat(x)));
  return all[0];
}

// tanh with absolute error below 2e-7: an odd polynomial near 0, 1 - 2 / (exp(2|x|) + 1) with the sign of x elsewhere.
inline Vec tanh(Vec x) {
  const Vec a = abs(x), square = mul(x, x);
  Vec p = fma(splat(-0.00570491096f), square, splat(0.0206390228f));
  p = fma(p, square, splat(-0.0537396967f));
  p = fma(p, square, splat(0.133314416f));
  p = fma(p, square, splat(-0.333332807f));
  const Vec near = fma(mul(p, square), x, x);
  const Vec e = exp2(mul(min(splat(20.0f), a), splat(2.0f * kLog2E)));
  const Vec far = sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
  return where_less(a, splat(0.625f), near, where_less(x, zero(), sub(zero(), far), far));
}

}  // namespace
