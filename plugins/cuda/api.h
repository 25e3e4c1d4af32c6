// The CUDA kernels as plain C functions: what the TensorRT plugin, the engine (through ctypes) and the tests call. Work is queued
// on `stream`; functions return 0, or 1 with a sentence in edgekv_cuda_last_error().
#pragma once
#include "../layout/state_layout.h"

// Rows of activations in device memory: number d of row t and head h lies at data[t * row_stride + h * head_stride + d].
struct EdgekvRows {
  const void* data;
  long long row_stride, head_stride;
};

struct EdgekvStep {
  EdgekvRows q, k, v;
  int half;                   // q, k, v and y are float16 instead of float32
  int rows;                   // T
  const void* cos;            // [T, table], with fused_rotary
  const void* sin;
  int table;
  int table_half;             // cos and sin are float16
  const long long* position;  // one int64 in device memory
  void* y;                    // [T, q_heads * value_dim]
  const unsigned* slots;      // what each row attends to of a compressed body, as edgekv_cuda_retrieve writes it; null: all of it
};

#if defined(_WIN32)
#define EDGEKV_API extern "C" __declspec(dllexport)
#else
#define EDGEKV_API extern "C" __attribute__((visibility("default")))
#endif

// Workspace in device memory, 256-byte aligned, of steps of up to `rows` rows and of a compaction. Steps of one stream may share it.
EDGEKV_API long long edgekv_cuda_step_workspace(const edgekv::LayerParams* params, int rows);
EDGEKV_API long long edgekv_cuda_compact_workspace(const edgekv::LayerParams* params);

// Appends the rows to the tail of `state` and attends. A state of other parameters, or rows beyond the boundary, cannot be seen
// from the host: such a step leaves the state alone and fills y with NaN.
EDGEKV_API int edgekv_cuda_step(const edgekv::LayerParams* params, void* state, const EdgekvStep* step, void* workspace, void* stream);

// Writes which slots of a compressed body each row should attend to: [kv_heads][T][body_slots / 32] words, bit i of word w for slot
// 32 w + i. How many are wanted stands in the state's header (`retrieve`, `candidates`); 0 means all and leaves no bit set. Reads q, rows,
// rotation and position of the step. Rows in blocks longer than 16 attend to everything: for them nothing is written, and a
// state that asks for less is answered with NaN by edgekv_cuda_step.
EDGEKV_API long long edgekv_cuda_retrieve_workspace(const edgekv::LayerParams* params, int rows);
EDGEKV_API int edgekv_cuda_retrieve(const edgekv::LayerParams* params, void* state, const EdgekvStep* step, unsigned* slots, void* workspace,
                                    void* stream);

// Moves the full tail into the body at the boundary `position`. inv_freq: [rotary_dim / 2] float32 in device memory, read with
// positions = cache.
EDGEKV_API int edgekv_cuda_compact(const edgekv::LayerParams* params, const float* inv_freq, void* state, long long position,
                                   long long rank_base, void* workspace, void* stream);

EDGEKV_API const char* edgekv_cuda_last_error();
