// attributes.def as JSON, for the Python side to build its structure from.
#pragma once

namespace edgekv {

// {"layout_version", "lanes", "header_bytes", "isa": [names this machine can run], "attributes": [{"name", "type", "default"}]}
const char* schema_json();

}  // namespace edgekv
