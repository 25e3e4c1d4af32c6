// A program that checks one instruction set, also where there is no Python: on another processor, or under an emulator.
//
//   g++ -std=c++17 -O2 -ffp-contract=off -mavx2 -mfma -mf16c -I plugins -DEDGEKV_SIMD='"cpu/simd_avx2.h"' plugins/cpu/selftest.cpp
//       checks the vector operations of one simd_*.h against plain C++
//   aarch64-linux-gnu-g++ -std=c++17 -O2 -ffp-contract=off -static -pthread -I plugins -DEDGEKV_SIMD='"cpu/simd_neon.h"'
//       -DEDGEKV_SELFTEST_KERNELS plugins/cpu/*.cpp plugins/cpu/keep_rules/*.cpp
//       also runs whole caches on every instruction set of the machine and compares them with the scalar one
#include EDGEKV_SIMD
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/vecmath.h"

namespace {

int failures = 0;

void expect(bool good, const char* what, double got = 0, double want = 0) {
  if (good) return;
  if (++failures <= 20) std::printf("FAILED %s: got %.9g, wanted %.9g\n", what, got, want);
}

bool same(float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b)); }

using Lanes = std::vector<float>;

Lanes lanes(Vec v) {
  Lanes x(16);
  store(x.data(), v);
  return x;
}

template <class F>
void expect_lanes(const char* what, Vec got, F want) {
  const Lanes x = lanes(got);
  for (int i = 0; i < 16; ++i) expect(same(x[i], want(i)), what, x[i], want(i));
}

// What IEEE half precision makes of a bit pattern, from the definition.
float half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? std::numeric_limits<float>::quiet_NaN() : float(sign * INFINITY);
  if (exponent == 0) return float(sign * std::ldexp(fraction, -24));
  return float(sign * std::ldexp(1024 + fraction, exponent - 25));
}

void check_half() {
  uint16_t in[16], out[16];
  for (int first = 0; first < 65536; first += 16) {
    for (int i = 0; i < 16; ++i) in[i] = uint16_t(first + i);
    const Lanes x = lanes(load(in));
    store(out, load(x.data()));
    for (int i = 0; i < 16; ++i) {
      const float want = half_value(in[i]);
      expect(same(x[i], want), "half to float", x[i], want);
      expect(std::isnan(want) ? (out[i] & 0x7c00) == 0x7c00 && (out[i] & 0x3ff) : out[i] == in[i], "float to half", out[i], in[i]);
    }
  }
  // Between two neighbours the nearer one, at equal distance the even one; from the middle beyond 65504 on, infinity.
  for (int first = 0; first < 0x7c00; first += 16) {
    float middle[16], above[16], below[16];
    for (int i = 0; i < 16; ++i) {
      const double a = half_value(uint16_t(first + i)), b = first + i + 1 == 0x7c00 ? 65536.0 : half_value(uint16_t(first + i + 1));
      middle[i] = float((a + b) / 2);
      above[i] = std::nextafter(middle[i], INFINITY);
      below[i] = std::nextafter(middle[i], 0.0f);
    }
    uint16_t m[16], a[16], b[16];
    store(m, load(middle)), store(a, load(above)), store(b, load(below));
    for (int i = 0; i < 16; ++i) {
      const int bits = first + i;
      expect(m[i] == bits + (bits & 1) && a[i] == bits + 1 && b[i] == bits, "rounding to half", m[i], bits);
    }
  }
}

