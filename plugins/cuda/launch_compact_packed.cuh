// Host side of a compaction of a compressed layer.
#pragma once
#include "launch.cuh"
#include "move_packed.cuh"
#include "pack_tokens.cuh"
#include "unpack_candidates.cuh"

namespace edgekv {
namespace cuda {

// Where the arrays of a compaction lie in its workspace. `ranking`: the same compaction of the dense layer that candidates are
// unpacked to, where they are ranked. Returns the size; fills the pointers when `workspace` is given.
inline size_t place_packed_compaction(Compaction& c, Compaction& ranking, unsigned char* workspace) {
  const LayerParams& p = c.layer.p;
  const size_t tokens = size_t(p.kv_heads) * p.tail_slots;
  Places places{workspace};
  places.take(c.source, size_t(p.kv_heads) * p.body_slots);
  places.take(c.spread, tokens * p.key_dim);
  places.take(c.codes, tokens * (p.key_dim / 4));
  places.take(c.records, tokens * record_layout(p).bytes);
  c.query_rows = keeps_scores(p) ? p.observe * (p.q_heads / p.kv_heads) : 0;
  if (p.keep != kKeepHeavy) return places.used;
  const LayerParams q = candidates_params(p);
  unsigned char *state, *rest;
  places.take(state, state_layout(q).bytes);
  ranking = {};
  ranking.layer = make_layer(q, state);
  ranking.position = ranking.rank_base = c.position;
  ranking.ranks_always = 1;
  places.take(rest, 0);
  places.used += place_compaction(ranking, rest);
  c.capacity = ranking.capacity;
  c.score = ranking.score;
  c.seen = ranking.seen;
  return places.used;
}

inline size_t packed_compaction_workspace_bytes(const LayerParams& p) {
  Compaction c{}, ranking{};
  c.layer.p = p;
  return place_packed_compaction(c, ranking, nullptr);
}

template <typename Elem>
void launch_packed_compaction(const Compaction& c, const Compaction& ranking, cudaStream_t stream) {
  const LayerParams& p = c.layer.p;
  const dim3 threads(kThreads), by_number(p.kv_heads, (p.key_dim + kThreads - 1) / kThreads);
  const int record_slices = (int(c.layer.record.bytes / 16) + kRecordUnits - 1) / kRecordUnits;
  if (p.keep == kKeepHeavy) {
    const LayerParams& q = ranking.layer.p;
    const dim3 candidates((q.body_slots + q.tail_slots) / EDGEKV_LANES, p.kv_heads);
    const Unpacking unpacking{c, ranking.layer};
    EDGEKV_LAUNCH(unpack_candidates<Elem>, candidates, threads, unpack_candidates_shared_bytes(p), stream, unpacking);
    launch_ranking<float>(ranking, stream);
  }
  EDGEKV_LAUNCH(choose_slots, dim3(p.kv_heads), dim3(kChooseThreads), kChooseSharedBytes, stream, c);
  EDGEKV_LAUNCH(interval_means<Elem>, by_number, threads, 0, stream, c);
  EDGEKV_LAUNCH(pack_tokens<Elem>, dim3((p.tail_slots + kWarps - 1) / kWarps, p.kv_heads), threads, pack_shared_bytes(p), stream, c);
  EDGEKV_LAUNCH(teach_codebook, by_number, threads, teach_shared_bytes(), stream, c);
  EDGEKV_LAUNCH(copy_sinks<Elem>, dim3(p.kv_heads), threads, 0, stream, c);
  EDGEKV_LAUNCH(move_records, dim3(p.kv_heads, record_slices), dim3(kMoveThreads), 0, stream, c);
  EDGEKV_LAUNCH(move_codes, dim3(p.kv_heads, (p.key_dim / 4 + kCodeGroups - 1) / kCodeGroups), dim3(kMoveThreads), 0, stream, c);
  EDGEKV_LAUNCH(move_metadata, dim3(p.kv_heads), dim3(kMoveThreads), 0, stream, c);
  EDGEKV_LAUNCH(commit_packed, dim3(1), dim3(32), 0, stream, c);
}

}  // namespace cuda
}  // namespace edgekv
