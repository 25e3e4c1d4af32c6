#include "device.h"

#include <cuda_runtime.h>

#include <cstdio>

namespace {

thread_local char error_text[256] = "";
thread_local char info_text[1024] = "";

int checked(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return 0;
  std::snprintf(error_text, sizeof(error_text), "%s failed: %s", what, cudaGetErrorString(e));
  cudaGetLastError();  // not sticky for the next call
  return 1;
}

cudaStream_t stream_of(void* s) { return static_cast<cudaStream_t>(s); }

int attribute(cudaDeviceAttr which) {
  int v = 0;
  return cudaDeviceGetAttribute(&v, which, 0) == cudaSuccess ? v : 0;
}

}  // namespace

const char* edgekv_device_error() { return error_text; }

const char* edgekv_device_info() {
  int count = 0;
  const cudaError_t e = cudaGetDeviceCount(&count);
  if (e != cudaSuccess || count == 0) {
    cudaGetLastError();
    std::snprintf(info_text, sizeof(info_text), "{\"count\": 0, \"reason\": \"%s\"}", e == cudaSuccess ? "no CUDA device" : cudaGetErrorString(e));
    return info_text;
  }
  cudaDeviceProp p;
  if (checked(cudaGetDeviceProperties(&p, 0), "reading the device's properties")) {
    std::snprintf(info_text, sizeof(info_text), "{\"count\": 0, \"reason\": \"%s\"}", error_text);
    return info_text;
  }
  size_t free_bytes = 0, all_bytes = 0;
  int driver = 0, runtime = 0;
  cudaMemGetInfo(&free_bytes, &all_bytes);
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  char name[128];
  size_t n = 0;
  for (const char* c = p.name; *c && n + 1 < sizeof(name); ++c)
    if (*c >= ' ' && *c != '"' && *c != '\\') name[n++] = *c;
  name[n] = 0;
  std::snprintf(info_text, sizeof(info_text),
                "{\"count\": %d, \"name\": \"%s\", \"sm\": %d, \"multiprocessors\": %d, \"l2_bytes\": %d, \"persisting_l2_bytes\": %d, "
                "\"window_bytes\": %d, \"memory_bytes\": %zu, \"free_bytes\": %zu, \"integrated\": %d, \"driver\": %d, \"runtime\": %d}",
                count, name, p.major * 10 + p.minor, p.multiProcessorCount, p.l2CacheSize, attribute(cudaDevAttrMaxPersistingL2CacheSize),
                attribute(cudaDevAttrMaxAccessPolicyWindowSize), all_bytes, free_bytes, p.integrated, driver, runtime);
  return info_text;
}

int edgekv_device_alloc(void** out, long long bytes) {
  if (checked(cudaMalloc(out, size_t(bytes)), "allocating device memory")) return 1;
  return checked(cudaMemset(*out, 0, size_t(bytes)), "clearing device memory");
}
int edgekv_device_free(void* memory) { return checked(cudaFree(memory), "freeing device memory"); }
int edgekv_host_alloc(void** out, long long bytes) { return checked(cudaHostAlloc(out, size_t(bytes), cudaHostAllocDefault), "allocating page-locked memory"); }
int edgekv_host_free(void* memory) { return checked(cudaFreeHost(memory), "freeing page-locked memory"); }

int edgekv_stream_create(void** out) {
  cudaStream_t s = nullptr;
  if (checked(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "creating a stream")) return 1;
  *out = s;
  return 0;
}
int edgekv_stream_destroy(void* stream) { return checked(cudaStreamDestroy(stream_of(stream)), "destroying a stream"); }
int edgekv_stream_wait(void* stream) { return checked(cudaStreamSynchronize(stream_of(stream)), "running on the device"); }

int edgekv_copy(void* to, const void* from, long long bytes, int kind, void* stream) {
  const cudaMemcpyKind kinds[] = {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
  if (kind < 0 || kind > 2) return checked(cudaErrorInvalidValue, "copying");
  return checked(cudaMemcpyAsync(to, from, size_t(bytes), kinds[kind], stream_of(stream)), "copying");
}

int edgekv_stream_persist(void* stream, void* memory, long long bytes, long long* kept_bytes) {
  *kept_bytes = 0;
  const long long most = attribute(cudaDevAttrMaxPersistingL2CacheSize), window = attribute(cudaDevAttrMaxAccessPolicyWindowSize);
  if (most <= 0 || window <= 0 || bytes <= 0) return 0;
  const long long aside = bytes < most ? bytes : most, covered = bytes < window ? bytes : window;
  if (checked(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, size_t(aside)), "setting L2 aside")) return 1;
  cudaStreamAttrValue v = {};
  v.accessPolicyWindow.base_ptr = memory;
  v.accessPolicyWindow.num_bytes = size_t(covered);
  // A window larger than the set-aside part would thrash it; the ratio lets just as many lines persist as fit.
  v.accessPolicyWindow.hitRatio = covered > aside ? float(double(aside) / double(covered)) : 1.0f;
  v.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
  v.accessPolicyWindow.missProp = cudaAccessPropertyStreaming;
  if (checked(cudaStreamSetAttribute(stream_of(stream), cudaStreamAttributeAccessPolicyWindow, &v), "setting the access policy window")) return 1;
  *kept_bytes = aside;
  return 0;
}

int edgekv_graph_begin(void* stream) { return checked(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal), "starting a graph"); }

int edgekv_graph_end(void* stream, void** out) {
  cudaGraph_t graph = nullptr;
  if (checked(cudaStreamEndCapture(stream_of(stream), &graph), "capturing a graph")) return 1;
  cudaGraphExec_t ready = nullptr;
  const int failed = checked(cudaGraphInstantiateWithFlags(&ready, graph, 0), "preparing a graph");
  cudaGraphDestroy(graph);
  *out = ready;
  return failed;
}
int edgekv_graph_launch(void* graph, void* stream) { return checked(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)), "launching a graph"); }
int edgekv_graph_destroy(void* graph) { return checked(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "destroying a graph"); }
