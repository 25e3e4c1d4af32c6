// A latent body (thin keys): what stands for the keys of all kv heads of a token, made of them before their rotation, stored, and turned
// back into the keys of one kv head, rotated to the token's position, tile by tile where rows attend to them.
//
// Rebuilding is a matrix product, latent x key_dim multiply-adds per token and kv head. A register block holds the numbers of kPairs
// rotary pairs of 16 kBlocks tokens, so that both halves of a pair meet in registers and are rotated before they are stored, in the order
// of dense keys; the rest is the attention of a dense tile. The sum of a number starts with its mean and adds the products in order, whatever
// is computed beside it, so a rebuilt key has the same bits in every step.
#pragma once
#include <type_traits>

#include "cpu/attend.h"

namespace {

constexpr int kBlocks = kAccumulators >= 16 ? 2 : 1;
constexpr int kPairs = kAccumulators >= 16 ? 4 : 2;

// ---- storing

inline void encode(const Step& s, int row) {
  const auto& p = s.params;
  const int dim = p.key_dim, all = p.kv_heads * dim, slot = s.first_tail + row;
  float given[EDGEKV_MOST_LATENT], z[EDGEKV_MOST_LATENT];
  for (int head = 0; head < p.kv_heads; ++head) {
    const float *key = s.k.data + head * s.k.head_stride + row * s.k.row_stride, *mean = s.latent.decode + (int64_t(head + 1) * (p.latent + 1) - 1) * dim;
    for (int d = 0; d < dim; ++d) given[head * dim + d] = key[d] - mean[d];
  }
  project(given, s.latent.encode, all, p.latent, z);
  auto put = [&](auto* plane) {
    using E = std::remove_pointer_t<decltype(plane)>;
    E element[EDGEKV_MOST_LATENT];
    store_row(element, z, p.latent);
    E* column = plane + int64_t(slot / kLanes) * p.latent * kLanes + slot % kLanes;
    for (int j = 0; j < p.latent; ++j) column[j * kLanes] = element[j];
  };
  if (p.element == edgekv::kFloat16)
    put(reinterpret_cast<uint16_t*>(s.state.tail_z));
  else
    put(reinterpret_cast<float*>(s.state.tail_z));
}

// ---- rebuilding

// Cosines and sines of 16 tokens, each [pairs][16]; positions holds `count` of them, the others are taken for 0.
inline void turns_of(const edgekv::RotationTables& t, const int32_t* positions, int count, float* cos, float* sin) {
  for (int first = 0; first < t.pairs; first += kLanes) {
    Vec c[kLanes], s[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t position = i < count ? uint32_t(positions[i]) : 0;
      auto number = [&](const float* const* table, int level) { return load(table[level] + ((position >> (8 * level)) & 255) * t.stride + first); };
      c[i] = number(t.cos, 0), s[i] = number(t.sin, 0);
      for (int level = 1; level < 3 && position >> (8 * level); ++level) {
        const Vec a = number(t.cos, level), b = number(t.sin, level), before = c[i];
        c[i] = sub(mul(before, a), mul(s[i], b));
        s[i] = add(mul(s[i], a), mul(before, b));
      }
    }
    transpose(c), transpose(s);
    for (int i = 0; i < kLanes && first + i < t.pairs; ++i) {
      store(cos + (first + i) * kLanes, c[i]);
      store(sin + (first + i) * kLanes, s[i]);
    }
  }
}

// Numbers `at` .. at + N - 1 of pairs, or of what is not rotated, of V blocks of tokens: first halves at columns a, a + step, ..., second
// halves at b, b + step, ... (none: b < 0). z [V][latent][16], decode [latent + 1][dim], keys [V][dim][16], cos and sin [V][pairs][16].
template <class E, int N, int V, bool kRotated>
inline void rebuild_numbers(const E* z, int latent, const float* decode, int dim, int a, int b, int step, const float* cos, const float* sin,
                            int64_t turns, float* keys) {
  constexpr int kHalves = kRotated ? 2 : 1;
  Vec sum[kHalves][N][V];
  auto column = [&](int half, int n) { return (half ? b : a) + n * step; };
  for (int half = 0; half < kHalves; ++half)
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < V; ++v) sum[half][n][v] = splat(decode[int64_t(latent) * dim + column(half, n)]);
  for (int j = 0; j < latent; ++j) {
    Vec x[V];
    for (int v = 0; v < V; ++v) x[v] = load(z + (int64_t(v) * latent + j) * kLanes);
    const float* row = decode + int64_t(j) * dim;
    for (int half = 0; half < kHalves; ++half) {
      for (int n = 0; n < N; ++n) {
        const Vec m = splat(row[column(half, n)]);
        for (int v = 0; v < V; ++v) sum[half][n][v] = fma(x[v], m, sum[half][n][v]);
      }
    }
  }
  for (int v = 0; v < V; ++v) {
    float* to = keys + int64_t(v) * dim * kLanes;
    for (int n = 0; n < N; ++n) {
      if constexpr (kRotated) {
        const Vec c = load(cos + v * turns + n * kLanes), s = load(sin + v * turns + n * kLanes), x = sum[0][n][v], y = sum[1][n][v];
        store(to + column(0, n) * kLanes, sub(mul(x, c), mul(y, s)));
        store(to + column(1, n) * kLanes, add(mul(y, c), mul(x, s)));
      } else {
        store(to + column(0, n) * kLanes, sum[0][n][v]);
      }
    }
  }
}

