// Runs items on ONNX Runtime's own thread pool.
#pragma once
#include "cpu/parallel.h"
#include "ort/ort_abi.h"

namespace edgekv::ort {

class SessionThreads final : public Parallel {
 public:
  SessionThreads(const Api* api, const KernelContext* context) : api_(api), context_(context) {}
  void run(size_t count, Item item, void* data) override {
    // Zero batches: one item at a time to whichever thread is free.
    Status* status = function<KernelContextParallelFor>(api_)(context_, item, count, 0, data);
    if (status == nullptr) return;
    // It fails before it has started anything, if at all.
    function<ReleaseStatus>(api_)(status);
    Inline().run(count, item, data);
  }

 private:
  const Api* api_;
  const KernelContext* context_;
};

}  // namespace edgekv::ort
