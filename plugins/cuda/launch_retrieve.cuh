// Host side of SignVQRetrieval: launches and workspace. As in launch.cuh nothing here reads device memory: how many slots are wanted
// stands in the state's header, and kernels that have nothing to do end at once.
#pragma once
#include "launch.cuh"
#include "rank_candidates.cuh"
#include "turn_queries.cuh"

namespace edgekv {
namespace cuda {

// Where the arrays of a retrieval of r.s.rows rows lie in its workspace. Returns the size; fills the pointers when `workspace` is given.
inline size_t place_retrieval(Retrieval& r, unsigned char* workspace) {
  const LayerParams& p = r.s.layer.p;
  const size_t rows = size_t(p.kv_heads) * r.s.rows, queries = size_t(p.q_heads) * r.s.rows;
  Places places{workspace};
  places.take(r.s.turned, queries * p.key_dim);
  places.take(r.s.of_mean, queries * p.intervals);
  places.take(r.table, rows * 4 * p.key_dim);
  places.take(r.bias, rows * p.intervals);
  places.take(r.score, rows * p.body_slots);
  places.take(r.candidates, rows * slot_words(p));
  places.take(r.exact, queries * p.body_slots);
  return places.used;
}

inline size_t retrieve_workspace_bytes(const LayerParams& p, int rows) {
  Retrieval r{};
  r.s.layer.p = p;
  r.s.rows = rows < kSideBySideRows ? rows : kSideBySideRows;
  return place_retrieval(r, nullptr);
}

inline void launch_retrieve(const Retrieval& r, cudaStream_t stream) {
  (void)stream;
  const LayerParams& p = r.s.layer.p;
  const auto splits = [&](int slots) { return splits_of(p.body_slots, slots); };
  if (r.s.rows > kSideBySideRows || p.body_slots == 0) return;  // such rows attend to everything
  const dim3 rows(p.kv_heads, r.s.rows), threads(kThreads), choosing(kChooseThreads);
  allow_shared(score_tables, score_tables_shared_bytes(p));
  allow_shared(score_candidates, score_candidates_shared_bytes(p));
  EDGEKV_LAUNCH(turn_queries, dim3(r.s.rows, p.q_heads), threads, turn_queries_shared_bytes(p), stream, r.s);
  EDGEKV_LAUNCH(score_tables, rows, threads, score_tables_shared_bytes(p), stream, r);
  EDGEKV_LAUNCH(scan_codes, dim3(splits(kScanSlots), p.kv_heads, r.s.rows), threads, scan_shared_bytes(p), stream, r);
  EDGEKV_LAUNCH(choose_by_codes, rows, choosing, kChooseSharedBytes, stream, r);
  EDGEKV_LAUNCH(score_candidates, dim3(splits(kWindow), p.kv_heads, r.s.rows), threads, score_candidates_shared_bytes(p), stream, r);
  EDGEKV_LAUNCH(choose_by_keys, rows, choosing, choose_by_keys_shared_bytes(p), stream, r);
}

}  // namespace cuda
}  // namespace edgekv