void check_arithmetic() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  for (int round = 0; round < 200; ++round) {
    float a[16], b[16], c[16];
    for (int i = 0; i < 16; ++i) a[i] = normal(random), b[i] = normal(random), c[i] = normal(random);
    if (round % 3 == 0) b[round % 16] = a[round % 16];
    const Vec x = load(a), y = load(b), z = load(c);
    expect_lanes("load", x, [&](int i) { return a[i]; });
    expect_lanes("splat", splat(a[3]), [&](int) { return a[3]; });
  expect_lanes("first_lane", first_lane(a[3]), [&](int i) { return i == 0 ? a[3] : 0.0f; });
    expect_lanes("zero", zero(), [&](int) { return 0.0f; });
    expect_lanes("add", add(x, y), [&](int i) { return a[i] + b[i]; });
    expect_lanes("sub", sub(x, y), [&](int i) { return a[i] - b[i]; });
    expect_lanes("mul", mul(x, y), [&](int i) { return a[i] * b[i]; });
    expect_lanes("div", div(x, y), [&](int i) { return a[i] / b[i]; });
    expect_lanes("max", max(x, y), [&](int i) { return std::max(a[i], b[i]); });
    expect_lanes("min", min(x, y), [&](int i) { return std::min(a[i], b[i]); });
    expect_lanes("abs", abs(x), [&](int i) { return std::fabs(a[i]); });
    expect_lanes("nearest", add(nearest(x), zero()), [&](int i) { return std::nearbyintf(a[i]) + 0.0f; });  // of -0.3: either zero
    expect_lanes("where_less", where_less(x, y, z, x), [&](int i) { return a[i] < b[i] ? c[i] : a[i]; });
    const Lanes f = lanes(fma(x, y, z));
    for (int i = 0; i < 16; ++i)
      expect(same(f[i], std::fma(a[i], b[i], c[i])) || same(f[i], a[i] * b[i] + c[i]), "fma", f[i], std::fma(a[i], b[i], c[i]));
    float power[16];
    for (int i = 0; i < 16; ++i) power[i] = float((round * 16 + i) % 200 - 100);
    expect_lanes("times_power_of_two", times_power_of_two(x, load(power)), [&](int i) { return std::ldexp(a[i], int(power[i])); });
    const int begin = round % 20 - 2, end = round / 10 - 1;
    expect_lanes("keep_lanes", keep_lanes(x, begin, end, y), [&](int i) { return i >= begin && i < end ? a[i] : b[i]; });
    float sum[16];
    std::copy(a, a + 16, sum);
    for (int n = 8; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) sum[i] += sum[i + n];
    expect(same(sum_lanes(x), sum[0]), "sum_lanes", sum_lanes(x), sum[0]);
    expect(same(max_lanes(x), *std::max_element(a, a + 16)), "max_lanes", max_lanes(x), *std::max_element(a, a + 16));
  }
  expect_lanes("nearest is even", nearest(splat(2.5f)), [](int) { return 2.0f; });
  const float nan = std::numeric_limits<float>::quiet_NaN();
  expect_lanes("max keeps NaN of the second", max(splat(1.0f), splat(nan)), [&](int) { return nan; });
  expect_lanes("NaN is not less", where_less(splat(nan), zero(), zero(), splat(1.0f)), [](int) { return 1.0f; });
}

// Partial loads and stores stay inside: the arrays end right behind the last lane, and the sanitizers and Valgrind would tell.
template <class T>
void check_partial(T outside) {
  for (int n = 1; n <= 16; ++n) {
    std::vector<T> in(size_t(n), T(1)), out(size_t(n) + 1, outside);
    const Vec v = load_first(in.data(), n);
    const Lanes x = lanes(v);
    for (int i = 0; i < 16; ++i) expect(i < n ? x[i] != 0 : x[i] == 0, "load_first", x[i]);
    store_first(out.data(), v, n);
    for (int i = 0; i < n; ++i) expect(out[i] == in[i], "store_first", out[i], in[i]);
    expect(out[n] == outside, "store_first stays inside", out[n], outside);
  }
}

void check_functions() {
  double worst_exp = 0, worst_tanh = 0;
  for (int step = 0; step < 400000; step += 16) {
    float x[16], t[16];
    for (int i = 0; i < 16; ++i) x[i] = -130.0f + float(step + i) * (256.0f / 400000), t[i] = -12.0f + float(step + i) * (24.0f / 400000);
    const Lanes e = lanes(exp2(load(x))), h = lanes(tanh(load(t)));
    for (int i = 0; i < 16; ++i) {
      if (x[i] < -126)
        expect(e[i] == 0, "exp2 below the smallest normal number", e[i]);
      else
        worst_exp = std::max(worst_exp, std::fabs(e[i] / std::exp2(double(x[i])) - 1));
      worst_tanh = std::max(worst_tanh, std::fabs(h[i] - std::tanh(double(t[i]))));
    }
  }
  std::printf("exp2: relative error %.2g; tanh: absolute error %.2g\n", worst_exp, worst_tanh);
  expect(worst_exp < 2e-7, "exp2", worst_exp, 2e-7);
  expect(worst_tanh < 2e-7, "tanh", worst_tanh, 2e-7);
  expect(exp2_one(0.0f) == 1.0f, "exp2(0)", exp2_one(0.0f), 1);
  expect(exp2_one(-0.0f) == 1.0f, "exp2(-0)", exp2_one(-0.0f), 1);
  expect(exp2_one(-INFINITY) == 0.0f, "exp2(-infinity)", exp2_one(-INFINITY));
  expect(std::isnan(exp2_one(NAN)), "exp2(NaN)");
  expect_lanes("tanh far out", tanh(splat(1e30f)), [](int) { return 1.0f; });
  expect_lanes("tanh far out", tanh(splat(-1e30f)), [](int) { return -1.0f; });
  expect_lanes("tanh(0)", tanh(zero()), [](int) { return 0.0f; });
}

}  // namespace

