// What the ops for ONNX Runtime's CUDA provider have in common: provider, stream and working memory. Compiled for the emulation they
// are ops of the CPU provider, whose memory the emulation takes for the device's.
#pragma once
#include "ort/custom_op.h"

namespace edgekv::ort {

#ifdef EDGEKV_EMULATE
constexpr const char *kProvider = "CPUExecutionProvider", *kMemory = "Cpu";
#else
constexpr const char *kProvider = "CUDAExecutionProvider", *kMemory = "Cuda";
#endif

// As custom_op; all inputs and outputs lie in device memory.
template <class Kernel>
CustomOp cuda_op() {
  CustomOp op = custom_op<Kernel>();
  op.get_execution_provider = [](const CustomOp*) { return kProvider; };
  return op;
}

// The stream that the session queues its work on.
int stream_of(const Api* api, const KernelContext* context, void** stream);

// Working memory from the session's own pool, for one call: what is queued on the stream may still use it afterwards, because the pool
// gives it to nothing but later work of the same stream.
class Scratch {
 public:
  Scratch(const Api* api, const KernelContext* context) : api_(api), context_(context) {}
  Scratch(const Scratch&) = delete;
  ~Scratch();
  int take(size_t bytes, void** memory);  // 0, or 1 with a sentence

 private:
  const Api* api_;
  const KernelContext* context_;
  Allocator* allocator_ = nullptr;
  void* memory_ = nullptr;
};

const CustomOp* cuda_bounded_cache_attention();
const CustomOp* cuda_append_block_sums();

}  // namespace edgekv::ort
