#include "ort/cuda/cuda_op.h"

namespace edgekv::ort {
namespace {

bool succeeded(const Api* api, Status* status) {
  if (status == nullptr) return true;
  function<ReleaseStatus>(api)(status);
  return false;
}

}  // namespace

int stream_of(const Api* api, const KernelContext* context, void** stream) {
  if (!succeeded(api, function<KernelContextGetStream>(api)(context, stream))) return fail("the session gives no stream");
  return 0;
}

int Scratch::take(size_t bytes, void** memory) {
  *memory = nullptr;
  if (bytes == 0) return 0;
  MemoryInfo* where = nullptr;
  if (!succeeded(api_, function<CreateMemoryInfo>(api_)(kMemory, kDeviceAllocator, 0, kMemoryDefault, &where)))
    return fail("the session's memory cannot be named");
  const bool found = succeeded(api_, function<KernelContextGetAllocator>(api_)(context_, where, &allocator_));
  function<ReleaseMemoryInfo>(api_)(where);
  if (!found || !succeeded(api_, function<AllocatorAlloc>(api_)(allocator_, bytes, &memory_)) || memory_ == nullptr)
    return fail("%zu bytes of working memory could not be had", bytes);
  *memory = memory_;
  return 0;
}

Scratch::~Scratch() {
  if (memory_ != nullptr) succeeded(api_, function<AllocatorFree>(api_)(allocator_, memory_));
  if (allocator_ != nullptr) function<ReleaseAllocator>(api_)(allocator_);
}

}  // namespace edgekv::ort
