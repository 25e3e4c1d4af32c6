// From attributes to plugins. The fields come from attributes.def, so that they cannot drift from the other adaptors.
#include <cstdio>
#include <cstring>

#include "cache_attention.h"
#include "sign_vq_retrieval.h"

namespace edgekv {
namespace trt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

nvinfer1::ILoggerFinder* logger_finder = nullptr;

template <typename Number>
bool read_as(const PluginField& f, double& out) {
  Number v;
  std::memcpy(&v, f.data, sizeof(v));
  out = double(v);
  return true;
}

// One number of whatever type the parser made of the attribute.
bool read_number(const PluginField& f, double& out) {
  if (!f.data || f.length != 1) return false;
  switch (f.type) {
    case PluginFieldType::kINT32: return read_as<int32_t>(f, out);
    case PluginFieldType::kINT64: return read_as<int64_t>(f, out);
    case PluginFieldType::kFLOAT32: return read_as<float>(f, out);
    case PluginFieldType::kFLOAT64: return read_as<double>(f, out);
    default: return false;
  }
}

// Null, or the field that could not be read. Fields of other names (the table of frequencies, say) are not ours to judge.
const char* read_params(const nvinfer1::PluginFieldCollection& given, LayerParams& p) {
  for (int32_t i = 0; i < given.nbFields; ++i) {
    const PluginField& f = given.fields[i];
    double v = 0;
    if (!f.name) continue;
#define EDGEKV_INT(field, value)                                                              \
  if (std::strcmp(f.name, #field) == 0) {                                                     \
    if (!read_number(f, v) || v != double(int32_t(v))) return #field;                         \
    p.field = int32_t(v);                                                                     \
  }
#define EDGEKV_FLOAT(field, value)                                                            \
  if (std::strcmp(f.name, #field) == 0) {                                                     \
    if (!read_number(f, v)) return #field;                                                    \
    p.field = float(v);                                                                       \
  }
#include "../layout/attributes.def"
#undef EDGEKV_INT
#undef EDGEKV_FLOAT
  }
  return nullptr;
}

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) { logger_finder = finder; }

void log_error(const char* sentence) {
  nvinfer1::ILogger* logger = logger_finder ? logger_finder->findLogger() : nullptr;
  if (logger) logger->log(nvinfer1::ILogger::Severity::kERROR, sentence);
  else std::fprintf(stderr, "%s\n", sentence);
}

std::vector<PluginField> fields_of(const LayerParams& p) {
  return {
#define EDGEKV_INT(field, value) PluginField(#field, &p.field, PluginFieldType::kINT32, 1),
#define EDGEKV_FLOAT(field, value) PluginField(#field, &p.field, PluginFieldType::kFLOAT32, 1),
#include "../layout/attributes.def"
#undef EDGEKV_INT
#undef EDGEKV_FLOAT
  };
}

bool params_of(const char* plugin, const char* name, const nvinfer1::PluginFieldCollection* given, LayerParams& p) {
  char sentence[256];
  const char* wrong = given ? read_params(*given, p) : "every attribute";
  const char* projected = p.head_dim || p.latent ? "this plugin stores keys as they come and cannot make them thinner (attributes head_dim, latent)" : nullptr;
  const char* refused = wrong ? nullptr : projected ? projected : check_params(p);
  if (!wrong && !refused) return true;
  if (wrong)
    std::snprintf(sentence, sizeof(sentence), "%s %s: attribute %s is not one number of the right kind", plugin, name ? name : "", wrong);
  else
    std::snprintf(sentence, sizeof(sentence), "%s %s: %s", plugin, name ? name : "", refused);
  log_error(sentence);
  return false;
}

}  // namespace trt
}  // namespace edgekv

// The two functions that registry.load_library() looks for. Registration by TensorRT's own macro would need a symbol of libnvinfer
// when the library is loaded, and so would tie it to one version.
extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static edgekv::trt::Creator<edgekv::trt::CacheAttention> attention;
  static edgekv::trt::Creator<edgekv::trt::SignVQRetrieval> retrieval;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&attention, &retrieval};
  count = 2;
  return creators;
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { edgekv::trt::set_logger_finder(finder); }
