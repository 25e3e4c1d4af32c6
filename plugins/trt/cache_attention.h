// BoundedCacheAttention as a TensorRT plugin (IPluginV3), for TensorRT 10.3 to 11. The state is one int8 tensor that is input and
// output at the same address (getAliasedInput), so the engine updates the cache in place.
//
// inputs   q, k, v float32 or float16, [1, heads, T, dim] or [1, T, heads * dim], each on its own; position int64 [1];
//          state int8 [bytes]; with fused_rotary also cos, sin [1, T, rotary_dim / 2 or rotary_dim], float32 or float16; of a
//          compressed cache last the slots that SignVQRetrieval gives
// outputs  y [1, T, q_heads * value_dim], of q's type; state, the same memory as the input
#pragma once
#include "plugin.h"

namespace edgekv {
namespace trt {

class CacheAttention final : public LayerPlugin {
 public:
  static constexpr const char* kName = "BoundedCacheAttention";
  explicit CacheAttention(const LayerParams& params) : LayerPlugin(kName, params) {}

  nvinfer1::IPluginV3* clone() noexcept override { return new (std::nothrow) CacheAttention(params_); }
  int32_t getAliasedInput(int32_t output) noexcept override { return output == kStateOut ? kState : -1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t outputs, const nvinfer1::DataType* inputs, int32_t count) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t count, const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                          int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t at, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t inputs, int32_t outputs) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count, const nvinfer1::DynamicPluginTensorDesc*,
                          int32_t) const noexcept override;
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t count, const nvinfer1::PluginTensorDesc* outputs,
                        int32_t output_count) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out, const void* const* inputs, void* const* outputs,
                  void* workspace, cudaStream_t stream) noexcept override;

 private:
  enum Input : int32_t { kQ, kK, kV, kPosition, kState, kCos, kSin };
  enum Output : int32_t { kY, kStateOut };
  bool packed() const { return params_.format == kFormatSelfIndex; }
  int32_t inputs() const { return (params_.fused_rotary ? 7 : 5) + packed(); }
  int32_t slots() const { return packed() ? inputs() - 1 : -1; }  // the place of that input
  bool rows(const nvinfer1::PluginTensorDesc* in, const void* const* data, EdgekvStep& step) const;
};

}  // namespace trt
}  // namespace edgekv
