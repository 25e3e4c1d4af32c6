#include "ort/kernel_io.h"

#include <cinttypes>
#include <cmath>

#include "cpu/error.h"

namespace edgekv::ort {
namespace {

// True when the call succeeded; the status of a failed one is released.
bool succeeded(const Api* api, Status* status) {
  if (status == nullptr) return true;
  function<ReleaseStatus>(api)(status);
  return false;
}

// Whether the node has an attribute of this name that is a single value, and whether it has any: asking for one type fails both
// when the attribute is absent and when it has another type, and only the first is harmless.
bool single(const Api* api, const KernelInfo* info, const char* name) {
  int64_t i;
  float f;
  size_t count = 0;
  return succeeded(api, function<KernelInfoGetInt>(api)(info, name, &i)) ||
         succeeded(api, function<KernelInfoGetFloat>(api)(info, name, &f)) ||
         succeeded(api, function<KernelInfoGetString>(api)(info, name, nullptr, &count));
}
bool present(const Api* api, const KernelInfo* info, const char* name) {
  size_t count = 0;
  return single(api, info, name) || succeeded(api, function<KernelInfoGetFloats>(api)(info, name, nullptr, &count));
}

int read_field(const Api* api, const KernelInfo* info, const char* name, int32_t* field) {
  int64_t value;
  if (!succeeded(api, function<KernelInfoGetInt>(api)(info, name, &value)))
    return present(api, info, name) ? fail("attribute %s must be an integer", name) : 0;
  if (value < INT32_MIN || value > INT32_MAX) return fail("attribute %s is out of range: %" PRId64, name, value);
  *field = int32_t(value);
  return 0;
}

int read_field(const Api* api, const KernelInfo* info, const char* name, float* field) {
  float value;
  if (!succeeded(api, function<KernelInfoGetFloat>(api)(info, name, &value)))
    return present(api, info, name) ? fail("attribute %s must be a number with a decimal point", name) : 0;
  if (!std::isfinite(value)) return fail("attribute %s must be finite", name);
  *field = value;
  return 0;
}

int read_value(const Api* api, const Value* value, size_t index, Tensor* tensor) {
  TensorInfo* info = nullptr;
  if (!succeeded(api, function<GetTensorTypeAndShape>(api)(value, &info))) return fail("input %zu is not a tensor", index);
  const bool read = succeeded(api, function<GetDimensionsCount>(api)(info, &tensor->rank)) && tensor->rank <= Tensor::kMaxRank &&
                    succeeded(api, function<GetDimensions>(api)(info, tensor->dims, tensor->rank)) &&
                    succeeded(api, function<GetTensorElementType>(api)(info, &tensor->type));
  function<ReleaseTensorInfo>(api)(info);
  if (!read) return fail("input %zu has a type or shape that cannot be read", index);
  if (tensor->size() == 0) return 0;
  // There is no reader of constant tensors before version 19; nothing is written through this pointer but the state.
  if (!succeeded(api, function<GetTensorMutableData>(api)(const_cast<Value*>(value), &tensor->data)))
    return fail("input %zu cannot be read", index);
  return 0;
}

}  // namespace

int read_params(const Api* api, const KernelInfo* info, LayerParams* params, std::vector<float>* inv_freq) {
#define EDGEKV_INT(name, value) \
  if (read_field(api, info, #name, &params->name)) return 1;
#define EDGEKV_FLOAT(name, value) \
  if (read_field(api, info, #name, &params->name)) return 1;
#include "layout/attributes.def"
#undef EDGEKV_INT
#undef EDGEKV_FLOAT
  if (const char* sentence = check_params(*params)) return fail("%s", sentence);

  // A list of floats asks for its size first; ONNX Runtime takes an attribute of another type for an empty list.
  size_t count = 0;
  if (single(api, info, "inv_freq")) return fail("attribute inv_freq must be a list of numbers with a decimal point");
  if (succeeded(api, function<KernelInfoGetFloats>(api)(info, "inv_freq", nullptr, &count)) && count > 0) {
    *inv_freq = std::vector<float>(count);
    if (!succeeded(api, function<KernelInfoGetFloats>(api)(info, "inv_freq", inv_freq->data(), &count)))
      return fail("attribute inv_freq cannot be read");
  }
  if (!inv_freq->empty() && inv_freq->size() != size_t(params->rotary_dim / 2))
    return fail("attribute inv_freq has %zu numbers and should have rotary_dim / 2 = %d", inv_freq->size(), params->rotary_dim / 2);
  for (float f : *inv_freq)
    if (!std::isfinite(f)) return fail("attribute inv_freq must be finite");
  return 0;
}

int read_input(const Api* api, const KernelContext* context, size_t index, Tensor* tensor) {
  size_t count = 0;
  const Value* value = nullptr;
  if (!succeeded(api, function<KernelContextGetInputCount>(api)(context, &count))) return fail("the inputs cannot be read");
  if (index >= count) return 0;
  if (!succeeded(api, function<KernelContextGetInput>(api)(context, index, &value))) return fail("input %zu cannot be read", index);
  return value == nullptr ? 0 : read_value(api, value, index, tensor);
}

int read_constant(const Api* api, const KernelInfo* info, size_t index, Tensor* tensor) {
  int constant = 0;
  const Value* value = nullptr;
  if (!succeeded(api, function<KernelInfoGetConstantInput>(api)(info, index, &constant, &value)) || !constant || value == nullptr)
    return fail("input %zu must be a constant of the graph", index);
  return read_value(api, value, index, tensor);
}

int read_number(const Api* api, const KernelInfo* info, const char* name, int32_t* field) { return read_field(api, info, name, field); }
int read_number(const Api* api, const KernelInfo* info, const char* name, float* field) { return read_field(api, info, name, field); }

int make_output(const Api* api, KernelContext* context, size_t index, const int64_t* dims, size_t rank, void** data) {
  Value* value = nullptr;
  if (!succeeded(api, function<KernelContextGetOutput>(api)(context, index, dims, rank, &value)) || value == nullptr ||
      !succeeded(api, function<GetTensorMutableData>(api)(value, data)))
    return fail("output %zu cannot be made: is a buffer of another shape bound to it?", index);
  return 0;
}

}  // namespace edgekv::ort
