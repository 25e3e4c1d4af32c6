// Attention to a compressed body of latent keys: keys of one kv head are rebuilt from the quantised latents of the tokens that are attended
// to, rotated to their positions, and met by their rows; values are those of any compressed body (attend_packed.h).
//
// A token's key has the same bits in every step: its numbers are added up in one order, whatever is rebuilt beside it.
#pragma once
#include "cpu/attend_packed.h"

namespace {

constexpr int kLatentsAhead = 12;  // tokens

// Numbers `column` and on of the keys of N tokens, without rotation.
template <int N, int B = kColumnsAtOnce>
inline void rebuild_keys(const QuantisedLatents& x, int column, float* const* out) {
  for (; column + 16 * B <= x.levels.stride; column += 16 * B) rebuild_columns_of<N, B>(x, column, out);
  if constexpr (B > 1) rebuild_keys<N, B / 2>(x, column, out);
}

// Rotates a key, with room for a whole vector behind it, to a position.
inline void turn(const edgekv::LayerParams& p, const edgekv::RotationTables& t, int32_t place, float* key) {
  const int half = p.rotary_dim / 2;
  const uint32_t position = uint32_t(place);
  for (int first = 0; first < half; first += kLanes) {
    auto number = [&](const float* const* table, int level) { return load(table[level] + ((position >> (8 * level)) & 255) * t.stride + first); };
    Vec c = number(t.cos, 0), s = number(t.sin, 0);
    for (int level = 1; level < 3 && position >> (8 * level); ++level) {
      const Vec a = number(t.cos, level), b = number(t.sin, level), before = c;
      c = sub(mul(before, a), mul(s, b));
      s = add(mul(s, a), mul(before, b));
    }
    const int lanes = half - first < kLanes ? half - first : kLanes;
    if (p.rotary_interleaved) {
      float cos[kLanes], sin[kLanes];
      store(cos, c), store(sin, s);
      for (int i = 0; i < lanes; ++i) {
        float *x = key + 2 * (first + i), *y = x + 1;
        const float a = *x, b = *y;
        *x = a * cos[i] - b * sin[i];
        *y = b * cos[i] + a * sin[i];
      }
      continue;
    }
    float *x = key + first, *y = x + half;
    const bool whole = lanes == kLanes;
    const Vec a = whole ? load(x) : load_first(x, lanes), b = whole ? load(y) : load_first(y, lanes);
    const Vec turned[2] = {sub(mul(a, c), mul(b, s)), add(mul(b, c), mul(a, s))};
    if (whole)
      store(x, turned[0]), store(y, turned[1]);
    else
      store_first(x, turned[0], lanes), store_first(y, turned[1], lanes);
  }
}

// The keys of the body of one kv head, token by token.
struct LatentKeys {
  const Step& s;
  const int32_t* positions;
  int64_t record;  // bytes
  QuantisedLatents taken;

  LatentKeys(const Step& s, int head)
      : s(s), positions(s.state.body_pos + int64_t(head) * s.params.body_slots), record(int64_t(edgekv::latent_record_bytes(s.params))), taken(s.params, *s.latent.levels, head) {}

  __attribute__((always_inline)) void fetch(int slot) const {
    const uint8_t* at = s.state.body_z + slot * record;
    __builtin_prefetch(at, 0, 3);
    __builtin_prefetch(at + record - 1, 0, 3);
    __builtin_prefetch(positions + slot, 0, 3);
  }

  // Keys of the tokens in slot(0) .. slot(count - 1) to rows of `stride` numbers.
  template <class Slot>
  void rebuild(Slot slot, int count, float* rows, int64_t stride) {
    int i = 0;
    for (; i + kTokensAtOnce <= count; i += kTokensAtOnce) some<kTokensAtOnce>(slot, i, rows + i * stride, stride);
    for (; i < count; ++i) some<1>(slot, i, rows + i * stride, stride);
  }

