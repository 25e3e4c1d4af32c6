// Compresses the tokens that leave the tail (docs/self_index.md, "Formulas"), into the workspace: which of them stay is decided apart.
//
//   interval_means   the interval's mean key, sinks left out
//   pack_tokens      sign codes and records
//   teach_codebook   the centroids' running means, token after token
//   copy_sinks       the first tokens of the text, in full
#pragma once
#include "observe.cuh"
#include "packed_body.cuh"
#include "quantise.cuh"

namespace edgekv {
namespace cuda {

// Grid (kv_heads, ceil(key_dim / kThreads)), kThreads threads.
template <typename Elem>
__global__ void __launch_bounds__(kThreads) interval_means(const Compaction c) {
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  const int kv_head = int(blockIdx.x), d = int(blockIdx.y) * kThreads + int(threadIdx.x);
  if (!tail.ok || d >= p.key_dim) return;
  const Moves m = moves_of(c, tail);
  if (m.added == 0) return;
  const Elem* keys = plane<Elem>(c.layer, c.layer.at.tail_k);
  float sum = 0.0f;
  for (int t = m.to_sinks; t < p.tail_slots; ++t) sum = __fadd_rn(sum, to_float(keys[key_offset(kv_head, t, d, p.tail_slots, p.key_dim)]));
  __half* mean = plane<__half>(c.layer, c.layer.at.mean) + (size_t(kv_head) * p.intervals + tail.base / p.tail_slots) * p.key_dim;
  mean[d] = from_float<__half>(sum / float(m.added));
}

EDGEKV_HOST_DEVICE size_t pack_shared_bytes(const LayerParams& p) { return sizeof(float) * kWarps * (p.key_dim + p.value_dim); }

// Grid (ceil(tail_slots / kWarps), kv_heads), kThreads threads: a warp takes a token.
template <typename Elem>
__global__ void __launch_bounds__(kThreads) pack_tokens(const Compaction c) {
  EDGEKV_SHARED(shared);
  const LayerParams& p = c.layer.p;
  const RecordLayout& layout = c.layer.record;
  const int kv_head = int(blockIdx.y), lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, dim = p.key_dim;
  const int token = int(blockIdx.x) * kWarps + warp;  // among the new ones
  float *x = reinterpret_cast<float*>(shared) + warp * (dim + p.value_dim), *y = x + dim;  // the key and the value
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const Moves m = moves_of(c, tail);
  if (token >= m.added) return;
  const int slot = m.to_sinks + token;
  const size_t at = size_t(kv_head) * p.tail_slots + token;
  const __half* mean = plane<__half>(c.layer, c.layer.at.mean) + (size_t(kv_head) * p.intervals + tail.base / p.tail_slots) * dim;
  const Elem* keys = plane<Elem>(c.layer, c.layer.at.tail_k);
  for (int d = lane; d < dim; d += 32) x[d] = __fadd_rn(to_float(keys[key_offset(kv_head, slot, d, p.tail_slots, dim)]), -to_float(mean[d]));
  __syncwarp();
  warp_hadamard(x, dim, lane);
  for (int d = lane; d < dim; d += 32) c.spread[at * dim + d] = x[d];
  for (int g = lane; g < dim / 4; g += 32) {
    unsigned code = 0;
    for (int i = 0; i < 4; ++i) code |= unsigned(x[4 * g + i] >= 0.0f) << i;
    c.codes[at * (dim / 4) + g] = static_cast<unsigned char>(code);
  }
  unsigned char* record = c.records + at * layout.bytes;
  for (int first = 0, g = 0; first < dim; first += EDGEKV_GROUP, ++g)
    quantise_group(fabsf(x[first + lane < dim ? first + lane : dim - 1]), p.key_bits, true, lane, record + 4 * p.key_bits * g,
                   reinterpret_cast<__half*>(record + layout.key_pairs) + 2 * g);
  const Elem* value = plane<Elem>(c.layer, c.layer.at.tail_v) + (size_t(kv_head) * p.tail_slots + slot) * p.value_dim;
  for (int d = lane; d < p.value_dim; d += 32) y[d] = to_float(value[d]);
  __syncwarp();
  warp_hadamard(y, p.value_dim, lane);
  int used = int(layout.value_pairs);
  for (int first = 0, g = 0; first < p.value_dim; first += EDGEKV_GROUP, ++g, used += 4)
    quantise_group(y[first + lane < p.value_dim ? first + lane : p.value_dim - 1], p.value_bits, false, lane, record + layout.values + 4 * p.value_bits * g,
                   reinterpret_cast<__half*>(record + layout.value_pairs) + 2 * g);
  for (int i = used + lane; i < int(layout.bytes); i += 32) record[i] = 0;
}

EDGEKV_HOST_DEVICE size_t teach_shared_bytes() { return sizeof(float) * 2 * 16 * kThreads; }

// Grid (kv_heads, ceil(key_dim / kThreads)), kThreads threads: a thread has one number of a group's 16 centroids, and its own copy of
// their counts.
__global__ void __launch_bounds__(kThreads) teach_codebook(const Compaction c) {
  EDGEKV_SHARED(shared);
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  const int kv_head = int(blockIdx.x), d = int(blockIdx.y) * kThreads + int(threadIdx.x), groups = p.key_dim / 4, g = d / 4;
  if (!tail.ok) return;
  const bool works = d < p.key_dim;  // threads that do not still take part in the barrier
  const Moves m = moves_of(c, tail);
  float* centroid = reinterpret_cast<float*>(shared) + threadIdx.x;  // of code n at n * kThreads
  float* seen = centroid + 16 * kThreads;
  float* codebook = plane<float>(c.layer, c.layer.at.codebook) + (size_t(kv_head) * groups + g) * 64 + d % 4;
  float* counts = plane<float>(c.layer, c.layer.at.code_seen) + (size_t(kv_head) * groups + g) * 16;
  for (int code = 0; works && code < 16; ++code) centroid[code * kThreads] = codebook[4 * code], seen[code * kThreads] = counts[code];
  __syncthreads();  // the counts are read by four threads and written by one
  for (int t = 0; works && t < m.added; ++t) {
    const size_t at = size_t(kv_head) * p.tail_slots + t;
    const int code = c.codes[at * groups + g] * kThreads;
    seen[code] = __fadd_rn(seen[code], 1.0f);
    centroid[code] = __fadd_rn(centroid[code], __fadd_rn(c.spread[at * p.key_dim + d], -centroid[code]) / seen[code]);
  }
  for (int code = 0; works && code < 16; ++code) {
    codebook[4 * code] = centroid[code * kThreads];
    if (d % 4 == 0) counts[code] = seen[code * kThreads];
  }
}

// Grid (kv_heads), kThreads threads.
template <typename Elem>
__global__ void __launch_bounds__(kThreads) copy_sinks(const Compaction c) {
  const LayerParams& p = c.layer.p;
  const Tail tail = read_boundary(c);
  if (!tail.ok) return;
  const Moves m = moves_of(c, tail);
  const int kv_head = int(blockIdx.x), room = sink_slots(p);
  Elem *k = plane<Elem>(c.layer, c.layer.at.sink_k), *v = plane<Elem>(c.layer, c.layer.at.sink_v) + size_t(kv_head) * room * p.value_dim;
  const Elem* tail_k = plane<Elem>(c.layer, c.layer.at.tail_k);
  const Elem* tail_v = plane<Elem>(c.layer, c.layer.at.tail_v) + size_t(kv_head) * p.tail_slots * p.value_dim;
  for (int i = int(threadIdx.x); i < m.to_sinks * p.key_dim; i += kThreads)
    k[key_offset(kv_head, m.sinks_before + i / p.key_dim, i % p.key_dim, room, p.key_dim)] =
        tail_k[key_offset(kv_head, i / p.key_dim, i % p.key_dim, p.tail_slots, p.key_dim)];
  for (int i = int(threadIdx.x); i < m.to_sinks * p.value_dim; i += kThreads) v[size_t(m.sinks_before) * p.value_dim + i] = tail_v[i];
}

}  // namespace cuda
}  // namespace edgekv
