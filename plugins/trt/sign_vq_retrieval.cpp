#include "sign_vq_retrieval.h"

namespace edgekv {
namespace trt {

using nvinfer1::DataType;

int32_t SignVQRetrieval::getOutputDataTypes(DataType* types, int32_t outputs, const DataType* in, int32_t count) const noexcept {
  if (outputs != 2 || count != inputs()) return 1;
  types[kSlots] = DataType::kINT32;
  types[kStateOut] = in[kState];
  return 0;
}

int32_t SignVQRetrieval::getOutputShapes(const nvinfer1::DimsExprs* in, int32_t count, const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* out,
                                         int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept {
  if (params_.format != kFormatSelfIndex) return refuse("only a compressed cache can be searched: attribute format must be 1 (selfindex)");
  if (count != inputs() || output_count != 2) return refuse("wrong number of inputs: q, position, state, and cos, sin when fused_rotary is set");
  const auto* tokens = tokens_of(in[kQ]);
  if (!tokens) return refuse("q must be [1, heads, T, dim] or [1, T, heads * dim]");
  if (!state_fits(in[kState])) return refuse("the state has not the size that the attributes ask for");
  out[kSlots].nbDims = 3;
  out[kSlots].d[0] = builder.constant(params_.kv_heads);
  out[kSlots].d[1] = tokens;
  out[kSlots].d[2] = builder.constant(slot_words(params_));
  out[kStateOut] = in[kState];
  return 0;
}

bool SignVQRetrieval::supportsFormatCombination(int32_t at, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t count, int32_t) noexcept {
  const nvinfer1::PluginTensorDesc& t = tensors[at].desc;
  if (t.format != nvinfer1::TensorFormat::kLINEAR || count != inputs()) return false;
  if (at == kPosition) return t.type == DataType::kINT64;
  if (at == kState || at == count + kStateOut) return t.type == DataType::kINT8;
  if (at == count + kSlots) return t.type == DataType::kINT32;
  if (at == kSin) return t.type == tensors[kCos].desc.type;
  return t.type == DataType::kFLOAT || t.type == DataType::kHALF;
}

size_t SignVQRetrieval::getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                                         int32_t) const noexcept {
  const int rows = most_rows(in[kQ].max);
  return rows == 0 ? 0 : size_t(edgekv_cuda_retrieve_workspace(&params_, rows));
}

bool SignVQRetrieval::rows(const nvinfer1::PluginTensorDesc* in, const void* q, EdgekvStep& s) const {
  const long long rows = tokens_of(in[kQ].dims);
  s.rows = int(rows);
  return rows >= 1 && rows <= params_.tail_slots && rows_of(in[kQ].dims, q, int(rows), params_.q_heads, params_.key_dim, s.q);
}

int32_t SignVQRetrieval::onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t count, const nvinfer1::PluginTensorDesc*, int32_t) noexcept {
  EdgekvStep unused{};
  if (count != inputs()) return 1;
  if (!rows(in, nullptr, unused)) return refuse("q does not have the shape that the attributes ask for, or more rows than the tail has slots");
  return 0;
}

int32_t SignVQRetrieval::enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc*, const void* const* data, void* const* out,
                                 void* workspace, cudaStream_t stream) noexcept {
  if (data[kState] != out[kStateOut]) return refuse("state and its output must be the same memory");
  EdgekvStep s{};
  if (!rows(in, data[kQ], s)) return refuse("q has a shape that does not fit the attributes");
  view_step(in, data, kQ, kPosition, kCos, s);
  auto* slots = static_cast<unsigned*>(out[kSlots]);
  return edgekv_cuda_retrieve(&params_, out[kStateOut], &s, slots, workspace, stream) ? refuse(edgekv_cuda_last_error()) : 0;
}

}  // namespace trt
}  // namespace edgekv
