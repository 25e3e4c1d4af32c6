// What edgekv's TensorRT plugins share: names, fields, creators, and how they see the rows of a step.
#pragma once
#include <NvInferRuntime.h>

#include <new>
#include <vector>

#include "../cuda/api.h"
#include "../layout/state_layout.h"

namespace edgekv {
namespace trt {

constexpr const char* kPluginVersion = "1";
constexpr const char* kPluginNamespace = "edgekv";

// Sends a sentence to TensorRT's logger, or to stderr before TensorRT has given one.
void log_error(const char* sentence);
void log_error(const char* plugin, const char* sentence);
void set_logger_finder(nvinfer1::ILoggerFinder* finder);

// The PluginFields of attributes.def, pointing at the values in `params`.
std::vector<nvinfer1::PluginField> fields_of(const LayerParams& params);

// Reads and checks them; false, and a sentence to the logger, when they make no sense. `plugin` and `name` are for the sentence.
bool params_of(const char* plugin, const char* name, const nvinfer1::PluginFieldCollection* given, LayerParams& params);

// Rows t and heads h of a tensor [1, heads, T, dim] or [1, T, heads * dim]; false when its shape is not that.
bool rows_of(const nvinfer1::Dims& d, const void* data, int rows, int heads, int dim, EdgekvRows& out);
// T of such a tensor, -1 when it is none.
long long tokens_of(const nvinfer1::Dims& d);
// The same while the engine is built; null when it is none.
const nvinfer1::IDimensionExpr* tokens_of(const nvinfer1::DimsExprs& d);

// Words of 32 bits per row that say which body slots it attends to. A tensor has at least one.
inline int slot_words(const LayerParams& p) { return p.body_slots >= 32 ? p.body_slots / 32 : 1; }

// A plugin of one layer of the cache. All of them have the layer's parameters as their fields.
class LayerPlugin : public nvinfer1::IPluginV3,
                    public nvinfer1::IPluginV3OneCore,
                    public nvinfer1::IPluginV3OneBuildV2,
                    public nvinfer1::IPluginV3OneRuntime {
 public:
  LayerPlugin(const char* name, const LayerParams& params) : params_(params), name_(name) {}

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  const char* getPluginName() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  int32_t getNbOutputs() const noexcept override { return 2; }
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*, int32_t) noexcept override { return 0; }
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 protected:
  // Whether the state has the size that the attributes ask for, as far as shapes tell while building.
  bool state_fits(const nvinfer1::DimsExprs& state) const;
  // What the rows of a step have in common: their type, the position, and with fused_rotary the tables, at the places given.
  void view_step(const nvinfer1::PluginTensorDesc* in, const void* const* data, int32_t q, int32_t position, int32_t cos, EdgekvStep& step) const;
  // Rows for a workspace: the most there may be, but no more than the tail takes.
  int most_rows(const nvinfer1::Dims& q) const;
  int32_t refuse(const char* sentence) const { return log_error(name_, sentence), 1; }

  LayerParams params_;

 private:
  const char* name_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

// Makes plugins from ONNX attributes while building, and from the engine's own fields when it is loaded.
template <typename Plugin>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() {
    static const LayerParams defaults;
    fields_ = fields_of(defaults);
    collection_ = {int32_t(fields_.size()), fields_.data()};
  }
  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* given, nvinfer1::TensorRTPhase) noexcept override {
    LayerParams params;
    return params_of(Plugin::kName, name, given, params) ? new (std::nothrow) Plugin(params) : nullptr;
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return Plugin::kName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace trt
}  // namespace edgekv
