#include "cache_attention.h"

namespace edgekv {
namespace trt {

using nvinfer1::DataType;

int32_t CacheAttention::getOutputDataTypes(DataType* types, int32_t outputs, const DataType* in, int32_t count) const noexcept {
  if (outputs != 2 || count != inputs()) return 1;
  types[kY] = in[kQ];
  types[kStateOut] = in[kState];
  return 0;
}

int32_t CacheAttention::getOutputShapes(const nvinfer1::DimsExprs* in, int32_t count, const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* out,
                                        int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept {
  if (count != inputs() || output_count != 2)
    return refuse("wrong number of inputs: q, k, v, position, state, and cos, sin when fused_rotary is set, slots when the cache is compressed");
  const auto* tokens = tokens_of(in[kQ]);
  if (!tokens) return refuse("q must be [1, heads, T, dim] or [1, T, heads * dim]");
  if (!state_fits(in[kState])) return refuse("the state has not the size that the attributes ask for");
  out[kY].nbDims = 3;
  out[kY].d[0] = builder.constant(1);
  out[kY].d[1] = tokens;
  out[kY].d[2] = builder.constant((long long)params_.q_heads * params_.value_dim);
  out[kStateOut] = in[kState];
  return 0;
}

bool CacheAttention::supportsFormatCombination(int32_t at, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t count, int32_t) noexcept {
  const nvinfer1::PluginTensorDesc& t = tensors[at].desc;
  if (t.format != nvinfer1::TensorFormat::kLINEAR || count != inputs()) return false;
  if (at == kPosition) return t.type == DataType::kINT64;
  if (at == kState || at == count + kStateOut) return t.type == DataType::kINT8;
  if (at == slots()) return t.type == DataType::kINT32;
  const bool chosen = at == kQ || (at == kCos && at < count);  // the first of its kind; k, v and y follow q, sin follows cos
  if (chosen) return t.type == DataType::kFLOAT || t.type == DataType::kHALF;
  return t.type == tensors[at == kSin && at < count ? kCos : kQ].desc.type;
}

size_t CacheAttention::getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                                        int32_t) const noexcept {
  const int rows = most_rows(in[kQ].max);
  return rows == 0 ? 0 : size_t(edgekv_cuda_step_workspace(&params_, rows));
}

// The rows of a step; false when shapes do not fit the attributes.
bool CacheAttention::rows(const nvinfer1::PluginTensorDesc* in, const void* const* data, EdgekvStep& s) const {
  const long long rows = tokens_of(in[kQ].dims);
  const auto at = [&](int32_t i) { return data ? data[i] : nullptr; };
  if (rows < 1 || rows > params_.tail_slots || !rows_of(in[kQ].dims, at(kQ), int(rows), params_.q_heads, params_.key_dim, s.q) ||
      !rows_of(in[kK].dims, at(kK), int(rows), params_.kv_heads, params_.key_dim, s.k) ||
      !rows_of(in[kV].dims, at(kV), int(rows), params_.kv_heads, params_.value_dim, s.v))
    return false;
  if (packed()) {
    const nvinfer1::Dims& d = in[slots()].dims;
    if (d.nbDims != 3 || d.d[0] != params_.kv_heads || d.d[1] != rows || d.d[2] != slot_words(params_)) return false;
    s.slots = static_cast<const unsigned*>(at(slots()));
  }
  s.rows = int(rows);
  return true;
}

int32_t CacheAttention::onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t count, const nvinfer1::PluginTensorDesc*, int32_t) noexcept {
  EdgekvStep unused{};
  if (count != inputs()) return 1;
  if (!rows(in, nullptr, unused)) return refuse("q, k, v or slots do not have the shapes that the attributes ask for, or more rows than the tail has slots");
  return 0;
}

int32_t CacheAttention::enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc*, const void* const* data, void* const* out,
                                void* workspace, cudaStream_t stream) noexcept {
  if (data[kState] != out[kStateOut]) return refuse("state and its output must be the same memory");
  EdgekvStep s{};
  if (!rows(in, data, s)) return refuse("q, k, v or slots has a shape that does not fit the attributes");
  view_step(in, data, kQ, kPosition, kCos, s);
  s.y = out[kY];
  return edgekv_cuda_step(&params_, out[kStateOut], &s, workspace, stream) ? refuse(edgekv_cuda_last_error()) : 0;
}

}  // namespace trt
}  // namespace edgekv