// V blocks of 16 tokens, of which `count` exist.
template <class E, int V>
inline void rebuild_blocks(const Step& s, int head, const E* z, const int32_t* positions, int count, float* keys) {
  const auto& p = s.params;
  const int dim = p.key_dim, half = p.rotary_dim / 2, step = p.rotary_interleaved ? 2 : 1;
  const float* decode = s.latent.decode + int64_t(head) * (p.latent + 1) * dim;
  alignas(64) float cos[V * 512 * kLanes], sin[V * 512 * kLanes];  // key_dim is at most 1024
  const int64_t turns = int64_t(half) * kLanes;
  for (int v = 0; v < V; ++v) turns_of(*s.latent.rotations, positions + v * kLanes, count - v * kLanes, cos + v * turns, sin + v * turns);
  auto pairs = [&](auto n, int i) {
    rebuild_numbers<E, n, V, true>(z, p.latent, decode, dim, step * i, step == 2 ? 2 * i + 1 : i + half, step, cos + i * kLanes, sin + i * kLanes, turns, keys);
  };
  auto plain = [&](auto n, int d) { rebuild_numbers<E, n, V, false>(z, p.latent, decode, dim, d, -1, 1, nullptr, nullptr, 0, keys); };
  int i = 0, d = p.rotary_dim;
  for (; i + kPairs <= half; i += kPairs) pairs(std::integral_constant<int, kPairs>(), i);
  for (; i < half; ++i) pairs(std::integral_constant<int, 1>(), i);
  for (; d + 2 * kPairs <= dim; d += 2 * kPairs) plain(std::integral_constant<int, 2 * kPairs>(), d);
  for (; d < dim; ++d) plain(std::integral_constant<int, 1>(), d);
}

template <class E>
inline void rebuild_tile(const Step& s, int head, int begin, int size, float* keys) {
  const auto& p = s.params;
  const E* z = reinterpret_cast<const E*>(s.state.body_z) + int64_t(begin) * p.latent;
  const int32_t* positions = s.state.body_pos + int64_t(head) * p.body_slots + begin;
  int at = 0;
  auto take = [&](auto blocks) {
    rebuild_blocks<E, blocks>(s, head, z + int64_t(at) * p.latent, positions + at, size - at, keys + int64_t(at) * p.key_dim);
    at += blocks * kLanes;
  };
  while (size - at > (kBlocks - 1) * kLanes) take(std::integral_constant<int, kBlocks>());
  while (at < size) take(std::integral_constant<int, 1>());
}

// ---- attention

template <class E>
void attend_rebuilt(const Step& s, int head, int first, int count, int begin, int end, float* partial, float* work) {
  const auto& p = s.params;
  const SeenRows seen(s, head, edgekv::kBody, first, count, begin, end);
  const float* queries = s.queries + (int64_t(head) * s.rows * s.group + first) * p.key_dim;
  clear_partials(count, p.value_dim, partial);
  float *keys = work, *copied = keys + kTile * p.key_dim;
  uint64_t blocks = 0, slots_read = 0;
  for (int at = begin; at < seen.highest; at += kTile) {
    const int size = seen.highest - at < kTile ? seen.highest - at : kTile;
    if (at + size <= seen.lowest) continue;
    const int skipped = seen.lowest > at ? seen.lowest - at : 0, from = skipped / kLanes * kLanes;
    rebuild_tile<E>(s, head, at + from, size - from, keys + int64_t(from) * p.key_dim);
    const E* stored = reinterpret_cast<const E*>(s.state.body_v) + (int64_t(head) * p.body_slots + at) * p.value_dim;
    Tile<float> tile = {keys, copied, p.key_dim, p.value_dim, edgekv::partial_width(p.value_dim), size, p.softcap, true};
    if constexpr (std::is_same_v<E, float>) {
      tile.values = stored, tile.value_stride = p.value_dim;
    } else {
      for (int i = skipped; i < size; ++i) store_row(copied + i * tile.value_stride, stored + int64_t(i) * p.value_dim, p.value_dim);
    }
    attend_tile(tile, seen, at, count, queries, partial);
    blocks += (size + kLanes - 1) / kLanes - skipped / kLanes;
    slots_read += size - skipped;
  }
  __atomic_fetch_add(&s.loaded->body_keys, blocks * kLanes * p.latent * sizeof(E), __ATOMIC_RELAXED);
  __atomic_fetch_add(&s.loaded->body_values, slots_read * p.value_dim * sizeof(E), __ATOMIC_RELAXED);
}

inline void attend_latent(const Step& s, int head, int first, int count, int begin, int end, float* partial, float* work) {
  if (s.params.element == edgekv::kFloat16)
    attend_rebuilt<uint16_t>(s, head, first, count, begin, end, partial, work);
  else
    attend_rebuilt<float>(s, head, first, count, begin, end, partial, work);
}

}  // namespace
