// Decode steps as cachegrind sees them: per layer a pass over a weight buffer, then the native attention op on that layer's state.
//
//   attend_driver LIBRARY STEPS LAYERS Q_HEADS KV_HEADS DIM BODY TAIL COMMITTED_TAIL WEIGHT_BYTES_PER_LAYER
//
// Prints one line per buffer, "name address bytes", so that the model can use the same addresses. Every step attends with one
// row at the same position, which is what a decode step reads; nothing is committed, so each step touches the same bytes.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "layout/state_layout.h"

using edgekv::LayerParams;

using Attend = int (*)(const LayerParams*, const float*, const float*, const float*, int64_t, int64_t, const float*, const float*, int64_t,
                       const float*, const float*, void*, int64_t, const int32_t*, int64_t, float*, int);
using Init = int (*)(const LayerParams*, void*, int64_t);
using LastError = const char* (*)();

static volatile uint64_t sink;
alignas(64) static volatile uint64_t marker[8];  // written at the start of every step, so that a memory trace can be cut there

static void* aligned(size_t bytes) {
  void* at = nullptr;
  if (posix_memalign(&at, 4096, bytes ? bytes : 64)) abort();
  memset(at, 0, bytes);
  return at;
}

int main(int argc, char** argv) {
  if (argc != 11) return fprintf(stderr, "usage: see the first lines of attend_driver.cpp\n"), 2;
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
  auto attend = reinterpret_cast<Attend>(dlsym(library, "edgekv_attend"));
  auto init = reinterpret_cast<Init>(dlsym(library, "edgekv_state_init"));
  auto last_error = reinterpret_cast<LastError>(dlsym(library, "edgekv_last_error"));
  const int steps = atoi(argv[2]), layers = atoi(argv[3]), committed = atoi(argv[9]);
  const size_t weights = strtoull(argv[10], nullptr, 10);

  LayerParams p;
  p.q_heads = atoi(argv[4]);
  p.kv_heads = atoi(argv[5]);
  p.key_dim = p.value_dim = atoi(argv[6]);
  p.body_slots = atoi(argv[7]);
  p.tail_slots = atoi(argv[8]);
  p.scale = 0.125f;
  const size_t bytes = edgekv::state_layout(p).bytes;

  auto* arena = static_cast<unsigned char*>(aligned(bytes * layers));
  auto* streamed = static_cast<unsigned char*>(aligned(weights * layers));
  printf("arena %llu %zu\nweights %llu %zu\nmarker %llu %zu\n", (unsigned long long)(uintptr_t)arena, bytes * layers,
         (unsigned long long)(uintptr_t)streamed, weights * layers, (unsigned long long)(uintptr_t)marker, sizeof(marker));
  fflush(stdout);
  for (int l = 0; l < layers; ++l) {
    unsigned char* state = arena + bytes * l;
    if (init(&p, state, int64_t(bytes))) return fprintf(stderr, "%s\n", last_error()), 1;
    auto* header = reinterpret_cast<edgekv::StateHeader*>(state);
    header->body_count = p.body_slots;  // a full body at positions 0 .. body_slots - 1; contents do not matter for addresses
    header->tail_base = header->rank_base = p.body_slots;
    auto* positions = reinterpret_cast<int32_t*>(state + edgekv::state_layout(p).body_pos);
    for (int h = 0; h < p.kv_heads; ++h)
      for (int i = 0; i < p.body_slots; ++i) positions[h * p.body_slots + i] = i;
  }

  std::vector<float> q(size_t(p.q_heads) * p.key_dim, 0.1f), kv(size_t(p.kv_heads) * p.key_dim, 0.1f), y(q.size());
  for (int s = 0; s < steps; ++s) {
    marker[0] = uint64_t(s);
    for (int l = 0; l < layers; ++l) {
      const unsigned char* w = streamed + weights * l;
      uint64_t sum = 0;
      for (size_t i = 0; i < weights; i += 64) sum += w[i];
      sink = sum;
      if (attend(&p, q.data(), kv.data(), kv.data(), 1, p.body_slots + committed, nullptr, nullptr, 0, nullptr, nullptr, arena + bytes * l,
                 int64_t(bytes), nullptr, 0, y.data(), 1))
        return fprintf(stderr, "%s\n", last_error()), 1;
    }
  }
  return 0;
}
