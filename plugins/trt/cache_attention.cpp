#include "cache_attention.h"

#include <cstdio>

#include "../cuda/api.h"

namespace edgekv {
namespace trt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;

// Where row t and head h of a tensor begin; false when its shape is not that of `rows` tokens of `heads` heads of `dim` numbers.
bool rows_of(const Dims& d, const void* data, int rows, int heads, int dim, EdgekvRows& out) {
  out.data = data;
  if (d.nbDims == 4) {
    out.row_stride = dim;
    out.head_stride = (long long)rows * dim;
    return d.d[0] == 1 && d.d[1] == heads && d.d[2] == rows && d.d[3] == dim;
  }
  out.row_stride = (long long)heads * dim;
  out.head_stride = dim;
  return d.nbDims == 3 && d.d[0] == 1 && d.d[1] == rows && d.d[2] == (long long)heads * dim;
}

long long tokens(const Dims& q) { return q.nbDims == 4 ? q.d[2] : q.nbDims == 3 ? q.d[1] : -1; }

}  // namespace

nvinfer1::IPluginCapability* CacheAttention::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  // The exact base: TensorRT casts the pointer back without adjusting it.
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* CacheAttention::clone() noexcept { return new (std::nothrow) CacheAttention(params_); }

int32_t CacheAttention::getOutputDataTypes(DataType* types, int32_t outputs, const DataType* in, int32_t count) const noexcept {
  if (outputs != 2 || count != inputs()) return 1;
  types[kY] = in[kQ];
  types[kStateOut] = in[kState];
  return 0;
}

int32_t CacheAttention::getOutputShapes(const nvinfer1::DimsExprs* in, int32_t count, const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* out,
                                        int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept {
  if (count != inputs() || output_count != 2) {
    log_error("BoundedCacheAttention: wrong number of inputs: q, k, v, position, state, and cos, sin when fused_rotary is set");
    return 1;
  }
  const nvinfer1::DimsExprs& q = in[kQ];
  if (q.nbDims != 3 && q.nbDims != 4) {
    log_error("BoundedCacheAttention: q must be [1, heads, T, dim] or [1, T, heads * dim]");
    return 1;
  }
  const auto* bytes = in[kState].nbDims == 1 ? in[kState].d[0] : nullptr;
  if (!bytes || (bytes->isConstant() && bytes->getConstantValue() != (long long)state_layout(params_).bytes)) {
    log_error("BoundedCacheAttention: the state has not the size that the attributes ask for");
    return 1;
  }
  out[kY].nbDims = 3;
  out[kY].d[0] = builder.constant(1);
  out[kY].d[1] = q.nbDims == 4 ? q.d[2] : q.d[1];
  out[kY].d[2] = builder.constant((long long)params_.q_heads * params_.value_dim);
  out[kStateOut] = in[kState];
  return 0;
}

bool CacheAttention::supportsFormatCombination(int32_t at, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t count, int32_t) noexcept {
  const nvinfer1::PluginTensorDesc& t = tensors[at].desc;
  if (t.format != nvinfer1::TensorFormat::kLINEAR) return false;
  if (at == kPosition) return t.type == DataType::kINT64;
  if (at == kState || at == count + kStateOut) return t.type == DataType::kINT8;
  const bool chosen = at == kQ || (at == kCos && at < count);  // the first of its kind; k, v and y follow q, sin follows cos
  if (chosen) return t.type == DataType::kFLOAT || t.type == DataType::kHALF;
  return t.type == tensors[at == kSin && at < count ? kCos : kQ].desc.type;
}

size_t CacheAttention::getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                                        int32_t) const noexcept {
  const long long most = tokens(in[kQ].max);
  return most < 1 ? 0 : size_t(edgekv_cuda_step_workspace(&params_, int(most < params_.tail_slots ? most : params_.tail_slots)));
}

int32_t CacheAttention::onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t count, const nvinfer1::PluginTensorDesc*, int32_t) noexcept {
  if (count != inputs()) return 1;
  const long long rows = tokens(in[kQ].dims);
  EdgekvRows unused;
  if (rows < 1 || rows > params_.tail_slots || !rows_of(in[kQ].dims, nullptr, int(rows), params_.q_heads, params_.key_dim, unused) ||
      !rows_of(in[kK].dims, nullptr, int(rows), params_.kv_heads, params_.key_dim, unused) ||
      !rows_of(in[kV].dims, nullptr, int(rows), params_.kv_heads, params_.value_dim, unused)) {
    log_error("BoundedCacheAttention: q, k and v do not have the shapes that the attributes ask for, or more rows than the tail has slots");
    return 1;
  }
  return 0;
}

int32_t CacheAttention::enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc*, const void* const* data, void* const* out,
                                void* workspace, cudaStream_t stream) noexcept {
  if (data[kState] != out[kStateOut]) {
    log_error("BoundedCacheAttention: state and its output must be the same memory");
    return 1;
  }
  EdgekvStep s{};
  const long long rows = tokens(in[kQ].dims);
  if (rows < 1 || rows > params_.tail_slots || !rows_of(in[kQ].dims, data[kQ], int(rows), params_.q_heads, params_.key_dim, s.q) ||
      !rows_of(in[kK].dims, data[kK], int(rows), params_.kv_heads, params_.key_dim, s.k) ||
      !rows_of(in[kV].dims, data[kV], int(rows), params_.kv_heads, params_.value_dim, s.v)) {
    log_error("BoundedCacheAttention: q, k or v has a shape that does not fit the attributes");
    return 1;
  }
  s.half = in[kQ].type == DataType::kHALF;
  s.rows = int(rows);
  if (params_.fused_rotary) {
    s.cos = data[kCos];
    s.sin = data[kSin];
    s.table = int(in[kCos].dims.d[in[kCos].dims.nbDims - 1]);
    s.table_half = in[kCos].type == DataType::kHALF;
  }
  s.position = static_cast<const long long*>(data[kPosition]);
  s.y = out[kY];
  if (edgekv_cuda_step(&params_, out[kStateOut], &s, workspace, stream) == 0) return 0;
  log_error(edgekv_cuda_last_error());
  return 1;
}

const nvinfer1::PluginFieldCollection* CacheAttention::getFieldsToSerialize() noexcept {
  fields_ = fields_of(params_);
  collection_ = {int32_t(fields_.size()), fields_.data()};
  return &collection_;
}

}  // namespace trt
}  // namespace edgekv
