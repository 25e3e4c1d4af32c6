// What all ops have in common, so that each says only what it takes, gives and computes.
#pragma once
#include <cstdio>
#include <memory>
#include <new>

#include "cpu/error.h"
#include "ort/kernel_io.h"

namespace edgekv::ort {

// Runs a part of an op: 0, or 1 with a sentence (cpu/error.h), which becomes a status that names the op. No exception may reach ONNX
// Runtime, which is C.
template <class Call>
Status* guarded(const Api* api, const char* op, Call call) {
  ErrorCode code = kInvalidArgument;
  const char* sentence = "out of memory";
  try {
    if (call() == 0) return nullptr;
    sentence = error_text();
  } catch (const std::bad_alloc&) {
    code = kFail;
  }
  char text[600];
  snprintf(text, sizeof(text), "%s: %s", op, sentence);
  return function<CreateStatus>(api)(code, text);
}

// A custom op for the CPU provider (plugins/ort/cuda changes that), version 1, without aliases; the caller sets its inputs and outputs.
// Kernel has
//
//   static constexpr const char* kName;                  of the op, which also begins every error sentence
//   const Api* api;                                      set before the two below are called
//   int create(const KernelInfo* info);                  0, or 1 with a sentence (cpu/error.h)
//   int compute(KernelContext* context) const;           likewise
template <class Kernel>
CustomOp custom_op() {
  CustomOp op = {};
  op.version = kApiVersion;
  op.get_name = [](const CustomOp*) { return Kernel::kName; };
  op.get_execution_provider = [](const CustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op.get_input_memory = [](const CustomOp*, size_t) { return kMemoryDefault; };
  op.get_output_presence = [](const CustomOp*, size_t) { return kRequired; };
  op.create_kernel_v2 = [](const CustomOp*, const Api* api, const KernelInfo* info, void** made) {
    return guarded(api, Kernel::kName, [&] {
      auto kernel = std::make_unique<Kernel>();
      kernel->api = api;
      if (kernel->create(info)) return 1;
      *made = kernel.release();
      return 0;
    });
  };
  op.kernel_compute_v2 = [](void* made, KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(made);
    return guarded(kernel.api, Kernel::kName, [&] { return kernel.compute(context); });
  };
  op.kernel_destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.get_start_version = [](const CustomOp*) { return 1; };
  op.get_end_version = [](const CustomOp*) { return 1; };
  op.get_alias_map = [](int**, int**) -> size_t { return 0; };
  op.release_alias_map = [](int*, int*) {};
  return op;
}

}  // namespace edgekv::ort
