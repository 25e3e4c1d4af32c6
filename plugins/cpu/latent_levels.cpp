#include "cpu/latent_levels.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "cpu/quantise.h"

namespace edgekv {
namespace {

constexpr float kMostLevel = 127.0f;
constexpr int kLatentBits = 4;

// Spreads the n numbers of a group over all of them.
void spread(float* y, int n) {
  const int block = n & -n;
  transform(y, n, block, float(1 / std::sqrt(double(block))));
}

}  // namespace

void DecoderLevels::Free::operator()(void* memory) const { std::free(memory); }

DecoderLevels::DecoderLevels(const LayerParams& p, const float* decode) {
  const int dim = p.key_dim, stride = (dim + EDGEKV_LANES - 1) / EDGEKV_LANES * EDGEKV_LANES, runs = (p.latent + 15) / 16;
  const int groups = (p.latent + EDGEKV_GROUP - 1) / EDGEKV_GROUP;
  const size_t numbers = size_t(runs) * 16 * stride, factors = size_t(2 * groups + 1) * stride;  // of a kv head
  const size_t bytes = p.kv_heads * (numbers + factors * sizeof(float));                         // a multiple of 64
  memory_.reset(std::aligned_alloc(64, bytes));
  if (memory_ == nullptr) return;
  std::memset(memory_.get(), 0, bytes);
  int8_t* level = static_cast<int8_t*>(memory_.get());
  float* factor = reinterpret_cast<float*>(level + p.kv_heads * numbers);
  view = {level, factor, stride, groups, int64_t(numbers), int64_t(factors)};
  for (int head = 0; head < p.kv_heads; ++head, level += numbers, factor += factors) {
    const float* rows = decode + int64_t(head) * (p.latent + 1) * dim;
    std::memcpy(factor + size_t(2 * groups) * stride, rows + int64_t(p.latent) * dim, size_t(dim) * sizeof(float));
    for (int g = 0; g < groups; ++g) {
      const int first = g * EDGEKV_GROUP, last = std::min(first + EDGEKV_GROUP, p.latent);
      for (int d = 0; d < dim; ++d) {
        float largest = 0.0f, sum = 0.0f, column[EDGEKV_GROUP];
        for (int j = first; j < last; ++j) column[j - first] = rows[int64_t(j) * dim + d];
        spread(column, last - first);
        for (int j = first; j < last; ++j) {
          largest = std::max(largest, std::fabs(column[j - first]));
          sum += column[j - first];
        }
        const float step = largest / kMostLevel, divisor = step > 0 ? step : 1.0f;
        factor[size_t(2 * g) * stride + d] = step;
        factor[size_t(2 * g + 1) * stride + d] = sum;
        for (int j = first; j < last; ++j) {
          const float x = std::nearbyint(column[j - first] / divisor);
          level[(size_t(j / 4) * stride + d) * 4 + j % 4] = int8_t(x >= -kMostLevel && x <= kMostLevel ? x : 0.0f);  // NaN becomes 0
        }
      }
    }
  }
}

void pack_latent(const LayerParams& p, const float* z, uint8_t* record) {
  uint8_t* pairs = record + latent_code_bytes(p);
  for (int first = 0; first < p.latent; first += EDGEKV_GROUP, pairs += 4) {
    float y[EDGEKV_GROUP], codes[EDGEKV_GROUP];
    const int count = std::min(p.latent - first, EDGEKV_GROUP);
    std::memcpy(y, z + first, size_t(count) * sizeof(float));
    spread(y, count);
    for (int i = count; i < EDGEKV_GROUP; ++i) y[i] = y[count - 1];
    uint16_t pair[2];
    quantise_group(y, kLatentBits, codes, pair);
    make_unbiased(y, codes, pair);
    std::memcpy(pairs, pair, 4);
    for (int i = count; i < EDGEKV_GROUP; ++i) codes[i] = 0;
    for (int run = 0; run < 2 && first + 16 * run < p.latent; ++run)
      for (int j = 0; j < 8; ++j) *record++ = uint8_t(int(codes[16 * run + j]) | int(codes[16 * run + 8 + j]) << 4);
  }
}

}  // namespace edgekv
