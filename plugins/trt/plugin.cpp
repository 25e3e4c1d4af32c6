#include "plugin.h"

#include <cstdio>

namespace edgekv {
namespace trt {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;

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

long long tokens_of(const Dims& d) { return d.nbDims == 4 ? d.d[2] : d.nbDims == 3 ? d.d[1] : -1; }
const nvinfer1::IDimensionExpr* tokens_of(const DimsExprs& d) { return d.nbDims == 4 ? d.d[2] : d.nbDims == 3 ? d.d[1] : nullptr; }

void log_error(const char* plugin, const char* sentence) {
  char text[320];
  std::snprintf(text, sizeof(text), "%s: %s", plugin, sentence);
  log_error(text);
}

nvinfer1::IPluginCapability* LayerPlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  // The exact base: TensorRT casts the pointer back without adjusting it.
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

const nvinfer1::PluginFieldCollection* LayerPlugin::getFieldsToSerialize() noexcept {
  fields_ = fields_of(params_);
  collection_ = {int32_t(fields_.size()), fields_.data()};
  return &collection_;
}

bool LayerPlugin::state_fits(const DimsExprs& state) const {
  const auto* bytes = state.nbDims == 1 ? state.d[0] : nullptr;
  return bytes && (!bytes->isConstant() || bytes->getConstantValue() == (long long)state_layout(params_).bytes);
}

void LayerPlugin::view_step(const nvinfer1::PluginTensorDesc* in, const void* const* data, int32_t q, int32_t position, int32_t cos,
                            EdgekvStep& s) const {
  s.half = in[q].type == nvinfer1::DataType::kHALF;
  s.position = static_cast<const long long*>(data[position]);
  if (!params_.fused_rotary) return;
  s.cos = data[cos];
  s.sin = data[cos + 1];
  s.table = int(in[cos].dims.d[in[cos].dims.nbDims - 1]);
  s.table_half = in[cos].type == nvinfer1::DataType::kHALF;
}

int LayerPlugin::most_rows(const Dims& q) const {
  const long long most = tokens_of(q);
  return most < 1 ? 0 : int(most < params_.tail_slots ? most : params_.tail_slots);
}

}  // namespace trt
}  // namespace edgekv
