// The entry point that ONNX Runtime looks up when a session registers this library. A new op is one line in the list.
#include <initializer_list>

#include "ort/append_block_sums.h"
#include "ort/bounded_cache_attention.h"
#include "ort/ort_abi.h"
#include "ort/quantised_matmul.h"
#include "ort/sign_vq_retrieval.h"

using namespace edgekv::ort;

extern "C" __attribute__((visibility("default"))) Status* RegisterCustomOps(SessionOptions* options, const ApiBase* base) {
  const Api* api = base->get_api(kApiVersion);
  if (api == nullptr)
    return function<CreateStatus>(base->get_api(1))(kFail, "edgekv needs ONNX Runtime 1.20 or newer: upgrade the onnxruntime package");
  // A session keeps pointing at its domain, so each registration makes one that stays.
  CustomOpDomain* domain = nullptr;
  if (Status* status = function<CreateCustomOpDomain>(api)("edgekv", &domain)) return status;
  for (const CustomOp* op : {bounded_cache_attention(), sign_vq_retrieval(), append_block_sums(), quantised_matmul()})
    if (Status* status = function<CustomOpDomainAdd>(api)(domain, op)) return status;
  return function<AddCustomOpDomain>(api)(options, domain);
}
