// Host side: how a step and a compaction are cut into launches, and the workspace they need. Nothing here reads device memory,
// so a captured CUDA graph of a step stays valid for every position.
#pragma once
#include "append.cuh"
#include "combine.cuh"
#include "move.cuh"
#include "rank_keys.cuh"

namespace edgekv {
namespace cuda {

// Slots per split: from the layer's parameters only (attend.cuh says why). About 32 splits of a long body, none under 128 slots.
inline int split_slots(const LayerParams& p) {
  const int wanted = (p.body_slots / 32 + kTile - 1) / kTile * kTile;
  return wanted < 2 * kTile ? 2 * kTile : wanted;
}
inline int all_splits(const LayerParams& p, int split) { return splits_of(p.body_slots, split) + splits_of(p.tail_slots, split); }

inline bool walks(const LayerParams& p, int rows) { return rows > kSideBySideRows || all_splits(p, split_slots(p)) == 1; }

// Workspace of steps of 1..rows rows, in bytes.
inline size_t step_workspace_bytes(const LayerParams& p, int rows) {
  const size_t most = rows < kSideBySideRows ? rows : kSideBySideRows;
  return walks(p, 1) ? 0 : most * all_splits(p, split_slots(p)) * p.q_heads * (size_t(p.value_dim) + 2) * sizeof(float);
}

template <typename Args>
inline void allow_shared(void (*kernel)(Args), size_t bytes) {
#ifndef EDGEKV_EMULATE
  if (bytes > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
#else
  (void)kernel, (void)bytes;
#endif
}

template <typename Elem, int RowsPerWarp, int ValueChunks, bool Walk>
void launch_attend(const Step& s, cudaStream_t stream) {
  (void)stream;
  const LayerParams& p = s.layer.p;
  const int rows = s.rows * (p.q_heads / p.kv_heads), row_tiles = (rows + RowsPerWarp * kWarps - 1) / (RowsPerWarp * kWarps);
  const int value_tiles = (chunks(p.value_dim) + ValueChunks - 1) / ValueChunks;
  const size_t bytes = attend_shared_bytes<Elem, RowsPerWarp>(p.key_dim);
  const auto kernel = attend<Elem, RowsPerWarp, ValueChunks, Walk>;
  allow_shared(kernel, bytes);
  EDGEKV_LAUNCH(kernel, dim3(Walk ? 1 : all_splits(p, s.split), p.kv_heads, row_tiles * value_tiles), dim3(kThreads), bytes, stream, s);
}

// Query rows per warp: as few as hold all rows that share a kv head, at most 4.
inline int rows_per_warp(const Step& s) {
  const int all = s.rows * (s.layer.p.q_heads / s.layer.p.kv_heads);
  return s.walks || all > 2 * kWarps ? 4 : all > kWarps ? 2 : 1;
}

template <typename Elem, int ValueChunks>
void launch_attend_rows(const Step& s, cudaStream_t stream) {
  const int per_warp = s.row_block / kWarps;
  if (s.walks) launch_attend<Elem, 4, ValueChunks, true>(s, stream);
  else if (per_warp == 1) launch_attend<Elem, 1, ValueChunks, false>(s, stream);
  else if (per_warp == 2) launch_attend<Elem, 2, ValueChunks, false>(s, stream);
  else launch_attend<Elem, 4, ValueChunks, false>(s, stream);
}

// Stores the rows and attends to what lies in full.
template <typename Elem>
void launch_dense(const Step& s, cudaStream_t stream) {
  const LayerParams& p = s.layer.p;
  EDGEKV_LAUNCH(append_rows<Elem>, dim3(s.rows, p.kv_heads + p.q_heads), dim3(64), 0, stream, s);
  const int value_chunks = chunks(p.value_dim);
  if (value_chunks == 1) launch_attend_rows<Elem, 1>(s, stream);
  else if (value_chunks == 2) launch_attend_rows<Elem, 2>(s, stream);
  else launch_attend_rows<Elem, 4>(s, stream);  // wider values take several blocks
}

template <typename Elem>
void launch_step(const Step& s, cudaStream_t stream) {
  const LayerParams& p = s.layer.p;
  launch_dense<Elem>(s, stream);
  if (!s.walks) EDGEKV_LAUNCH(combine, dim3(s.rows * p.q_heads), dim3(64), 0, stream, s);
}

// Hands out parts of a workspace, each on 256 bytes; without one it only adds up.
struct Places {
  unsigned char* workspace;
  size_t used = 0;
  template <typename T>
  void take(T*& at, size_t count) {
    at = workspace ? reinterpret_cast<T*>(workspace + used) : nullptr;
    used += (count * sizeof(T) + 255) / 256 * 256;
  }
};

// Where the arrays of a compaction lie in its workspace. Returns the size; fills the pointers when `workspace` is given.
inline size_t place_compaction(Compaction& c, unsigned char* workspace) {
  const LayerParams& p = c.layer.p;
  const size_t kv = p.kv_heads;
  Places places{workspace};
  c.capacity = p.body_slots + p.tail_slots;
  c.query_rows = keeps_scores(p) ? p.observe * (p.q_heads / p.kv_heads) : 0;
  places.take(c.source, kv * p.body_slots);
  if (p.keep == kKeepHeavy) {
    places.take(c.score, kv * c.capacity);
    places.take(c.seen, kv * c.capacity);
    places.take(c.tiles, kv * tiles_of(p) * (keeps_scores(p) ? 2 * size_t(c.query_rows) : size_t(p.key_dim)));
    places.take(c.rows, kv * c.query_rows * 2);
  }
  return places.used;
}

// Ranks the candidates, where the keep rule asks for it.
template <typename Elem>
void launch_ranking(const Compaction& c, cudaStream_t stream) {
  (void)stream;
  const LayerParams& p = c.layer.p;
  const dim3 tiles(tiles_of(p), p.kv_heads), threads(kThreads);
  if (keeps_scores(p)) {
    const size_t bytes = observe_shared_bytes<Elem>();
    if (c.query_rows > 0) {
      EDGEKV_LAUNCH(observe_tiles<Elem>, tiles, threads, bytes, stream, c);
      EDGEKV_LAUNCH(observe_rows, dim3((c.query_rows + kThreads - 1) / kThreads, p.kv_heads), threads, 0, stream, c);
    }
    EDGEKV_LAUNCH(observe_columns<Elem>, tiles, threads, bytes, stream, c);
  }
  if (ranks_by_keys(p)) {
    const size_t bytes = rank_keys_shared_bytes(p);
    EDGEKV_LAUNCH(sum_keys<Elem>, tiles, threads, bytes, stream, c);
    EDGEKV_LAUNCH(rank_keys<Elem>, tiles, threads, bytes, stream, c);
  }
}

template <typename Elem>
void launch_compaction(const Compaction& c, cudaStream_t stream) {
  const LayerParams& p = c.layer.p;
  launch_ranking<Elem>(c, stream);
  EDGEKV_LAUNCH(choose_slots, dim3(p.kv_heads), dim3(kChooseThreads), kChooseSharedBytes, stream, c);
  EDGEKV_LAUNCH(move_tokens<Elem>, dim3(p.kv_heads, move_slices(p), 2), dim3(kMoveThreads), 0, stream, c);
  EDGEKV_LAUNCH(move_metadata, dim3(p.kv_heads), dim3(kMoveThreads), 0, stream, c);
  EDGEKV_LAUNCH(commit_compaction, dim3(1), dim3(32), 0, stream, c);
}

}  // namespace cuda
}  // namespace edgekv