 private:
  template <int N, class Slot>
  void some(Slot slot, int i, float* rows, int64_t stride) {
    float* out[N];
    for (int n = 0; n < N; ++n) {
      taken.take(n, s.state.body_z + slot(i + n) * record);
      out[n] = rows + n * stride;
    }
    rebuild_keys<N>(taken, 0, out);
    for (int n = 0; n < N; ++n) turn(s.params, *s.latent.rotations, positions[slot(i + n)], out[n]);
  }
};

inline void count_latents(const Step& s, const PackedBody& b, uint64_t tokens) {
  __atomic_fetch_add(&s.loaded->body_keys, tokens * edgekv::latent_record_bytes(s.params), __ATOMIC_RELAXED);
  __atomic_fetch_add(&s.loaded->body_values, tokens * b.value_bytes(), __ATOMIC_RELAXED);
  __atomic_fetch_add(&s.loaded->body_meta, tokens * 4, __ATOMIC_RELAXED);
}

inline void attend_whole_latent(const Step& s, const PackedBody& b, int head, int first, int count, int begin, int end, float* partial, float* work) {
  const auto& p = s.params;
  const int value_stride = packed_stride(p.value_dim), stride = s.latent.levels->stride;
  float *keys = work, *values = keys + kTile * p.key_dim, *rows = values + kTile * value_stride;
  const SeenRows seen(s, head, edgekv::kBody, first, count, begin, end);
  const float* queries = s.queries + (int64_t(head) * s.rows * s.group + first) * p.key_dim;
  LatentKeys latents(s, head);
  uint64_t tokens = 0;
  for (int at = begin; at < seen.highest; at += kTile) {
    const int size = seen.highest - at < kTile ? seen.highest - at : kTile;
    if (at + size <= seen.lowest) continue;
    const int skipped = seen.lowest > at ? (seen.lowest - at) / kLanes * kLanes : 0;
    for (int block = skipped; block < size; block += kLanes) {
      const int held = size - block < kLanes ? size - block : kLanes;
      latents.rebuild([&](int i) { return at + block + i; }, held, rows, stride);
      if (held < kLanes) std::memset(rows + held * stride, 0, size_t(kLanes - held) * stride * sizeof(float));
      for (int d = 0; d < p.key_dim; d += kLanes) {
        Vec x[kLanes];
        for (int j = 0; j < kLanes; ++j) x[j] = load(rows + j * stride + d);
        transpose(x);
        for (int i = 0; i < kLanes && d + i < p.key_dim; ++i) store(keys + (int64_t(block) * p.key_dim) + (d + i) * kLanes, x[i]);
      }
      for (int j = 0; j < held; ++j) unpack_value(b, at + block + j, values + (block + j) * value_stride);
    }
    tokens += size - skipped;
    attend_tile<float>({keys, values, p.key_dim, p.value_dim, value_stride, size, p.softcap, true}, seen, at, count, queries, partial);
  }
  count_latents(s, b, tokens);
}

// Scores of `count` keys, rows of `stride` numbers, for R queries, rows of query_stride numbers: to scores + r * kTile. Both are filled up with zeros.
template <int R>
inline void scores_of_rows(const float* keys, int count, int64_t stride, const float* queries, int64_t query_stride, float* scores) {
  for (int i = 0; i < count; ++i, keys += stride) {
    Vec sum[R];
    for (int r = 0; r < R; ++r) sum[r] = zero();
    for (int d = 0; d < stride; d += kLanes) {
      const Vec key = load(keys + d);
      for (int r = 0; r < R; ++r) sum[r] = fma(key, load(queries + r * query_stride + d), sum[r]);
    }
    for (int r = 0; r < R; ++r) scores[r * kTile + i] = sum_lanes(sum[r]);
  }
}

inline void scores_of_keys(const float* keys, int count, int64_t stride, const float* queries, int64_t query_stride, int rows, float* scores) {
  for (int r = 0; r < rows; r += 4, queries += 4 * query_stride, scores += 4 * kTile) {
    switch (rows - r) {
      case 1: scores_of_rows<1>(keys, count, stride, queries, query_stride, scores); break;
      case 2: scores_of_rows<2>(keys, count, stride, queries, query_stride, scores); break;
      case 3: scores_of_rows<3>(keys, count, stride, queries, query_stride, scores); break;
      default: scores_of_rows<4>(keys, count, stride, queries, query_stride, scores);
    }
  }
}

// The rows of one token: `rows` of them from `row` of the kv head on.
inline void attend_chosen_latent(const Step& s, const PackedBody& b, int head, int row, int rows, int begin, int end, float* partial, float* work) {
  const auto& p = s.params;
  const int width = packed_stride(p.value_dim), sums_stride = width + 32, query_stride = packed_stride(p.key_dim), stride = s.latent.levels->stride;
  float *values = work, *scores = values + kTile * width, *picked = scores + kTile * rows, *sums = picked + picked_floats(p.value_dim);
  float* keys = sums + int64_t(rows) * sums_stride;  // of a block of tokens
  const float* queries = s.turned + (int64_t(head) * s.rows * s.group + row) * query_stride;
  const int32_t* slots = s.slots + (int64_t(head) * s.rows + row / s.group) * s.chosen;
  int listed = s.chosen;
  while (listed > 0 && slots[listed - 1] < 0) --listed;
  if (end > listed) end = listed;
  LatentKeys latents(s, head);
  for (int i = begin; i < end && i < begin + kLatentsAhead; ++i) latents.fetch(slots[i]);
  fetch_first(b, slots + begin, end - begin, false);
  clear_sums(rows, width, sums_stride, sums);
  for (int at = begin; at < end; at += kTile) {
    const int size = end - at < kTile ? end - at : kTile;
    for (int block = 0; block < size; block += kLanes) {
      const int held = size - block < kLanes ? size - block : kLanes, from = at + block;
      auto slot = [&](int i) {
        if (from + i + kLatentsAhead < end) latents.fetch(slots[from + i + kLatentsAhead]);
        return slots[from + i];
      };
      latents.rebuild(slot, held, keys, stride);
      scores_of_keys(keys, held, stride, queries, query_stride, rows, scores + block);
    }
    for (int r = 0; r < rows; ++r) soften({sums + r * sums_stride, width}, scores + r * kTile, 0, (size + kLanes - 1) / kLanes, 0, size, p.softcap);
    add_values_of({{b, slots + at, size, listed - at}, picked}, rows, scores, sums, sums_stride, values);
  }
  partials_of(p, rows, width, sums_stride, sums, partial);
  count_latents(s, b, end > begin ? uint64_t(end - begin) : 0);
}

void attend_packed_latent(const Step& s, int head, int first, int count, int begin, int end, float* partial, float* work) {
  const PackedBody b(s.params, s.state, head, s.position - s.first_tail);
  attend_compressed(
      s, first, count, partial, [&](int row, int rows, float* to) { attend_whole_latent(s, b, head, row, rows, begin, end, to, work); },
      [&](int row, int rows, float* to) { attend_chosen_latent(s, b, head, row, rows, begin, end, to, work); });
}

}  // namespace
