#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/error.h"
#include "ort/kernel_io.h"
#include "ort/ort_abi.h"

namespace edgekv::ort {

// The op, valid for the life of the process.
const CustomOp* append_block_sums();

constexpr int64_t kSumBlock = 32;

inline int64_t whole_sum_blocks(int64_t n) { return (n + kSumBlock - 1) / kSumBlock * kSumBlock; }

// One call: x [rows][columns] becomes y [rows][width], which holds x padded to `wide`, a sum per block, and zeros.
struct BlockSumsCall {
  Tensor x;
  int64_t rows = 0, columns = 0, wide = 0, width = 0;
  int64_t shape[Tensor::kMaxRank] = {};
};

// One row of a call; y may be x.
void append_sums(const BlockSumsCall& call, const float* x, float* y);

// The call for rows of `columns` numbers each of x, which has as many rows.
inline BlockSumsCall block_sums_call(const Tensor& x, int64_t columns) {
  BlockSumsCall call;
  call.x = x;
  call.columns = columns;
  call.rows = x.size() / x.dims[x.rank - 1];
  call.wide = whole_sum_blocks(columns);
  call.width = call.wide + whole_sum_blocks(call.wide / kSumBlock);
  std::copy(x.dims, x.dims + x.rank, call.shape);
  call.shape[x.rank - 1] = call.width;
  return call;
}

// Reads input 0; returns 0, or 1 with a sentence (cpu/error.h).
inline int read_block_sums(const Api* api, KernelContext* context, BlockSumsCall* call) {
  Tensor x;
  if (read_input(api, context, 0, &x)) return 1;
  if (x.rank < 1 || x.data == nullptr || x.size() == 0) return fail("x must have at least one row and one column");
  *call = block_sums_call(x, x.dims[x.rank - 1]);
  return 0;
}

}  // namespace edgekv::ort
