// Reading attributes and tensors through ort_abi.h, with every status turned into a sentence.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "layout/state_layout.h"
#include "ort/ort_abi.h"

namespace edgekv::ort {

// A tensor of a running kernel; no data when an optional input is absent or empty.
struct Tensor {
  static constexpr size_t kMaxRank = 8;
  void* data = nullptr;
  int64_t dims[kMaxRank] = {};
  size_t rank = 0;
  ElementType type = kUndefined;
  int64_t size() const {
    int64_t n = 1;
    for (size_t i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }
};

// All return 0, or 1 with a sentence (cpu/error.h).
// Fields of attributes.def from the node; absent ones keep their defaults, of the wrong type or out of range are refused.
int read_params(const Api* api, const KernelInfo* info, LayerParams* params, std::vector<float>* inv_freq);
int read_number(const Api* api, const KernelInfo* info, const char* name, int32_t* field);
int read_number(const Api* api, const KernelInfo* info, const char* name, float* field);
int read_input(const Api* api, const KernelContext* context, size_t index, Tensor* tensor);
// An initialiser of the graph, while the kernel is made.
int read_constant(const Api* api, const KernelInfo* info, size_t index, Tensor* tensor);
int make_output(const Api* api, KernelContext* context, size_t index, const int64_t* dims, size_t rank, void** data);

}  // namespace edgekv::ort
