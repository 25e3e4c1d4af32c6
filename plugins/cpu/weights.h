// Weights of a linear layer in blocks of 32 columns, as MatMulNBits stores them, and the same laid out for the kernels in products.h.
//
//   w[n, k] = scale[n, b] * (code[n, k] - zero[n, b]),  b = k / 32
//
// Eight rows n side by side are a tile, so that one vector of 32-bit lanes belongs to eight outputs and no sum goes across lanes.
// Three planes, each a single stream in the order in which a product reads it (rows and columns that are missing are zeros):
//
//   codes   uint8 [tiles][blocks][bits][32]  4 bits: byte 4 l + i of line j holds, of row l of the tile, column 8 j + i in its low and
//                                            8 j + 4 + i in its high half. 8 bits: column 4 j + i, less 128 (int8)
//   scales  fp16 [tiles][blocks][8] where all of a layer are such numbers, as in what edgekv exports, else float
//   zeros   int8  [tiles][blocks][8]         8 bits: less 128
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgekv {

constexpr int64_t kBlock = 32;  // columns that share a scale and a zero point
constexpr int64_t kTileRows = 8;

// What the kernels read.
struct WeightTiles {
  int bits;
  int64_t rows, blocks, tiles;
  const uint8_t* codes;
  const void* scales;
  int scale_bytes;  // 2: fp16, 4: float
  const int8_t* zeros;
};

static inline int64_t tile_bytes(const WeightTiles& w) { return w.blocks * (kBlock * w.bits + (w.scale_bytes + 1) * kTileRows); }

// Owns the tiles of a layer.
class Weights {
 public:
  // codes uint8 [rows][blocks][4 * bits], scales float32 [rows][blocks], zeros uint8 [rows][ceil(blocks * bits / 8)], as in
  // MatMulNBits: of two 4-bit numbers the first is the low half of a byte. bits: 4 or 8. Throws std::bad_alloc.
  Weights(int bits, int64_t rows, int64_t blocks, const uint8_t* codes, const float* scales, const uint8_t* zeros);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  const WeightTiles& tiles() const { return tiles_; }

 private:
  WeightTiles tiles_;
  void* memory_;
};

// Rows of activations in 8 bits, quantised block by block: x ~ scale * q, q in -127..127.
struct QuantisedRows {
  int64_t blocks;
  int8_t* q;       // [rows][blocks * 32]
  float* scales;   // [rows][blocks]
  uint32_t* sums;  // [rows][blocks]: sum of a block's q as int16 in the low half, the high half zero
};

static inline size_t quantised_bytes(int64_t rows, int64_t blocks) { return size_t(rows * blocks) * (kBlock + sizeof(float) + sizeof(uint32_t)); }

// Lays them out in memory of quantised_bytes(), aligned to 4 bytes.
static inline QuantisedRows quantised_rows(int64_t rows, int64_t blocks, void* memory) {
  auto* q = static_cast<int8_t*>(memory);
  auto* scales = reinterpret_cast<float*>(q + rows * blocks * kBlock);
  return {blocks, q, scales, reinterpret_cast<uint32_t*>(scales + rows * blocks)};
}

// Where a product goes: y [rows][w.rows] = product + bias [w.rows] + residual [rows][w.rows], the latter two unless null.
struct ProductOutput {
  const float *bias, *residual;
  float* y;
};

}  // namespace edgekv
