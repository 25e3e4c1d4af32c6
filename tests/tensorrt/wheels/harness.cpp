// Plays TensorRT's part for the emulated plugin: makes it from fields, sends it through serialisation, asks what a builder asks,
// and calls enqueue on host memory.
#include <cstring>
#include <memory>

#include "trt/plugin.h"

using namespace nvinfer1;

extern "C" IPluginCreatorInterface* const* getCreators(int32_t& count);

namespace {

struct Tensor {  // as tests hand it over
  int32_t rank;
  int64_t dims[4];
  int32_t type;
  void* data;
};

PluginTensorDesc describe(const Tensor& t) {
  PluginTensorDesc d{};
  d.dims.nbDims = t.rank;
  for (int i = 0; i < t.rank; ++i) d.dims.d[i] = t.dims[i];
  d.type = DataType(t.type);
  d.format = TensorFormat::kLINEAR;
  d.scale = 1;
  return d;
}

IPluginV3OneBuildV2* build(IPluginV3* p) { return static_cast<IPluginV3OneBuildV2*>(p->getCapabilityInterface(PluginCapabilityType::kBUILD)); }
IPluginV3OneRuntime* runtime(IPluginV3* p) { return static_cast<IPluginV3OneRuntime*>(p->getCapabilityInterface(PluginCapabilityType::kRUNTIME)); }

}  // namespace

#define HARNESS extern "C" __attribute__((visibility("default")))

// The plugin as an engine would hold it: created while building, serialised, created again when the engine is loaded, cloned. Null when refused.
HARNESS IPluginV3* harness_create(const char* name, const PluginField* fields, int32_t count) {
  int32_t creators = 0;
  IPluginCreatorInterface* const* all = getCreators(creators);
  IPluginCreatorV3One* creator = nullptr;
  for (int32_t i = 0; i < creators; ++i) {
    auto* one = static_cast<IPluginCreatorV3One*>(all[i]);
    if (std::strcmp(one->getPluginName(), name) == 0) creator = one;
  }
  if (!creator) return nullptr;
  PluginFieldCollection given{count, fields};
  std::unique_ptr<IPluginV3> built(creator->createPlugin("built", &given, TensorRTPhase::kBUILD));
  if (!built) return nullptr;
  std::unique_ptr<IPluginV3> loaded(creator->createPlugin("loaded", runtime(built.get())->getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
  return loaded ? runtime(loaded.get())->attachToContext(nullptr) : nullptr;
}

HARNESS void harness_destroy(IPluginV3* p) { delete p; }

HARNESS int32_t harness_alias(IPluginV3* p, int32_t output) { return build(p)->getAliasedInput(output); }

// 1 when every tensor's type is accepted at its place, inputs first.
HARNESS int32_t harness_accepts(IPluginV3* p, const Tensor* tensors, int32_t inputs, int32_t outputs) {
  std::unique_ptr<DynamicPluginTensorDesc[]> d(new DynamicPluginTensorDesc[size_t(inputs + outputs)]{});
  for (int i = 0; i < inputs + outputs; ++i) d[size_t(i)].desc = describe(tensors[i]);
  for (int i = 0; i < inputs + outputs; ++i)
    if (!build(p)->supportsFormatCombination(i, d.get(), inputs, outputs)) return 0;
  return 1;
}

HARNESS int64_t harness_workspace(IPluginV3* p, const Tensor* tensors, int32_t inputs) {
  std::unique_ptr<DynamicPluginTensorDesc[]> d(new DynamicPluginTensorDesc[size_t(inputs)]{});
  for (int i = 0; i < inputs; ++i) {
    d[size_t(i)].desc = describe(tensors[i]);
    d[size_t(i)].max = d[size_t(i)].desc.dims;
  }
  return int64_t(build(p)->getWorkspaceSize(d.get(), inputs, nullptr, 0));
}

// onShapeChange, then enqueue. Returns 0, or what the plugin returned.
HARNESS int32_t harness_enqueue(IPluginV3* p, const Tensor* tensors, int32_t inputs, int32_t outputs, void* workspace) {
  PluginTensorDesc in[8], out[8];
  const void* sources[8];
  void* targets[8];
  for (int i = 0; i < inputs; ++i) in[i] = describe(tensors[i]), sources[i] = tensors[i].data;
  for (int i = 0; i < outputs; ++i) out[i] = describe(tensors[inputs + i]), targets[i] = tensors[inputs + i].data;
  if (const int32_t code = runtime(p)->onShapeChange(in, inputs, out, outputs)) return code;
  return runtime(p)->enqueue(in, out, sources, targets, workspace, nullptr);
}
