// The T rows a step brings: queries, keys and values as activations, with the rotation applied where the op fuses it.
#pragma once
#include "layer.cuh"

namespace edgekv {
namespace cuda {

// Number d of row t and head h lies at data[t * row + h * head + d]: covers both [T, heads * dim] and [heads, T, dim].
struct Rows {
  const void* data;
  long long row, head;
};

// Up to this many rows (decoding, verification) the splits run side by side; longer blocks (prefill) walk through them. A row of a
// compressed cache retrieves only in the former: a prompt's rows attend to everything.
constexpr int kSideBySideRows = 16;

// One step of one layer. Passed to kernels by value.
struct Step {
  Layer layer;
  Rows q, k, v;
  int half;                   // q, k, v and y are float16 instead of float32
  const void* cos;            // [T, table], with fused_rotary only; the first rotary_dim / 2 columns are used, or those of each kv head
  const void* sin;
  int table;                  // columns of cos and sin
  int table_half;             // cos and sin are float16 instead of float32
  const long long* position;  // committed tokens before the step, in device memory
  int rows;                   // T
  void* y;                    // [T, q_heads * value_dim]
  int row_block;              // query rows of one block of the attention kernel
  int split;                  // slots per split (launch.cuh), a multiple of the tile
  float* part;                // [splits][T * q_heads][value_dim + 2]: weighted values, then maximum and sum of the softmax
  int walks;                  // one block walks through all splits
  // Of a compressed cache:
  const unsigned* slots;      // [kv_heads][T][body_slots / 32] bits of the body slots that each row attends to; null: all
  float* body_part;           // parts of the compressed body, as `part` is of sinks and tail; values still transformed. Blocks that
                              // walk leave one part in each
  float* turned;              // [T][q_heads][key_dim] queries, transformed
  float* of_mean;             // [T][q_heads][intervals] products of queries with mean keys
};

// What a step finds. Of a compressed cache, `retrieve` is 0 without slots; a step that should retrieve and cannot is not ok.
EDGEKV_DEVICE Tail read_step(const Step& s) {
  Tail t = read_tail(s.layer, *s.position, s.rows);
  if (!s.slots) t.retrieve = 0;
  const StateHeader* h = header(s.layer);
  if (t.retrieve > 0) t.ok = t.ok && s.rows <= kSideBySideRows && h->hidden_from == h->hidden_to;
  return t;
}

EDGEKV_DEVICE float load_number(int half, const void* data, long long at) {
  return half ? to_float(static_cast<const __half*>(data)[at]) : static_cast<const float*>(data)[at];
}
EDGEKV_DEVICE void store_activation(const Step& s, void* data, long long at, float v) {
  if (s.half) static_cast<__half*>(data)[at] = from_float<__half>(v);
  else static_cast<float*>(data)[at] = v;
}

// Number d of row t, head h, which belongs to kv_head, rotated when the op does that. Products are rounded before one fma combines them, so
// that every kernel that asks gets the same bits.
EDGEKV_DEVICE float load_rotated(const Step& s, const Rows& x, int t, int h, int kv_head, int d) {
  const long long at = t * x.row + h * x.head;
  const LayerParams& p = s.layer.p;
  const float own = load_number(s.half, x.data, at + d);
  if (!p.fused_rotary || d >= p.rotary_dim) return own;
  const int half = p.rotary_dim / 2;
  const int pair = p.rotary_interleaved ? d / 2 : d % half;
  const bool second = p.rotary_interleaved ? d & 1 : d >= half;
  const int distance = p.rotary_interleaved ? 1 : half;
  const float other = load_number(s.half, x.data, at + (second ? d - distance : d + distance));
  const long long angle = (long long)t * s.table + (p.fused_rotary == kRotaryByHead ? kv_head * half : 0) + pair;
  const float product = __fmul_rn(other, load_number(s.table_half, s.sin, angle));
  return fmaf(own, load_number(s.table_half, s.cos, angle), second ? product : -product);
}
EDGEKV_DEVICE float load_query(const Step& s, int t, int h, int d) {
  return load_rotated(s, s.q, t, h, h / (s.layer.p.q_heads / s.layer.p.kv_heads), d);
}
EDGEKV_DEVICE float load_key(const Step& s, int t, int h, int d) { return load_rotated(s, s.k, t, h, h, d); }

}  // namespace cuda
}  // namespace edgekv
