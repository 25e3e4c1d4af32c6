// edgekv::AppendBlockSums for ONNX Runtime: what lets 4-bit weights keep a real-valued offset per block.
//
// Blocks of 4-bit GGUF formats are w = scale * code + offset; ONNX Runtime's MatMulNBits knows only whole-numbered zero points, so
// part of the offset is left over. It is the same for all 32 columns of a block, so it meets only the sum of their inputs: with
// the sums as further columns of x, the left-over offsets become further columns of the same matrix (export/quantise.py).
//
// input   x float32 [..., K]
// output  float32 [..., P + S]: x padded with zeros to P = K rounded up to 32, then the P / 32 sums of its blocks padded to S, a
//         multiple of 32
#include "ort/append_block_sums.h"

#include <algorithm>
#include <cstring>

#include "ort/custom_op.h"
#include "ort/session_threads.h"

namespace edgekv::ort {
namespace {

constexpr int64_t kRowsPerItem = 16;

struct Kernel {
  static constexpr const char* kName = "AppendBlockSums";
  const Api* api;
  int create(const KernelInfo*) { return 0; }
  int compute(KernelContext* context) const;
};

int Kernel::compute(KernelContext* context) const {
  BlockSumsCall call;
  void* out;
  if (read_block_sums(api, context, &call) || make_output(api, context, 0, call.shape, call.x.rank, &out)) return 1;
  const float* from = static_cast<const float*>(call.x.data);
  float* to = static_cast<float*>(out);
  const auto some = [&](size_t item) {
    for (int64_t r = int64_t(item) * kRowsPerItem; r < std::min(call.rows, (int64_t(item) + 1) * kRowsPerItem); ++r)
      append_sums(call, from + r * call.columns, to + r * call.width);
  };
  const size_t items = size_t((call.rows + kRowsPerItem - 1) / kRowsPerItem);
  if (items == 1) {
    some(0);
  } else {
    SessionThreads(api, context).each(items, some);
  }
  return 0;
}

const CustomOp* make_op() {
  static CustomOp op = custom_op<Kernel>();
  op.get_input_count = [](const CustomOp*) -> size_t { return 1; };
  op.get_input_type = [](const CustomOp*, size_t) { return kFloat; };
  op.get_input_presence = [](const CustomOp*, size_t) { return kRequired; };
  op.get_output_count = [](const CustomOp*) -> size_t { return 1; };
  op.get_output_type = [](const CustomOp*, size_t) { return kFloat; };
  return &op;
}

}  // namespace

void append_sums(const BlockSumsCall& c, const float* x, float* y) {
  if (y != x) memcpy(y, x, c.columns * sizeof(float));
  std::fill(y + c.columns, y + c.width, 0.0f);
  for (int64_t b = 0; b < c.wide / kSumBlock; ++b) {
    float lanes[8] = {};
    for (int64_t i = 0; i < kSumBlock; i += 8)
      for (int64_t l = 0; l < 8; ++l) lanes[l] += y[b * kSumBlock + i + l];
    y[c.wide + b] = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  }
}

const CustomOp* append_block_sums() {
  static const CustomOp* op = make_op();
  return op;
}

}  // namespace edgekv::ort
