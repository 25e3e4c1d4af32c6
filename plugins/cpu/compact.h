// The kernels of compaction, on the vector type and the score loops of attend.h, which is included before this file.
#pragma once
#include "cpu/kernels.h"

namespace {

using edgekv::Compaction;

// ---- observe: what each token received from the last queries of the interval

// Weights of R queries over all candidates, added up. work holds R rows of padded_candidates scores.
template <class E, int R>
__attribute__((noinline)) void observe_block(const Compaction& c, int head, const float* queries, const int64_t* position, float* work,
                                             float* score, float* seen) {
  const auto& p = c.params;
  const int64_t stride = edgekv::padded_candidates(c);
  const int body_blocks = (c.body_count + kLanes - 1) / kLanes, tail_blocks = c.tail_count / kLanes, tail_at = body_blocks * kLanes;
  const E* body = reinterpret_cast<const E*>(c.state.body_k) + int64_t(head) * p.body_slots * p.key_dim;
  const E* tail = reinterpret_cast<const E*>(c.state.tail_k) + int64_t(head) * p.tail_slots * p.key_dim;
  Ahead nothing_ahead = {nullptr, nullptr};
  score_tile<E, R, vectors_for(R)>(body, body_blocks, p.key_dim, queries, work, stride, nothing_ahead);
  score_tile<E, R, vectors_for(R)>(tail, tail_blocks, p.key_dim, queries, work + tail_at, stride, nothing_ahead);

  const int32_t* positions = c.state.body_pos + int64_t(head) * p.body_slots;
  const Vec nothing = splat(kNothing);
  for (int r = 0; r < R; ++r) {
    float* row = work + r * stride;
    const int64_t oldest = p.sliding_window > 0 ? position[r] - p.sliding_window : -1;
    const int body_lo = oldest < 0 ? 0 : first_after(positions, c.body_count, oldest);
    const int tail_lo = oldest < c.tail_base ? 0 : int(oldest - c.tail_base + 1), tail_hi = int(position[r] - c.tail_base + 1);
    const struct {
      int at, lo, hi, slots, candidate;
    } parts[2] = {{0, body_lo, c.body_count, c.body_count, 0}, {tail_at, tail_lo, tail_hi, c.tail_count, c.body_count}};

    Vec top = nothing;
    for (const auto& part : parts) {
      for (int b = 0; b < part.slots; b += kLanes) {
        Vec x = load(row + part.at + b);
        if (p.softcap > 0) x = mul(tanh(x), splat(p.softcap * kLog2E));
        x = keep_lanes(x, part.lo - b, part.hi - b, nothing);
        store(row + part.at + b, x);
        top = max(x, top);
      }
    }
    const Vec base = splat(max_lanes(top));
    Vec sums = zero();
    for (const auto& part : parts) {
      for (int b = 0; b < part.slots; b += kLanes) {
        const Vec weight = exp2(sub(load(row + part.at + b), base));
        store(row + part.at + b, weight);
        sums = add(sums, weight);
      }
    }
    const float factor = 1.0f / sum_lanes(sums);  // a query sees at least its own key
    for (const auto& part : parts) {
      for (int i = part.lo; i < part.hi; ++i) {
        score[part.candidate + i] += row[part.at + i] * factor;
        seen[part.candidate + i] += 1.0f;
      }
    }
  }
}

template <class E, int R>
inline void observe_rows(int rows, const Compaction& c, int head, const float* queries, const int64_t* position, float* work, float* score,
                         float* seen) {
  if constexpr (R > 1) {
    if (rows < R) return observe_rows<E, R - 1>(rows, c, head, queries, position, work, score, seen);
  }
  observe_block<E, R>(c, head, queries, position, work, score, seen);
}

template <class E>
void observe_head(const Compaction& c, int head, float* score, float* seen, float* work) {
  const auto& p = c.params;
  const float factor = p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E;
  float* queries = work + kRowBlock * edgekv::padded_candidates(c);
  const int all = p.observe * c.group;
  for (int first = 0; first < all; first += kRowBlock) {
    const int rows = all - first < kRowBlock ? all - first : kRowBlock;
    int64_t position[kRowBlock];
    for (int r = 0; r < rows; ++r) {
      const int observed = (first + r) / c.group, h = head * c.group + (first + r) % c.group;
      const E* q = reinterpret_cast<const E*>(c.state.tail_q) + (int64_t(h) * p.observe + observed) * p.key_dim;
      position[r] = c.tail_base + p.tail_slots - p.observe + observed;
      for (int d = 0; d < p.key_dim; d += kLanes) {
        const int lanes = p.key_dim - d < kLanes ? p.key_dim - d : kLanes;
        float x[kLanes];
        store(x, mul(load_first(q + d, lanes), splat(factor)));
        for (int i = 0; i < lanes; ++i) queries[(d + i) * rows + r] = x[i];
      }
    }
    observe_rows<E, kRowBlock>(rows, c, head, queries, position, work, score, seen);
  }
}

inline void observe(const Compaction& c, int head, float* score, float* seen, float* work) {
  if (c.params.element == edgekv::kFloat16)
    observe_head<uint16_t>(c, head, score, seen, work);
  else
    observe_head<float>(c, head, score, seen, work);
}

// ---- rank_keys: how little each key is like all of them (KeyDiff, arXiv 2504.15364)

// Calls use(first candidate, tokens, dimension d -> vector) for each block of 16 candidates, body first; lanes beyond `tokens` are 0.
template <class E, class F>
inline void each_key_block(const Compaction& c, int head, F use) {
  const int dim = c.params.key_dim;
  const struct {
    const void* plane;
    int slots, count, candidate;
  } parts[2] = {{c.state.body_k, c.params.body_slots, c.body_count, 0}, {c.state.tail_k, c.params.tail_slots, c.tail_count, c.body_count}};
  for (const auto& part : parts) {
    const E* keys = static_cast<const E*>(part.plane) + int64_t(head) * part.slots * dim;
    for (int b = 0; b < part.count; b += kLanes, keys += int64_t(dim) * kLanes) {
      const int tokens = part.count - b < kLanes ? part.count - b : kLanes;
      use(part.candidate + b, tokens, [&](int d) {
        const Vec key = load(keys + d * kLanes);
        return tokens == kLanes ? key : keep_lanes(key, 0, tokens, zero());
      });
    }
  }
}

// work: one vector per dimension for the sum of all keys at unit length, then 1 / length of every key.
template <class E>
void rank_keys_head(const Compaction& c, int head, float* ranking, float* work) {
  const int dim = c.params.key_dim;
  float *sum = work, *inverse = work + dim * kLanes;
  for (int d = 0; d < dim; ++d) store(sum + d * kLanes, zero());
  each_key_block<E>(c, head, [&](int, int, auto key) {
    Vec squares = zero();
    for (int d = 0; d < dim; ++d) squares = fma(key(d), key(d), squares);
    float length[kLanes];
    store(length, max(squares, splat(1.17549435e-38f)));
    for (int i = 0; i < kLanes; ++i) inverse[i] = 1.0f / __builtin_sqrtf(length[i]);
    const Vec factor = load(inverse);
    for (int d = 0; d < dim; ++d) store(sum + d * kLanes, fma(key(d), factor, load(sum + d * kLanes)));
    inverse += kLanes;
  });
  for (int d = 0; d < dim; ++d) sum[d] = sum_lanes(load(sum + d * kLanes));
  inverse = work + dim * kLanes;
  each_key_block<E>(c, head, [&](int candidate, int tokens, auto key) {
    Vec along = zero();
    for (int d = 0; d < dim; ++d) along = fma(key(d), splat(sum[d]), along);
    store_first(ranking + candidate, sub(zero(), mul(along, load(inverse))), tokens);
    inverse += kLanes;
  });
}

inline void rank_keys(const Compaction& c, int head, float* ranking, float* work) {
  if (c.params.element == edgekv::kFloat16)
    rank_keys_head<uint16_t>(c, head, ranking, work);
  else
    rank_keys_head<float>(c, head, ranking, work);
}

// ---- move: kept tokens to their new slots

// Sixteen tokens on their way to one key block: where each lane's key starts, and the column of its rotation.
template <class E>
struct Lanes {
  const E* from[kLanes];  // dimension d is from[lane][d * kLanes]
  int column[kLanes];
  bool whole;    // the lanes of one block, in order
  bool together;  // all rotate by the same amount
  int count;

