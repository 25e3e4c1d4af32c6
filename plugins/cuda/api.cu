// Checks what the host can check and launches (launch.cuh).
#include "api.h"

#include <cstdio>

#include "launch.cuh"
#include "launch_compact_packed.cuh"
#include "launch_packed.cuh"
#include "launch_retrieve.cuh"

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

edgekv::cuda::Rows make_rows(const EdgekvRows& r) { return {r.data, r.row_stride, r.head_stride}; }

edgekv::cuda::Step make_step(const edgekv::LayerParams& p, void* state, const EdgekvStep& step) {
  edgekv::cuda::Step s{};
  s.layer = edgekv::cuda::make_layer(p, state);
  s.q = make_rows(step.q);
  s.k = make_rows(step.k);
  s.v = make_rows(step.v);
  s.half = step.half;
  s.cos = step.cos;
  s.sin = step.sin;
  s.table = step.table;
  s.table_half = step.table_half;
  s.position = step.position;
  s.rows = step.rows;
  s.y = step.y;
  s.slots = step.slots;
  return s;
}

int check_rows(const edgekv::LayerParams& p, const EdgekvStep& step) {
  if (const char* sentence = edgekv::check_params(p)) return refuse(sentence);
  if (step.rows < 1 || step.rows > p.tail_slots) return refuse("a step has between 1 and tail_slots rows");
  if (p.fused_rotary == edgekv::kRotaryByHead && (!step.cos || !step.sin || step.table != p.kv_heads * (p.rotary_dim / 2)))
    return refuse("fused_rotary 2 needs cos and sin with rotary_dim / 2 columns for every kv head");
  if (p.fused_rotary && (!step.cos || !step.sin || step.table < p.rotary_dim / 2)) return refuse("fused_rotary needs cos and sin with rotary_dim / 2 columns");
  return 0;
}

}  // namespace

long long edgekv_cuda_step_workspace(const edgekv::LayerParams* p, int rows) {
  const bool packed = p->format == edgekv::kFormatSelfIndex;
  return (long long)(packed ? edgekv::cuda::packed_step_workspace_bytes(*p, rows) : edgekv::cuda::step_workspace_bytes(*p, rows));
}

long long edgekv_cuda_compact_workspace(const edgekv::LayerParams* p) {
  if (p->format == edgekv::kFormatSelfIndex) return (long long)edgekv::cuda::packed_compaction_workspace_bytes(*p);
  edgekv::cuda::Compaction c{};
  c.layer.p = *p;
  return (long long)edgekv::cuda::place_compaction(c, nullptr);
}

long long edgekv_cuda_retrieve_workspace(const edgekv::LayerParams* p, int rows) {
  return (long long)edgekv::cuda::retrieve_workspace_bytes(*p, rows);
}

int edgekv_cuda_retrieve(const edgekv::LayerParams* p, void* state, const EdgekvStep* step, unsigned* slots, void* workspace, void* stream) {
  if (check_rows(*p, *step)) return 1;
  if (p->format != edgekv::kFormatSelfIndex) return refuse("only a compressed body can be searched: this cache is dense");
  if (!state || !step->q.data || !step->position || !slots) return refuse("retrieval needs q, position, state and slots");
  if (!workspace) return refuse("the retrieval needs a workspace");
  edgekv::cuda::Retrieval r{};
  r.s = make_step(*p, state, *step);
  r.s.slots = r.out = slots;
  place_retrieval(r, static_cast<unsigned char*>(workspace));
  edgekv::cuda::launch_retrieve(r, static_cast<cudaStream_t>(stream));
  return launched();
}

int edgekv_cuda_step(const edgekv::LayerParams* p, void* state, const EdgekvStep* step, void* workspace, void* stream) {
  if (check_rows(*p, *step)) return 1;
  if (!state || !step->q.data || !step->k.data || !step->v.data || !step->position || !step->y) return refuse("a step needs q, k, v, position, state and y");
  if (!workspace && edgekv_cuda_step_workspace(p, step->rows) > 0) return refuse("the step needs a workspace");
  edgekv::cuda::Step s = make_step(*p, state, *step);
  s.split = edgekv::cuda::split_slots(*p);
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool half = p->element == edgekv::kFloat16;
  if (p->format == edgekv::kFormatSelfIndex) {
    place_packed_step(s, static_cast<unsigned char*>(workspace));
    s.row_block = rows_per_warp(s) * edgekv::cuda::kWarps;
    half ? edgekv::cuda::launch_packed_step<__half>(s, queue) : edgekv::cuda::launch_packed_step<float>(s, queue);
    return launched();
  }
  s.slots = nullptr;
  s.part = static_cast<float*>(workspace);
  s.walks = edgekv::cuda::walks(*p, s.rows);
  s.row_block = rows_per_warp(s) * edgekv::cuda::kWarps;
  half ? edgekv::cuda::launch_step<__half>(s, queue) : edgekv::cuda::launch_step<float>(s, queue);
  return launched();
}

int edgekv_cuda_compact(const edgekv::LayerParams* p, const float* inv_freq, void* state, long long position, long long rank_base, void* workspace,
                        void* stream) {
  if (const char* sentence = edgekv::check_params(*p)) return refuse(sentence);
  if (position < p->tail_slots || position % p->tail_slots) return refuse("compaction is for boundaries: position must be a positive multiple of tail_slots");
  // While everything fits everything is kept, so what the body holds follows from the position.
  const long long kept = position < p->body_slots ? position : p->body_slots;
  const bool packed = p->format == edgekv::kFormatSelfIndex;
  if (p->keep == edgekv::kKeepFull && position > p->body_slots + (packed ? p->sinks : 0)) return refuse("the cache keeps every token and is full");
  if (packed && position / p->tail_slots > p->intervals) return refuse("the text has all its boundary intervals already");
  if (p->positions == edgekv::kPositionsCache && p->rotary_dim > 0 && !inv_freq) return refuse("positions = cache needs inv_freq");
  if (rank_base < kept || (p->positions == edgekv::kPositionsOriginal && rank_base != position)) return refuse("this rank_base is not possible at this position");
  if (!state) return refuse("compaction needs a state");
  if (!workspace && edgekv_cuda_compact_workspace(p) > 0) return refuse("the compaction needs a workspace");
  edgekv::cuda::Compaction c{};
  c.layer = edgekv::cuda::make_layer(*p, state);
  c.inv_freq = inv_freq;
  c.position = position;
  c.rank_base = rank_base;
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool half = p->element == edgekv::kFloat16;
  if (packed) {
    edgekv::cuda::Compaction ranking{};
    place_packed_compaction(c, ranking, static_cast<unsigned char*>(workspace));
    half ? edgekv::cuda::launch_packed_compaction<__half>(c, ranking, queue) : edgekv::cuda::launch_packed_compaction<float>(c, ranking, queue);
    return launched();
  }
  place_compaction(c, static_cast<unsigned char*>(workspace));
  half ? edgekv::cuda::launch_compaction<__half>(c, queue) : edgekv::cuda::launch_compaction<float>(c, queue);
  return launched();
}

const char* edgekv_cuda_last_error() { return error_text; }
