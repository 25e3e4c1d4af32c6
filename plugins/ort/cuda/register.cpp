// The entry point of the CUDA library for ONNX Runtime. A session registers this library or libedgekv.so, never both: one domain is
// declared once. What has no op here is no node of a graph that this library is used for (edgekv/engine/onnxruntime_cuda.py).
#include "ort/cuda/cuda_op.h"

#include <initializer_list>

using namespace edgekv::ort;

extern "C" __attribute__((visibility("default"))) Status* RegisterCustomOps(SessionOptions* options, const ApiBase* base) {
  const Api* api = base->get_api(kApiVersion);
  if (api == nullptr)
    return function<CreateStatus>(base->get_api(1))(kFail, "edgekv needs ONNX Runtime 1.20 or newer: upgrade the onnxruntime-gpu package");
  CustomOpDomain* domain = nullptr;
  if (Status* status = function<CreateCustomOpDomain>(api)("edgekv", &domain)) return status;
  for (const CustomOp* op : {cuda_bounded_cache_attention(), cuda_append_block_sums()})
    if (Status* status = function<CustomOpDomainAdd>(api)(domain, op)) return status;
  return function<AddCustomOpDomain>(api)(options, domain);
}
