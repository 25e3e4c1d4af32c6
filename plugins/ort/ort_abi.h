// The part of ONNX Runtime's C interface that a custom op needs, declared here so that building needs no ONNX Runtime headers.
//
// ONNX Runtime promises that its table of functions only ever grows at the end, and that it reads no more of a custom op than the
// version written in it covers. So functions are addressed by their place in the table, and the op says version 18, the
// first that knows about aliased inputs and outputs. tools/check_ort_abi.py compares all of this with a real header.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgekv::ort {

constexpr uint32_t kApiVersion = 18;

// Opaque types of ONNX Runtime.
struct Api;
struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct Value;
struct TensorInfo;
struct MemoryInfo;
struct Allocator;

struct ApiBase {
  const Api* (*get_api)(uint32_t version);  // null when this runtime is older than `version`
  const char* (*get_version)();
};

enum ErrorCode : int { kOk = 0, kFail = 1, kInvalidArgument = 2 };
enum ElementType : int { kUndefined = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kHalf = 10 };
enum Presence : int { kRequired = 0, kOptional = 1 };
enum MemoryType : int { kMemoryDefault = 0 };
enum AllocatorType : int { kDeviceAllocator = 0 };

// Places in the table of functions, with their signatures.
template <int kIndex, class F>
struct Entry {
  static constexpr int index = kIndex;
  using Function = F*;
};
using CreateStatus = Entry<0, Status*(ErrorCode, const char* text)>;
using CreateCustomOpDomain = Entry<26, Status*(const char* name, CustomOpDomain**)>;
using CustomOpDomainAdd = Entry<27, Status*(CustomOpDomain*, const struct CustomOp*)>;
using AddCustomOpDomain = Entry<28, Status*(SessionOptions*, CustomOpDomain*)>;
using GetTensorMutableData = Entry<51, Status*(Value*, void** data)>;
using GetTensorElementType = Entry<60, Status*(const TensorInfo*, ElementType*)>;
using GetDimensionsCount = Entry<61, Status*(const TensorInfo*, size_t*)>;
using GetDimensions = Entry<62, Status*(const TensorInfo*, int64_t* dims, size_t count)>;
using GetTensorTypeAndShape = Entry<65, Status*(const Value*, TensorInfo**)>;
using CreateMemoryInfo = Entry<68, Status*(const char* name, AllocatorType, int id, MemoryType, MemoryInfo**)>;
using AllocatorAlloc = Entry<75, Status*(Allocator*, size_t bytes, void**)>;
using AllocatorFree = Entry<76, Status*(Allocator*, void*)>;
using KernelInfoGetFloat = Entry<85, Status*(const KernelInfo*, const char* name, float*)>;
using KernelInfoGetInt = Entry<86, Status*(const KernelInfo*, const char* name, int64_t*)>;
using KernelInfoGetString = Entry<87, Status*(const KernelInfo*, const char* name, char*, size_t* size)>;
using KernelContextGetInputCount = Entry<88, Status*(const KernelContext*, size_t*)>;
using KernelContextGetInput = Entry<90, Status*(const KernelContext*, size_t index, const Value**)>;
using KernelContextGetOutput = Entry<91, Status*(KernelContext*, size_t index, const int64_t* dims, size_t count, Value**)>;
using ReleaseStatus = Entry<93, void(Status*)>;
using ReleaseMemoryInfo = Entry<94, void(MemoryInfo*)>;
using ReleaseTensorInfo = Entry<99, void(TensorInfo*)>;
using ReleaseAllocator = Entry<132, void(Allocator*)>;
using KernelInfoGetFloats = Entry<162, Status*(const KernelInfo*, const char* name, float*, size_t* size)>;
using KernelContextGetStream = Entry<193, Status*(const KernelContext*, void** stream)>;
using KernelInfoGetConstantInput = Entry<249, Status*(const KernelInfo*, size_t index, int* constant, const Value**)>;
using KernelContextGetAllocator = Entry<253, Status*(const KernelContext*, const MemoryInfo*, Allocator**)>;
using KernelContextParallelFor =
    Entry<274, Status*(const KernelContext*, void (*)(void*, size_t), size_t total, size_t batches, void* data)>;

// The function at E's place.
template <class E>
typename E::Function function(const Api* api) {
  return reinterpret_cast<typename E::Function>(reinterpret_cast<void* const*>(api)[E::index]);
}

// What ONNX Runtime calls for an op. Functions that are null are not used, or replaced by their V2 form.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_execution_provider)(const CustomOp*);
  ElementType (*get_input_type)(const CustomOp*, size_t);
  size_t (*get_input_count)(const CustomOp*);
  ElementType (*get_output_type)(const CustomOp*, size_t);
  size_t (*get_output_count)(const CustomOp*);
  void (*kernel_compute)(void* kernel, KernelContext*);
  void (*kernel_destroy)(void* kernel);
  Presence (*get_input_presence)(const CustomOp*, size_t);
  Presence (*get_output_presence)(const CustomOp*, size_t);
  MemoryType (*get_input_memory)(const CustomOp*, size_t);
  int (*get_variadic_input_least)(const CustomOp*);
  int (*get_variadic_input_homogeneous)(const CustomOp*);
  int (*get_variadic_output_least)(const CustomOp*);
  int (*get_variadic_output_homogeneous)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*kernel_compute_v2)(void* kernel, KernelContext*);
  Status* (*infer_output_shape)(const CustomOp*, ShapeInferContext*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  // Pairs of input and output that may, or must, be the same memory; arrays are given back through the release function.
  size_t (*get_may_inplace)(int** inputs, int** outputs);
  void (*release_may_inplace)(int* inputs, int* outputs);
  size_t (*get_alias_map)(int** inputs, int** outputs);
  void (*release_alias_map)(int* inputs, int* outputs);
};

}  // namespace edgekv::ort