  Vec key(int d) const {
    if (whole) return load(from[0] + d * kLanes);
    E x[kLanes] = {};
    for (int i = 0; i < count; ++i) x[i] = from[i][d * kLanes];
    return load(x);
  }
  Vec entry(const float* row) const {
    if (together) return splat(row[column[0]]);
    float x[kLanes] = {};
    for (int i = 0; i < count; ++i) x[i] = row[column[i]];
    return load(x);
  }
};

// Writes the key block `to`. Everything a pair of dimensions needs is read before it is written, so a source may be the
// block itself.
template <class E>
void move_block(const Compaction& c, const Lanes<E>& lanes, bool turned, E* to) {
  const auto& p = c.params;
  const int rotated = turned ? p.rotary_dim : 0, half = rotated / 2;
  for (int i = 0; i < half; ++i) {
    const int d = p.rotary_interleaved ? 2 * i : i, e = p.rotary_interleaved ? 2 * i + 1 : i + half;
    const Vec a = lanes.key(d), b = lanes.key(e);
    const Vec cos = lanes.entry(c.cos + int64_t(i) * c.turns), sin = lanes.entry(c.sin + int64_t(i) * c.turns);
    store_first(to + d * kLanes, sub(mul(a, cos), mul(b, sin)), lanes.count);
    store_first(to + e * kLanes, add(mul(b, cos), mul(a, sin)), lanes.count);
  }
  for (int d = rotated; d < p.key_dim; ++d) {
    if (lanes.whole && lanes.count == kLanes) {
      std::memmove(to + d * kLanes, lanes.from[0] + d * kLanes, kLanes * sizeof(E));
    } else {
      E x[kLanes];
      for (int i = 0; i < lanes.count; ++i) x[i] = lanes.from[i][d * kLanes];
      std::memcpy(to + d * kLanes, x, size_t(lanes.count) * sizeof(E));
    }
  }
}

template <class E>
void move_key_blocks(const Compaction& c, int head, const int32_t* kept) {
  const auto& p = c.params;
  E* body = reinterpret_cast<E*>(c.state.body_k) + int64_t(head) * p.body_slots * p.key_dim;
  const E* tail = reinterpret_cast<const E*>(c.state.tail_k) + int64_t(head) * p.tail_slots * p.key_dim;
  uint64_t moved = 0;
  for (int first = 0; first < c.new_count; first += kLanes) {
    Lanes<E> lanes;
    lanes.count = c.new_count - first < kLanes ? c.new_count - first : kLanes;
    lanes.whole = lanes.together = true;
    bool turned = false, stays = true;
    for (int i = 0; i < lanes.count; ++i) {
      const int from = kept[first + i], slot = from < c.body_count ? from : from - c.body_count;
      const E* plane = from < c.body_count ? body : tail;
      const int64_t turn = c.turn + first + i - from;
      lanes.from[i] = plane + int64_t(slot / kLanes) * p.key_dim * kLanes + slot % kLanes;
      lanes.column[i] = int(turn - c.least_turn);
      lanes.whole = lanes.whole && slot % kLanes == i && lanes.from[i] == lanes.from[0] + i;
      lanes.together = lanes.together && lanes.column[i] == lanes.column[0];
      turned = turned || (c.cos != nullptr && turn != 0);
      stays = stays && from == first + i && from < c.body_count;
    }
    if (stays && !turned) continue;
    move_block(c, lanes, turned, body + int64_t(first / kLanes) * p.key_dim * kLanes);
    moved += uint64_t(lanes.count) * p.key_dim * sizeof(E);
  }
  __atomic_fetch_add(c.read, moved, __ATOMIC_RELAXED);
  __atomic_fetch_add(c.written, moved, __ATOMIC_RELAXED);
}

// Values and positions move as runs of neighbours; going up, a run never lands on one that is still to be read.
inline void move_values(const Compaction& c, int head, const int32_t* kept) {
  const auto& p = c.params;
  const size_t row = size_t(p.value_dim) * (p.element == edgekv::kFloat16 ? 2 : 4);
  uint8_t* body = c.state.body_v + size_t(head) * p.body_slots * row;
  const uint8_t* tail = c.state.tail_v + size_t(head) * p.tail_slots * row;
  int32_t* positions = c.state.body_pos + int64_t(head) * p.body_slots;
  uint64_t moved = 0;
  for (int first = 0, end; first < c.new_count; first = end) {
    const int from = kept[first];
    const bool in_body = from < c.body_count;
    for (end = first + 1; end < c.new_count && kept[end] == from + (end - first) && (kept[end] < c.body_count) == in_body; ++end) {
    }
    if (from == first && in_body) continue;
    const size_t count = size_t(end - first);
    std::memmove(body + size_t(first) * row, in_body ? body + size_t(from) * row : tail + size_t(from - c.body_count) * row, count * row);
    if (in_body)
      std::memmove(positions + first, positions + from, count * sizeof(int32_t));
    else
      for (size_t i = 0; i < count; ++i) positions[first + i] = int32_t(c.tail_base + from - c.body_count + int64_t(i));
    moved += count * (row + sizeof(int32_t));
  }
  __atomic_fetch_add(c.read, moved, __ATOMIC_RELAXED);
  __atomic_fetch_add(c.written, moved, __ATOMIC_RELAXED);
}

inline void move_keys(const Compaction& c, int head, const int32_t* kept) {
  if (c.params.element == edgekv::kFloat16)
    move_key_blocks<uint16_t>(c, head, kept);
  else
    move_key_blocks<float>(c, head, kept);
}

}  // namespace
