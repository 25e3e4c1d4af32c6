#pragma once
#include <cstddef>

namespace edgekv::ort {

// Takes the whole pages of [data, data + bytes) out of this process if they are mapped from a file, as ONNX Runtime maps external data. For
// initialisers whose numbers an op has laid out elsewhere: whoever reads them again gets them from the file. Other memory stays.
void release_file_pages(const void* data, size_t bytes);

}  // namespace edgekv::ort
