// The little of the CUDA runtime that the engine (edgekv/engine/tensorrt.py) needs, as C functions for ctypes: the library links the
// runtime statically, so nothing else has to be installed. Functions that can fail return 0, or 1 with a sentence in
// edgekv_device_error().
#pragma once
#include "../cuda/api.h"

EDGEKV_API const char* edgekv_device_error();

// Facts about device 0 and the drivers, as JSON: {"count", "name", "sm", "multiprocessors", "l2_bytes", "persisting_l2_bytes",
// "window_bytes", "memory_bytes", "free_bytes", "integrated", "driver", "runtime"}; versions as CUDA numbers them (12060). {"count": 0, "reason"}
// where there is no device.
EDGEKV_API const char* edgekv_device_info();

EDGEKV_API int edgekv_device_alloc(void** out, long long bytes);
EDGEKV_API int edgekv_device_free(void* memory);
// Page-locked host memory, for inputs and logits.
EDGEKV_API int edgekv_host_alloc(void** out, long long bytes);
EDGEKV_API int edgekv_host_free(void* memory);

EDGEKV_API int edgekv_stream_create(void** out);
EDGEKV_API int edgekv_stream_destroy(void* stream);
EDGEKV_API int edgekv_stream_wait(void* stream);
// Copies in stream order; `kind` 0 host to device, 1 device to host, 2 device to device.
EDGEKV_API int edgekv_copy(void* to, const void* from, long long bytes, int kind, void* stream);

// Asks L2 to keep [memory, memory + bytes) for work on this stream, and to let everything else go first. *kept_bytes receives the
// size of the set-aside part of L2: 0 where the device has none, which is no error. Before a graph is captured.
EDGEKV_API int edgekv_stream_persist(void* stream, void* memory, long long bytes, long long* kept_bytes);

// CUDA graphs: everything queued on the stream between begin and end becomes one launch.
EDGEKV_API int edgekv_graph_begin(void* stream);
EDGEKV_API int edgekv_graph_end(void* stream, void** out);
EDGEKV_API int edgekv_graph_launch(void* graph, void* stream);
EDGEKV_API int edgekv_graph_destroy(void* graph);