#ifdef EDGEKV_SELFTEST_KERNELS
#include "cpu/attention.h"
#include "cpu/compaction.h"
#include "cpu/dispatch.h"
#include "cpu/error.h"
#include "cpu/state.h"

namespace {

using namespace edgekv;

// One cache on one instruction set, fed with random tokens.
struct Cache {
  LayerParams p;
  std::vector<float> inv_freq;
  uint8_t* state;
  int64_t bytes, position = 0;

  explicit Cache(const LayerParams& params) : p(params), bytes(int64_t(state_layout(params).bytes)) {
    state = static_cast<uint8_t*>(std::aligned_alloc(256, size_t(bytes)));
    if (init_state(p, state, bytes)) std::printf("%s\n", error_text()), std::exit(1);
    for (int i = 0; i < p.rotary_dim / 2; ++i) inv_freq.push_back(std::pow(0.1f, float(i)));
  }
  ~Cache() { std::free(state); }
  Cache(const Cache&) = delete;

  void step(const float* q, const float* k, const float* v, int64_t rows, float* y) {
    const StepInputs in = {{q, p.key_dim, int64_t(p.q_heads) * p.key_dim}, {k, p.key_dim, int64_t(p.kv_heads) * p.key_dim},
                           {v, p.value_dim, int64_t(p.kv_heads) * p.value_dim}, rows, position, nullptr, nullptr, 0, nullptr, 0, false, nullptr, nullptr};
    Threads two(2);
    if (attend_step(p, in, state, bytes, y, two)) std::printf("%s\n", error_text()), std::exit(1);
  }
  void commit(int64_t rows) {
    position += rows;
    if (position % p.tail_slots) return;
    Threads two(2);
    const int64_t rank = p.positions == kPositionsCache ? std::min<int64_t>(position, p.body_slots) : position;
    if (compact_state(p, inv_freq.data(), state, bytes, position, rank, two)) std::printf("%s\n", error_text()), std::exit(1);
  }
};

// `isa` against scalar, in lockstep: outputs close, states equal but for the last bit of re-rotated keys; and each row of a block
// has the bits it has alone.
void check_cache(const char* isa, const LayerParams& p, int tokens) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Cache cache(p);
  std::vector<uint8_t> before(static_cast<size_t>(cache.bytes)), plain(before.size());
  double worst = 0;
  for (int64_t rows; cache.position < tokens; cache.commit(rows)) {
    rows = std::min<int64_t>(1 + random() % p.tail_slots, p.tail_slots - cache.position % p.tail_slots);
    std::vector<float> q(size_t(rows * p.q_heads * p.key_dim)), k(size_t(rows * p.kv_heads * p.key_dim)),
        v(size_t(rows * p.kv_heads * p.value_dim)), y(size_t(rows * p.q_heads * p.value_dim)), want(y.size());
    for (auto* x : {&q, &k, &v})
      for (float& number : *x) number = normal(random);
    std::memcpy(before.data(), cache.state, before.size());
    set_isa("scalar");
    cache.step(q.data(), k.data(), v.data(), rows, want.data());
    std::memcpy(plain.data(), cache.state, plain.size());
    std::memcpy(cache.state, before.data(), before.size());
    set_isa(isa);
    cache.step(q.data(), k.data(), v.data(), rows, y.data());
    // Traffic depends on how an instruction set cuts the work; everything behind it must agree.
    expect(std::memcmp(plain.data() + 256, cache.state + 256, plain.size() - 256) == 0, "state after a step");
    for (size_t i = 0; i < y.size(); ++i) worst = std::max(worst, double(std::fabs(y[i] - want[i])));

    const int64_t row = int64_t(random() % uint64_t(rows)), width = int64_t(p.q_heads) * p.value_dim;
    std::vector<float> alone(static_cast<size_t>(width));
    cache.position += row;
    cache.step(q.data() + row * p.q_heads * p.key_dim, k.data() + row * p.kv_heads * p.key_dim, v.data() + row * p.kv_heads * p.value_dim, 1,
               alone.data());
    cache.position -= row;
    expect(std::memcmp(alone.data(), y.data() + row * width, size_t(width) * 4) == 0, "a row alone");
  }
  std::printf("%s: keep %d, %d/%d heads of %d/%d: outputs within %.2g of scalar\n", isa, p.keep, p.q_heads, p.kv_heads, p.key_dim,
              p.value_dim, worst);
  expect(worst < 2e-5, "outputs", worst, 2e-5);
}

