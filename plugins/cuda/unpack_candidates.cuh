// The candidates of a compressed cache as a dense state of float32 in the workspace, so that the dense kernels rank them
// (observe.cuh, rank_keys.cuh): the sinks and the body's stored keys as its body, the tail as its tail.
#pragma once
#include "observe.cuh"
#include "packed_body.cuh"

namespace edgekv {
namespace cuda {

// The parameters of that state.
inline LayerParams candidates_params(LayerParams p) {
  p.body_slots = (p.sinks + p.body_slots + EDGEKV_LANES - 1) / EDGEKV_LANES * EDGEKV_LANES;
  p.format = kFormatDense;
  p.element = kFloat32;
  p.sinks = 0;
  p.window = 0;
  p.value_dim = 1;
  return p;
}

EDGEKV_HOST_DEVICE size_t unpack_candidates_shared_bytes(const LayerParams& p) { return sizeof(float) * kWarps * p.key_dim; }

// A compaction of a compressed layer, and the layer in the workspace.
struct Unpacking {
  Compaction c;
  Layer dense;
};

// Grid (blocks of EDGEKV_LANES candidates of dense.p's body and tail, kv_heads), kThreads threads: a warp takes a token. Ranking by
// keys knows no sinks: theirs are zeros, which change no sum.
template <typename Elem>
__global__ void __launch_bounds__(kThreads) unpack_candidates(const Unpacking u) {
  EDGEKV_SHARED(shared);
  const Layer &from = u.c.layer, &to = u.dense;
  const LayerParams& p = from.p;
  const int kv_head = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, dim = p.key_dim;
  float* x = reinterpret_cast<float*>(shared) + warp * dim;
  const Tail tail = read_boundary(u.c);
  StateHeader* out = header(to);
  const Moves m = moves_of(u.c, tail);
  const bool wanted = tail.ok && (keeps_scores(p) || m.candidates > p.body_slots);
  if (blockIdx.x == 0 && kv_head == 0 && threadIdx.x == 0) {
    out->magic = wanted ? EDGEKV_STATE_MAGIC : 0;  // without it the kernels that rank do nothing
    out->layout_version = EDGEKV_LAYOUT_VERSION;
    out->params_hash = to.hash;
    out->tail_base = tail.base;
    out->body_count = m.sinks_before + tail.body;
    out->hidden_from = out->hidden_to = 0;
  }
  if (!wanted) return;
  const PackedBody b = packed_body(from, kv_head, tail.base);
  const int body_blocks = to.p.body_slots / EDGEKV_LANES;
  const bool in_tail = int(blockIdx.x) >= body_blocks;
  float* keys = plane<float>(to, in_tail ? to.at.tail_k : to.at.body_k);
  for (int j = warp; j < EDGEKV_LANES; j += kWarps) {
    const int slot = (int(blockIdx.x) - (in_tail ? body_blocks : 0)) * EDGEKV_LANES + j, body_slot = slot - m.sinks_before;
    if (!in_tail && body_slot >= tail.body) break;
    const bool sink = in_tail ? slot < m.to_sinks : body_slot < 0;
    if (!in_tail && !sink) {
      for (int i = lane; i < (dim + EDGEKV_GROUP - 1) / EDGEKV_GROUP * 2; i += 32) {
        float part[16];
        unpack_key(b, body_slot, i / 2, i % 2, part);
        for (int n = 0; n < 16; ++n) {
          const int d = i / 2 * EDGEKV_GROUP + n / 4 * 8 + i % 2 * 4 + n % 4;
          if (d < dim) x[d] = part[n];
        }
      }
      __syncwarp();
      warp_hadamard(x, dim, lane);
    }
    const __half* mean = b.mean + size_t(in_tail || sink ? 0 : interval_of(b, b.positions[body_slot])) * dim;
    for (int d = lane; d < dim; d += 32) {
      float number = 0.0f;
      if (!sink || keeps_scores(p))
        number = in_tail ? to_float(plane<Elem>(from, from.at.tail_k)[key_offset(kv_head, slot, d, p.tail_slots, dim)])
                 : sink  ? to_float(plane<Elem>(from, from.at.sink_k)[key_offset(kv_head, slot, d, sink_slots(p), dim)])
                         : __fadd_rn(x[d], to_float(mean[d]));
      keys[key_offset(kv_head, slot, d, in_tail ? p.tail_slots : to.p.body_slots, dim)] = number;
    }
    __syncwarp();  // the next token's key takes the place of this one
    if (in_tail || lane != 0) continue;
    const size_t at = size_t(kv_head) * to.p.body_slots + slot, old = size_t(kv_head) * p.body_slots + body_slot;
    plane<int32_t>(to, to.at.body_pos)[at] = sink ? slot : b.positions[body_slot];
    if (!keeps_scores(p)) continue;
    plane<float>(to, to.at.body_score)[at] = sink ? 0.0f : plane<float>(from, from.at.body_score)[old];
    plane<float>(to, to.at.body_seen)[at] = sink ? 0.0f : plane<float>(from, from.at.body_seen)[old];
  }
  if (!keeps_scores(p)) return;
  const size_t queries = size_t(p.q_heads) * p.observe * dim, threads = size_t(gridDim.x) * gridDim.y * kThreads;
  for (size_t i = (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x; i < queries; i += threads)
    plane<float>(to, to.at.tail_q)[i] = to_float(plane<Elem>(from, from.at.tail_q)[i]);
}

}  // namespace cuda
}  // namespace edgekv
