// Loads the plugin library into the registry of the TensorRT it is linked with, and makes a plugin from good and bad fields.
#include <NvInferRuntime.h>

#include <cstdio>

extern "C" nvinfer1::IPluginRegistry* getPluginRegistry() noexcept;

static nvinfer1::IPluginV3* make(nvinfer1::IPluginCreatorV3One* creator, int32_t q_heads) {
  const int32_t kv_heads = 3, dim = 64, slots = 64;
  const auto kind = nvinfer1::PluginFieldType::kINT32;
  const nvinfer1::PluginField fields[] = {{"q_heads", &q_heads, kind, 1}, {"kv_heads", &kv_heads, kind, 1},     {"key_dim", &dim, kind, 1},
                                          {"value_dim", &dim, kind, 1},   {"body_slots", &slots, kind, 1}, {"tail_slots", &slots, kind, 1}};
  const nvinfer1::PluginFieldCollection given{6, fields};
  return creator->createPlugin("layer", &given, nvinfer1::TensorRTPhase::kBUILD);
}

int main(int count, char** arguments) {
  if (count != 2) return 2;
  nvinfer1::IPluginRegistry* registry = getPluginRegistry();
  if (!registry->loadLibrary(arguments[1])) return std::puts("the registry refused the library"), 1;
  auto* creator = static_cast<nvinfer1::IPluginCreatorV3One*>(registry->getCreator("BoundedCacheAttention", "1", "edgekv"));
  if (!creator) return std::puts("the library offered no creator"), 1;
  if (!make(creator, 9) || make(creator, 8)) return std::puts("the creator took or refused the wrong fields"), 1;
  std::printf("TensorRT %d: 9 query heads made, 8 over 3 refused\n", getInferLibMajorVersion());
  return 0;
}