// A compressed body of random bits: `isa` chooses the slots that scalar chooses, and attends to them and to all with close outputs.
void check_packed(const char* isa, const LayerParams& p) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Cache cache(p);
  const StateView s = view_state(p, cache.state);
  const StateLayout at = state_layout(p);
  const RecordLayout record = record_layout(p);
  cache.position = int64_t(p.tail_slots) * p.intervals;
  s.header->tail_base = s.header->rank_base = cache.position;
  s.header->body_count = int32_t(cache.position) - p.sinks;
  for (size_t i = at.index; i < at.mean; ++i) cache.state[i] = uint8_t(random());
  for (int64_t i = 0; i < int64_t(p.kv_heads) * p.body_slots; ++i) {
    s.body_pos[i] = int32_t(i % p.body_slots) + p.sinks;
    uint16_t* pair = reinterpret_cast<uint16_t*>(s.payload + i * int64_t(record.bytes) + record.key_pairs);
    for (size_t n = 0; n < (record.bytes - record.key_pairs) / 2; ++n) pair[n] = uint16_t(0x3000 + random() % 0x800);  // 1/8 .. 1/2
  }
  for (int64_t i = 0; i < int64_t(p.kv_heads) * p.intervals * p.key_dim; ++i) s.mean[i] = uint16_t(0x2800 + random() % 0x800);
  for (int64_t i = 0; i < int64_t(p.kv_heads) * p.key_dim * 16; ++i) s.codebook[i] = normal(random);

  const int rows = 3;
  std::vector<float> q(size_t(rows * p.q_heads * p.key_dim)), k(size_t(rows * p.kv_heads * p.key_dim)), v(size_t(rows * p.kv_heads * p.value_dim));
  for (auto* x : {&q, &k, &v})
    for (float& number : *x) number = normal(random);
  StepInputs in = {{q.data(), p.key_dim, int64_t(p.q_heads) * p.key_dim}, {k.data(), p.key_dim, int64_t(p.kv_heads) * p.key_dim},
                   {v.data(), p.value_dim, int64_t(p.kv_heads) * p.value_dim}, rows, cache.position, nullptr, nullptr, 0, nullptr, 0, false, nullptr, nullptr};
  Threads two(2);
  double worst = 0;
  for (int retrieve : {0, 1, 40, s.header->body_count / 2}) {
    s.header->retrieve = retrieve;
    std::vector<int32_t> slots[2];
    std::vector<float> y[2];
    for (int run = 0; run < 2; ++run) {
      set_isa(run ? isa : "scalar");
      slots[run].resize(size_t(p.kv_heads) * rows * retrieve);
      y[run].resize(size_t(rows * p.q_heads * p.value_dim));
      in.slots = nullptr, in.chosen = 0;
      if (retrieve > 0) {
        if (retrieve_step(p, in, cache.state, cache.bytes, slots[run].data(), two)) std::printf("%s\n", error_text()), std::exit(1);
        in.slots = slots[run].data(), in.chosen = retrieve;
      }
      if (attend_step(p, in, cache.state, cache.bytes, y[run].data(), two)) std::printf("%s\n", error_text()), std::exit(1);
    }
    expect(slots[0] == slots[1], "chosen slots", retrieve);
    for (size_t i = 0; i < y[0].size(); ++i) worst = std::max(worst, double(std::fabs(y[0][i] - y[1][i])));
  }
  std::printf("%s: compressed, %d/%d heads of %d/%d, %d-bit magnitudes, %d-bit values: outputs within %.2g of scalar\n", isa, p.q_heads, p.kv_heads, p.key_dim,
              p.value_dim, p.key_bits, p.value_bits, worst);
  expect(worst < 1e-4, "outputs of a compressed body", worst, 1e-4);
}

