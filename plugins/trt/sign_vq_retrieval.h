// SignVQRetrieval as a TensorRT plugin: which slots of a compressed body the rows of a step attend to.
//
// inputs   q float32 or float16 [1, heads, T, dim] or [1, T, heads * dim]; position int64 [1]; state int8 [bytes]; with fused_rotary
//          also cos, sin as for BoundedCacheAttention
// outputs  slots int32 [kv_heads, T, body_slots / 32]: bit i of word w stands for slot 32 w + i. Shapes of an engine follow from
//          shapes, and how many slots are wanted stands in the state, so there is a bit for every slot and no list.
//          state, the same memory as the input: the op that appends to it takes this output, so it runs later, and the tensor has one
//          reader, so that TensorRT has no reason to copy it
#pragma once
#include "plugin.h"

namespace edgekv {
namespace trt {

class SignVQRetrieval final : public LayerPlugin {
 public:
  static constexpr const char* kName = "SignVQRetrieval";
  explicit SignVQRetrieval(const LayerParams& params) : LayerPlugin(kName, params) {}

  nvinfer1::IPluginV3* clone() noexcept override { return new (std::nothrow) SignVQRetrieval(params_); }
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
  enum Input : int32_t { kQ, kPosition, kState, kCos, kSin };
  enum Output : int32_t { kSlots, kStateOut };
  int32_t inputs() const { return params_.fused_rotary ? 5 : 3; }
  bool rows(const nvinfer1::PluginTensorDesc* in, const void* q, EdgekvStep& step) const;
};

}  // namespace trt
}  // namespace edgekv
