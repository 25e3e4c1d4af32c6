#include "cpu/rotations.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace edgekv {
namespace {

constexpr int kRows = 256;

struct Made {
  std::vector<float> inv_freq, numbers;
  RotationTables tables;

  Made(const float* frequencies, int pairs) : inv_freq(frequencies, frequencies + pairs) {
    const int stride = (pairs + 15) / 16 * 16, size = kRows * stride;
    numbers.resize(size_t(6) * size);
    tables.pairs = pairs, tables.stride = stride;
    double step = 1;
    for (int level = 0; level < 3; ++level, step *= kRows) {
      float *cos = numbers.data() + size_t(2 * level) * size, *sin = cos + size;
      tables.cos[level] = cos, tables.sin[level] = sin;
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < pairs; ++i) {
          const double angle = row * step * frequencies[i];
          cos[row * stride + i] = float(std::cos(angle));
          sin[row * stride + i] = float(std::sin(angle));
        }
      }
    }
  }
};

}  // namespace

const RotationTables& rotation_tables(const float* inv_freq, int pairs) {
  static std::mutex mutex;
  // Never destroyed: steps may still run on other threads while the process exits. A model has one or two of them.
  static auto* all = new std::vector<std::unique_ptr<Made>>;
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& made : *all)
    if (made->tables.pairs == pairs && (pairs == 0 || std::memcmp(made->inv_freq.data(), inv_freq, size_t(pairs) * sizeof(float)) == 0)) return made->tables;
  all->push_back(std::make_unique<Made>(inv_freq, pairs));
  return all->back()->tables;
}

}  // namespace edgekv
