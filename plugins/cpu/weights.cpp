#include "cpu/weights.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/simd_scalar.h"  // fp16

namespace edgekv {
namespace {

bool all_half(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (!(from_half(to_half(x[i])) == x[i])) return false;
  return true;
}

}  // namespace

Weights::~Weights() { std::free(memory_); }

Weights::Weights(int bits, int64_t rows, int64_t blocks, const uint8_t* given, const float* given_scales, const uint8_t* given_zeros) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, lanes = tiles * blocks * kTileRows;
  const bool half = all_half(given_scales, rows * blocks);
  const size_t scale_bytes = half ? 2 : 4, code_bytes = size_t(lanes * kBlock * bits / 8);
  const size_t bytes = (code_bytes + size_t(lanes) * (scale_bytes + 1) + 63) / 64 * 64;
  memory_ = std::aligned_alloc(64, bytes);
  if (memory_ == nullptr) throw std::bad_alloc();
  if (rows % kTileRows) std::memset(memory_, 0, bytes);
  uint8_t* all_codes = static_cast<uint8_t*>(memory_);
  void* all_scales = all_codes + code_bytes;
  int8_t* all_zeros = reinterpret_cast<int8_t*>(all_codes + code_bytes + size_t(lanes) * scale_bytes);
  tiles_ = {bits, rows, blocks, tiles, all_codes, all_scales, int(scale_bytes), all_zeros};

  const int64_t zero_bytes = (blocks * bits + 7) / 8, block_bytes = 4 * bits;
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t tile = n / kTileRows, lane = n % kTileRows;
    uint8_t* codes = all_codes + tile * blocks * kBlock * bits;
    const int64_t first = tile * blocks * kTileRows + lane;
    int8_t* zero = all_zeros + first;
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* from = given + (n * blocks + b) * block_bytes;
      uint8_t* to = codes + b * kBlock * bits + 4 * lane;
      const float scale = given_scales[n * blocks + b];
      if (half)
        static_cast<uint16_t*>(all_scales)[first + b * kTileRows] = to_half(scale);
      else
        static_cast<float*>(all_scales)[first + b * kTileRows] = scale;
      if (bits == 8) {
        zero[b * kTileRows] = int8_t(given_zeros[n * zero_bytes + b] - 128);
        for (int j = 0; j < 8; ++j)
          for (int i = 0; i < 4; ++i) to[32 * j + i] = uint8_t(from[4 * j + i] - 128);
      } else {
        zero[b * kTileRows] = int8_t(given_zeros[n * zero_bytes + b / 2] >> (b % 2 * 4) & 15);
        const auto code = [from](int k) { return uint8_t(from[k / 2] >> (k % 2 * 4) & 15); };
        for (int j = 0; j < 4; ++j)
          for (int i = 0; i < 4; ++i) to[32 * j + i] = uint8_t(code(8 * j + i) | code(8 * j + 4 + i) << 4);
      }
    }
  }
}

}  // namespace edgekv
