// edgekv::QuantisedMatMul for ONNX Runtime: a linear layer with 4- or 8-bit weights (cpu/products.h), in place of MatMulNBits.
// Bundles say MatMulNBits, which every provider has; edgekv/engine/products.py puts this op there when one is loaded for the CPU, with
// what lies right before and behind it in a decoder layer.
//
// inputs   0 x         float32 [..., K]; [..., 2 K] when gated
//          1 codes     uint8 [N, B, 4 * bits]   B blocks of 32 columns; 1 to 3 must be initialisers and are laid out anew once
//          2 scales    float32, N * B numbers
//          3 zeros     uint8, N * ceil(B * bits / 8) bytes
//          4 bias      float32 [N], optional
//          5 residual  float32 [..., N], optional: added to the product
//          6 norm      float32 [K], optional: x is normalised by its root mean square and multiplied by this first (RMSNormalization)
//          7 tiles     int32, optional: the tiles of eight outputs that are wanted; the others are -infinity. Absent or empty: all
// output   float32 [..., N]
// attributes  bits: 4 or 8
//             sums: 1 when the sums of x's blocks are columns of the weights too, as AppendBlockSums makes them, else 0
//             gated: 1 when x is two halves of K numbers, of which silu(first) * second is multiplied, else 0
//             epsilon: of the normalisation
#include "ort/quantised_matmul.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>

#include "cpu/dispatch.h"
#include "cpu/scratch.h"
#include "cpu/weights.h"
#include "ort/append_block_sums.h"
#include "ort/custom_op.h"
#include "ort/file_pages.h"
#include "ort/session_threads.h"

