// Checks what the host can check and launches (launch.cuh).
#include "api.h"

#include <cstdio>

#include "launch.cuh"

namespace {

thread_local char error_text[256] = "";

int refuse(const char* sentence) {
  std::snprintf(error_text, sizeof(error_text), "%s", sentence);
  return 1;
}

int launched() {
  const cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) return 0;
  return refuse(cudaGetErrorString(e));
}

edgekv::cuda::Layer make_layer(const edgekv::LayerParams& p, void* state) {
  edgekv::cuda::Layer l{};
  l.p = p;
  l.at = edgekv::state_layout(p);
  l.hash = edgekv::params_hash(p);
  l.state = static_cast<unsigned char*>(state);
  return l;
}

edgekv::cuda::Rows make_rows(const EdgekvRows& r) { return {r.data, r.row_stride, r.head_stride}; }

}  // namespace

long long edgekv_cuda_step_workspace(const edgekv::LayerParams* p, int rows) { return (long long)edgekv::cuda::step_workspace_bytes(*p, rows); }

long long edgekv_cuda_compact_workspace(const edgekv::LayerParams* p) {
  edgekv::cuda::Compaction c{};
  c.layer.p = *p;
  return (long long)edgekv::cuda::place_compaction(c, nullptr);
}

int edgekv_cuda_step(const edgekv::LayerParams* p, void* state, const EdgekvStep* step, void* workspace, void* stream) {
  if (const char* sentence = edgekv::check_params(*p)) return refuse(sentence);
  if (step->rows < 1 || step->rows > p->tail_slots) return refuse("a step has between 1 and tail_slots rows");
  if (!state || !step->q.data || !step->k.data || !step->v.data || !step->position || !step->y) return refuse("a step needs q, k, v, position, state and y");
  if (p->fused_rotary && (!step->cos || !step->sin || step->table < p->rotary_dim / 2)) return refuse("fused_rotary needs cos and sin with rotary_dim / 2 columns");
  if (!workspace && edgekv_cuda_step_workspace(p, step->rows) > 0) return refuse("the step needs a workspace");
  edgekv::cuda::Step s{};
  s.layer = make_layer(*p, state);
  s.q = make_rows(step->q);
  s.k = make_rows(step->k);
  s.v = make_rows(step->v);
  s.half = step->half;
  s.cos = step->cos;
  s.sin = step->sin;
  s.table = step->table;
  s.table_half = step->table_half;
  s.position = step->position;
  s.rows = step->rows;
  s.y = step->y;
  s.row_block = edgekv::cuda::rows_per_warp(*p, s.rows) * edgekv::cuda::kWarps;
  s.split = edgekv::cuda::split_slots(*p);
  s.part = static_cast<float*>(workspace);
  if (p->element == edgekv::kFloat16) edgekv::cuda::launch_step<__half>(s, static_cast<cudaStream_t>(stream));
  else edgekv::cuda::launch_step<float>(s, static_cast<cudaStream_t>(stream));
  return launched();
}

int edgekv_cuda_compact(const edgekv::LayerParams* p, const float* inv_freq, void* state, long long position, long long rank_base, void* workspace,
                        void* stream) {
  if (const char* sentence = edgekv::check_params(*p)) return refuse(sentence);
  if (position < p->tail_slots || position % p->tail_slots) return refuse("compaction is for boundaries: position must be a positive multiple of tail_slots");
  // While everything fits everything is kept, so what the body holds follows from the position.
  const long long kept = position < p->body_slots ? position : p->body_slots;
  if (p->keep == edgekv::kKeepFull && position > p->body_slots) return refuse("the cache keeps every token and is full");
  if (p->positions == edgekv::kPositionsCache && p->rotary_dim > 0 && !inv_freq) return refuse("positions = cache needs inv_freq");
  if (rank_base < kept || (p->positions == edgekv::kPositionsOriginal && rank_base != position)) return refuse("this rank_base is not possible at this position");
  if (!state) return refuse("compaction needs a state");
  if (!workspace && edgekv_cuda_compact_workspace(p) > 0) return refuse("the compaction needs a workspace");
  edgekv::cuda::Compaction c{};
  c.layer = make_layer(*p, state);
  c.inv_freq = inv_freq;
  c.position = position;
  c.rank_base = rank_base;
  edgekv::cuda::place_compaction(c, static_cast<unsigned char*>(workspace));
  if (p->element == edgekv::kFloat16) edgekv::cuda::launch_compaction<__half>(c, static_cast<cudaStream_t>(stream));
  else edgekv::cuda::launch_compaction<float>(c, static_cast<cudaStream_t>(stream));
  return launched();
}

const char* edgekv_cuda_last_error() { return error_text; }
