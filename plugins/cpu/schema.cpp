#include "cpu/schema.h"

#include <string>

#include "cpu/dispatch.h"
#include "layout/state_layout.h"

namespace edgekv {

const char* schema_json() {
  static const std::string text = [] {
    std::string s = "{\"layout_version\": " + std::to_string(EDGEKV_LAYOUT_VERSION) + ", \"lanes\": " + std::to_string(EDGEKV_LANES) +
                    ", \"header_bytes\": " + std::to_string(sizeof(StateHeader)) + ", \"isa\": [";
    const char* comma = "";
    for (int i = 0; const char* name = isa_name(i); ++i, comma = ", ") s += std::string(comma) + "\"" + name + "\"";
    s += "], \"attributes\": [";
    comma = "";
    auto field = [&](const char* name, const char* type, const std::string& value) {
      s += std::string(comma) + "{\"name\": \"" + name + "\", \"type\": \"" + type + "\", \"default\": " + value + "}";
      comma = ", ";
    };
#define EDGEKV_INT(name, value) field(#name, "int", std::to_string(int(value)));
#define EDGEKV_FLOAT(name, value) field(#name, "float", std::to_string(float(value)));
#include "layout/attributes.def"
#undef EDGEKV_INT
#undef EDGEKV_FLOAT
    return s + "]}";
  }();
  return text.c_str();
}

}  // namespace edgekv