namespace edgekv::ort {
namespace {

enum Input : size_t { kX, kCodes, kScales, kZeros, kBias, kResidual, kNorm, kTiles, kInputs };

constexpr int64_t kItemBytes = 24 << 10;  // of weights that a work item reads: a few microseconds, and they stay in the first cache
constexpr int64_t kItemRows = 64;         // that meet them there

struct Kernel {
  static constexpr const char* kName = "QuantisedMatMul";
  const Api* api;
  int32_t bits = 0, sums = 0, gated = 0;
  float epsilon = 0;
  std::unique_ptr<Weights> weights;
  int create(const KernelInfo* info);
  int compute(KernelContext* context) const;
  struct Call {
    BlockSumsCall x;  // columns: after gating
    Tensor more[kTiles - kBias], tiles;
  };
  int read(KernelContext* context, Call* call) const;
  const float* prepare(const Call& call, int64_t row, float* work) const;
};

int Kernel::create(const KernelInfo* info) {
  Tensor codes, scales, zeros;
  if (read_number(api, info, "bits", &bits) || read_number(api, info, "sums", &sums) || read_number(api, info, "gated", &gated) ||
      read_number(api, info, "epsilon", &epsilon))
    return 1;
  if (bits != 4 && bits != 8) return fail("attribute bits must be 4 or 8 and is %d", bits);
  if ((sums | 1) != 1 || (gated | 1) != 1) return fail("attributes sums and gated must be 0 or 1");
  if (read_constant(api, info, kCodes, &codes) || read_constant(api, info, kScales, &scales) || read_constant(api, info, kZeros, &zeros)) return 1;
  if (codes.rank != 3 || codes.data == nullptr || codes.dims[2] != 4 * bits)
    return fail("codes must have the shape [N, blocks, %d]", 4 * bits);
  const int64_t rows = codes.dims[0], blocks = codes.dims[1];
  if (scales.size() != rows * blocks || zeros.size() != rows * ((blocks * bits + 7) / 8))
    return fail("scales and zeros must have one number for each of the %lld blocks of codes", static_cast<long long>(rows * blocks));
  weights = std::make_unique<Weights>(bits, rows, blocks, static_cast<const uint8_t*>(codes.data), static_cast<const float*>(scales.data),
                                      static_cast<const uint8_t*>(zeros.data));
  release_file_pages(codes.data, size_t(codes.size()));
  release_file_pages(scales.data, size_t(scales.size()) * sizeof(float));
  return 0;
}

int Kernel::read(KernelContext* context, Call* call) const {
  const WeightTiles& w = weights->tiles();
  BlockSumsCall& x = call->x;
  if (read_block_sums(api, context, &x)) return 1;
  for (size_t i = kBias; i < kTiles; ++i)
    if (read_input(api, context, i, &call->more[i - kBias])) return 1;
  if (read_input(api, context, kTiles, &call->tiles)) return 1;
  const int64_t given = x.columns;
  if (gated) x = block_sums_call(x.x, given / 2);
  if (given % (gated + 1) != 0 || (sums ? x.width : x.wide) != w.blocks * kBlock)
    return fail("x has %lld columns, which does not fit weights with %lld", static_cast<long long>(given), static_cast<long long>(w.blocks * kBlock));
  const int64_t sizes[] = {w.rows, x.rows * w.rows, x.columns};
  const char* names[] = {"bias", "residual", "norm"};
  for (int i = 0; i < 3; ++i)
    if (call->more[i].data != nullptr && call->more[i].size() != sizes[i])
      return fail("%s must have %lld numbers", names[i], static_cast<long long>(sizes[i]));
  const auto* tile = static_cast<const int32_t*>(call->tiles.data);
  for (int64_t i = 0; tile != nullptr && i < call->tiles.size(); ++i)
    if (tile[i] < 0 || tile[i] >= w.tiles) return fail("tiles must be between 0 and %lld", static_cast<long long>(w.tiles - 1));
  return 0;
}

// One row, made ready in `work` where it is not multiplied as it comes.
const float* Kernel::prepare(const Call& call, int64_t row, float* work) const {
  const BlockSumsCall& x = call.x;
  const float* from = static_cast<const float*>(x.x.data) + row * x.columns * (gated + 1);
  const auto* norm = static_cast<const float*>(call.more[kNorm - kBias].data);
  if (gated) kernels().gate(from, x.columns, work), from = work;
  if (norm != nullptr) kernels().normalise(from, norm, x.columns, epsilon, work), from = work;
  if (sums) {
    append_sums(x, from, work);
    return work;
  }
  if (x.columns == x.wide) return from;
  if (from != work) std::memcpy(work, from, size_t(x.columns) * sizeof(float));
  std::fill(work + x.columns, work + x.wide, 0.0f);
  return work;
}

int Kernel::compute(KernelContext* context) const {
  const WeightTiles& w = weights->tiles();
  Call call;
  if (read(context, &call)) return 1;
  int64_t shape[Tensor::kMaxRank];
  std::copy(call.x.x.dims, call.x.x.dims + call.x.x.rank, shape);
  shape[call.x.x.rank - 1] = w.rows;
  void* y;
  if (make_output(api, context, 0, shape, call.x.x.rank, &y)) return 1;
  const ProductOutput out = {static_cast<const float*>(call.more[0].data), static_cast<const float*>(call.more[1].data), static_cast<float*>(y)};

  const int64_t rows = call.x.rows, width = w.blocks * kBlock;
  Scratch scratch;
  void* memory = scratch.reserve(quantised_bytes(rows, w.blocks));
  if (memory == nullptr) return fail("out of memory");
  const QuantisedRows x = quantised_rows(rows, w.blocks, memory);

  SessionThreads threads(api, context);
  const Kernels& kernel = kernels();
  std::atomic<bool> starved{false};
  const auto quantise = [&](size_t row) {
    Scratch wide;
    auto* work = static_cast<float*>(wide.reserve(size_t(width) * sizeof(float)));
    if (work == nullptr) {
      starved = true;
    } else {
      kernel.quantise_row(prepare(call, int64_t(row), work), x, int64_t(row));
    }
  };
  if (rows < 16) {
    Inline().each(size_t(rows), quantise);
  } else {
    threads.each(size_t(rows), quantise);
  }
  if (starved) return fail("out of memory");

  const auto* wanted = static_cast<const int32_t*>(call.tiles.data);
  const int64_t count = wanted == nullptr ? w.tiles : call.tiles.size();
  if (wanted != nullptr) std::fill(out.y, out.y + rows * w.rows, -std::numeric_limits<float>::infinity());
  const int64_t tiles = std::max<int64_t>(1, kItemBytes / tile_bytes(w)), parts = (count + tiles - 1) / tiles;
  const int64_t row_parts = (rows + kItemRows - 1) / kItemRows;
  const auto multiply = [&](size_t item) {
    const int64_t part = int64_t(item) % parts, row = int64_t(item) / parts * kItemRows, end = std::min(rows, row + kItemRows);
    const int64_t first = part * tiles, last = std::min(count, first + tiles);
    if (wanted == nullptr) return kernel.multiply(w, first, last, x, row, end, out);
    for (int64_t i = first; i < last; ++i) kernel.multiply(w, wanted[i], wanted[i] + 1, x, row, end, out);
  };
  threads.each(size_t(parts * row_parts), multiply);
  return 0;
}

const CustomOp* make_op() {
  static CustomOp op = custom_op<Kernel>();
  op.get_input_count = [](const CustomOp*) -> size_t { return kInputs; };
  op.get_input_type = [](const CustomOp*, size_t i) { return i == kCodes || i == kZeros ? kUint8 : i == kTiles ? kInt32 : kFloat; };
  op.get_input_presence = [](const CustomOp*, size_t i) { return i >= kBias ? kOptional : kRequired; };
  op.get_output_count = [](const CustomOp*) -> size_t { return 1; };
  op.get_output_type = [](const CustomOp*, size_t) { return kFloat; };
  return &op;
}

}  // namespace

const CustomOp* quantised_matmul() {
  static const CustomOp* op = make_op();
  return op;
}

}  // namespace edgekv::ort
