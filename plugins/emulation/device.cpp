// trt/device.h on a CPU: device memory is host memory, streams run at once. CUDA graphs are refused, so that the engine's way
// without them is tested too.
#include "../trt/device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
thread_local char error_text[256] = "";

int refuse(const char* sentence) {
  std::snprintf(error_text, sizeof(error_text), "%s", sentence);
  return 1;
}

int allocate(void** out, long long bytes) {
  *out = std::aligned_alloc(256, size_t((bytes + 255) / 256 * 256));
  if (!*out) return refuse("allocating memory failed: out of memory");
  std::memset(*out, 0, size_t(bytes));
  return 0;
}
}  // namespace

const char* edgekv_device_error() { return error_text; }
const char* edgekv_device_info() { return "{\"count\": 0, \"reason\": \"this library is the CPU emulation\"}"; }
int edgekv_device_alloc(void** out, long long bytes) { return allocate(out, bytes); }
int edgekv_device_free(void* memory) { return std::free(memory), 0; }
int edgekv_host_alloc(void** out, long long bytes) { return allocate(out, bytes); }
int edgekv_host_free(void* memory) { return std::free(memory), 0; }
int edgekv_stream_create(void** out) { return *out = std::malloc(1), *out ? 0 : refuse("creating a stream failed"); }
int edgekv_stream_destroy(void* stream) { return std::free(stream), 0; }
int edgekv_stream_wait(void*) { return 0; }
int edgekv_copy(void* to, const void* from, long long bytes, int kind, void*) {
  if (kind < 0 || kind > 2) return refuse("copying failed: unknown kind");
  std::memmove(to, from, size_t(bytes));
  return 0;
}
int edgekv_stream_persist(void*, void*, long long, long long* kept_bytes) { return *kept_bytes = 0; }
int edgekv_graph_begin(void*) { return refuse("starting a graph failed: the emulation has none"); }
int edgekv_graph_end(void*, void**) { return refuse("capturing a graph failed: the emulation has none"); }
int edgekv_graph_launch(void*, void*) { return refuse("launching a graph failed: the emulation has none"); }
int edgekv_graph_destroy(void*) { return refuse("destroying a graph failed: the emulation has none"); }
