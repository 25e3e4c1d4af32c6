// Host side of a step on a compressed cache: sinks and tail through the dense kernels, the body through its own, and both merged.
#pragma once
#include "attend_packed.cuh"
#include "combine_packed.cuh"
#include "launch.cuh"
#include "turn_queries.cuh"

namespace edgekv {
namespace cuda {

inline Step sinks_view(Step s) {
  s.layer = sinks_view(s.layer);
  return s;
}

// Where the arrays of a step of s.rows rows lie in its workspace. Returns the size; fills the pointers when `workspace` is given.
inline size_t place_packed_step(Step& s, unsigned char* workspace) {
  const LayerParams& p = s.layer.p;
  const size_t queries = size_t(p.q_heads) * s.rows, width = size_t(p.value_dim) + 2;
  s.walks = s.rows > kSideBySideRows;
  Places places{workspace};
  places.take(s.part, (s.walks ? 1 : all_splits(sinks_view(s.layer).p, s.split)) * queries * width);
  places.take(s.body_part, (s.walks ? 1 : splits_of(p.body_slots, s.split)) * queries * width);
  places.take(s.turned, queries * p.key_dim);
  places.take(s.of_mean, queries * p.intervals);
  return places.used;
}

inline size_t packed_step_workspace_bytes(const LayerParams& p, int rows) {
  Step s{};
  s.layer.p = p;
  s.split = split_slots(p);
  s.rows = rows < kSideBySideRows ? rows : kSideBySideRows;
  const size_t few = place_packed_step(s, nullptr);
  s.rows = rows;
  const size_t many = place_packed_step(s, nullptr);
  return few > many ? few : many;
}

template <int RowsPerWarp, int ValueChunks, bool Walk>
void launch_attend_packed(const Step& s, cudaStream_t stream) {
  (void)stream;
  const LayerParams& p = s.layer.p;
  const int group = p.q_heads / p.kv_heads, rows = RowsPerWarp * kWarps;
  // Whether rows choose stands in the state's header: there are blocks for both.
  const int row_tiles = Walk ? (s.rows * group + rows - 1) / rows : s.rows * ((group + rows - 1) / rows);
  const int value_tiles = (chunks(p.value_dim) + ValueChunks - 1) / ValueChunks;
  const size_t bytes = attend_packed_shared_bytes<RowsPerWarp>(p.key_dim);
  const auto kernel = attend_packed<RowsPerWarp, ValueChunks, Walk>;
  allow_shared(kernel, bytes);
  EDGEKV_LAUNCH(kernel, dim3(Walk ? 1 : splits_of(p.body_slots, s.split), p.kv_heads, row_tiles * value_tiles), dim3(kThreads), bytes, stream, s);
}

template <int ValueChunks>
void launch_attend_packed_rows(const Step& s, cudaStream_t stream) {
  const int group = s.layer.p.q_heads / s.layer.p.kv_heads;  // a block takes the rows of one token
  if (s.walks) launch_attend_packed<4, ValueChunks, true>(s, stream);
  else if (group <= kWarps) launch_attend_packed<1, ValueChunks, false>(s, stream);
  else if (group <= 2 * kWarps) launch_attend_packed<2, ValueChunks, false>(s, stream);
  else launch_attend_packed<4, ValueChunks, false>(s, stream);
}

// s as place_packed_step leaves it, with row_block for the dense kernels.
template <typename Elem>
void launch_packed_step(const Step& s, cudaStream_t stream) {
  const LayerParams& p = s.layer.p;
  const Step view = sinks_view(s);
  launch_dense<Elem>(view, stream);
  if (p.body_slots > 0) {
    EDGEKV_LAUNCH(turn_queries, dim3(s.rows, p.q_heads), dim3(kThreads), turn_queries_shared_bytes(p), stream, s);
    const int value_chunks = chunks(p.value_dim);
    if (value_chunks == 1) launch_attend_packed_rows<1>(s, stream);
    else if (value_chunks == 2) launch_attend_packed_rows<2>(s, stream);
    else launch_attend_packed_rows<4>(s, stream);  // wider values take several blocks
  }
  const Combination all{view, p.body_slots > 0 ? splits_of(p.body_slots, s.split) : 0};
  EDGEKV_LAUNCH(combine_packed, dim3(s.rows * p.q_heads), dim3(kCombineThreads), combine_packed_shared_bytes(p), stream, all);
}

}  // namespace cuda
}  // namespace edgekv
