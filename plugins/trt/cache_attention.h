// BoundedCacheAttention as a TensorRT plugin (IPluginV3), for TensorRT 10.3 to 11. The state is one int8 tensor that is input and
// output at the same address (getAliasedInput), so the engine updates the cache in place.
//
// inputs   q, k, v float32 or float16, [1, heads, T, dim] or [1, T, heads * dim], each on its own; position int64 [1];
//          state int8 [bytes]; with fused_rotary also cos, sin [1, T, rotary_dim / 2 or rotary_dim], float32 or float16
// outputs  y [1, T, q_heads * value_dim], of q's type; state, the same memory as the input
#pragma once
#include <NvInferRuntime.h>

#include <vector>

#include "../layout/state_layout.h"

namespace edgekv {
namespace trt {

constexpr const char* kPluginName = "BoundedCacheAttention";
constexpr const char* kPluginVersion = "1";
constexpr const char* kPluginNamespace = "edgekv";

// Sends a sentence to TensorRT's logger, or to stderr before TensorRT has given one.
void log_error(const char* sentence);
void set_logger_finder(nvinfer1::ILoggerFinder* finder);

class CacheAttention final : public nvinfer1::IPluginV3,
                             public nvinfer1::IPluginV3OneCore,
                             public nvinfer1::IPluginV3OneBuildV2,
                             public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit CacheAttention(const LayerParams& params) : params_(params) {}

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  const char* getPluginName() const noexcept override { return kPluginName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  int32_t getNbOutputs() const noexcept override { return 2; }
  int32_t getAliasedInput(int32_t output) noexcept override { return output == kStateOut ? kState : -1; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t outputs, const nvinfer1::DataType* inputs, int32_t count) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t count, const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                          int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t at, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t inputs, int32_t outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*, int32_t) noexcept override { return 0; }
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count, const nvinfer1::DynamicPluginTensorDesc*,
                          int32_t) const noexcept override;

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t count, const nvinfer1::PluginTensorDesc* outputs,
                        int32_t output_count) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out, const void* const* inputs, void* const* outputs,
                  void* workspace, cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  enum Input : int32_t { kQ, kK, kV, kPosition, kState, kCos, kSin };
  enum Output : int32_t { kY, kStateOut };
  int32_t inputs() const { return params_.fused_rotary ? 7 : 5; }

  LayerParams params_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

// Makes plugins from ONNX attributes while building, and from the engine's own fields when it is loaded.
class CacheAttentionCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  CacheAttentionCreator();
  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* given, nvinfer1::TensorRTPhase phase) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return kPluginName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

// The PluginFields of attributes.def, pointing at the values in `params`.
std::vector<nvinfer1::PluginField> fields_of(const LayerParams& params);

}  // namespace trt
}  // namespace edgekv