// Every instruction set multiplies to the same bits.
void check_products(int bits, int64_t outputs, int64_t blocks) {
  constexpr int64_t kRows = 7;
  std::vector<uint8_t> codes(size_t(outputs * blocks * 4 * bits)), zeros(size_t(outputs * ((blocks * bits + 7) / 8)));
  std::vector<float> scales(size_t(outputs * blocks)), x(size_t(kRows * blocks * kBlock)), first;
  uint32_t seed = 1;
  const auto random = [&seed] { return seed = seed * 1664525u + 1013904223u, seed >> 8; };
  for (uint8_t& code : codes) code = uint8_t(random());
  for (uint8_t& zero : zeros) zero = uint8_t(random());
  for (float& scale : scales) scale = float(random()) * 1e-9f;
  for (float& number : x) number = float(int32_t(random()) - (1 << 23)) * 1e-6f;
  const Weights weights(bits, outputs, blocks, codes.data(), scales.data(), zeros.data());
  const char* before = kernels().name;
  for (int i = 0; const char* isa = isa_name(i); ++i) {
    set_isa(isa);
    std::vector<uint32_t> memory(quantised_bytes(kRows, blocks) / 4);
    std::vector<float> y(size_t(kRows * outputs));
    const QuantisedRows rows = quantised_rows(kRows, blocks, memory.data());
    for (int64_t row = 0; row < kRows; ++row) kernels().quantise_row(x.data() + row * blocks * kBlock, rows, row);
    kernels().multiply(weights.tiles(), 0, weights.tiles().tiles, rows, 0, kRows, {nullptr, nullptr, y.data()});
    if (i == 0) first = y;
    expect(std::memcmp(first.data(), y.data(), y.size() * sizeof(float)) == 0, isa, bits, double(outputs));
  }
  set_isa(before);
}

void check_kernels() {
  for (int bits : {4, 8})
    for (int64_t outputs : {1, 8, 45}) check_products(bits, outputs, 3);
  LayerParams p;
  p.q_heads = 6, p.kv_heads = 2, p.key_dim = p.value_dim = 64, p.body_slots = 1024, p.tail_slots = 128, p.scale = 0.125f;
  LayerParams window = p, heavy = p, odd = p, whole = p;
  window.keep = kKeepWindow, window.sinks = 4, window.body_slots = 192, window.positions = kPositionsCache, window.rotary_dim = 64;
  heavy.keep = kKeepHeavy, heavy.sinks = 2, heavy.window = 40, heavy.observe = 24, heavy.body_slots = 256, heavy.score_normalise = 1;
  heavy.sliding_window = 300;
  odd.q_heads = 5, odd.kv_heads = 1, odd.key_dim = 33, odd.value_dim = 47, odd.softcap = 20.0f;
  whole.element = kFloat32, whole.q_heads = 8;
  for (int i = 1; const char* isa = isa_name(i); ++i)
    for (const LayerParams& one : {p, window, heavy, odd, whole}) check_cache(isa, one, 700);
  LayerParams packed = p, narrow = p;
  packed.format = narrow.format = kFormatSelfIndex, packed.intervals = narrow.intervals = 8, packed.value_bits = 2, packed.sinks = 20;
  narrow.key_dim = 40, narrow.value_dim = 24, narrow.value_bits = 8, narrow.softcap = 20.0f;
  for (int i = 1; const char* isa = isa_name(i); ++i)
    for (LayerParams one : {packed, narrow})
      for (int bits : {2, 4}) one.key_bits = bits, check_packed(isa, one);
}

}  // namespace
#endif

int main() {
  check_half();
  check_arithmetic();
  check_partial<float>(-5.0f);
  check_partial<uint16_t>(0xfbff);
  check_functions();
#ifdef EDGEKV_SELFTEST_KERNELS
  check_kernels();
#endif
  if (failures) std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
