// edgekv::AppendBlockSums for ONNX Runtime's CUDA provider: the same bits as plugins/ort/append_block_sums.cpp, one warp per block of 32.
#include <algorithm>

#include "cuda/platform.cuh"
#include "ort/cuda/cuda_op.h"

namespace edgekv::cuda {
namespace {

constexpr int kBlock = 32, kWarpsPerBlock = 8;

struct BlockSums {
  const float* x;
  float* y;
  long long columns, blocks, wide, out;  // columns of x, its blocks, columns up to the sums, columns of y
};

__global__ void append_block_sums(BlockSums s) {
  const int lane = threadIdx.x % 32;
  const long long row = blockIdx.y, block = (long long)blockIdx.x * kWarpsPerBlock + threadIdx.x / 32;
  if (s.wide + block >= s.out) return;
  float* y = s.y + row * s.out;
  const long long at = block * kBlock + lane;
  const float v = block < s.blocks && at < s.columns ? s.x[row * s.columns + at] : 0.0f;
  if (block < s.blocks) y[at] = v;
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) sum += __shfl_sync(kFullWarp, v, lane % 8 + 8 * i);
  sum += __shfl_xor_sync(kFullWarp, sum, 4);
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  sum += __shfl_xor_sync(kFullWarp, sum, 2);
  if (lane == 0) y[s.wide + block] = sum;  // blocks behind the last give the zeros of the padding
}

}  // namespace
}  // namespace edgekv::cuda

namespace edgekv::ort {
namespace {

constexpr int64_t kBlock = cuda::kBlock;
constexpr int64_t kMostRows = 65535;  // of a grid's second dimension

int64_t padded(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

struct Kernel {
  static constexpr const char* kName = "AppendBlockSums";
  const Api* api;
  int create(const KernelInfo*) { return 0; }
  int compute(KernelContext* context) const;
};

int Kernel::compute(KernelContext* context) const {
  Tensor x;
  if (read_input(api, context, 0, &x)) return 1;
  if (x.rank < 1 || x.data == nullptr) return fail("x must have at least one row and one column");
  const int64_t columns = x.dims[x.rank - 1], rows = x.size() / columns, wide = padded(columns), blocks = wide / kBlock;
  if (rows > kMostRows) return fail("x has more than %lld rows", (long long)kMostRows);
  int64_t shape[Tensor::kMaxRank];
  std::copy(x.dims, x.dims + x.rank, shape);
  shape[x.rank - 1] = wide + padded(blocks);
  void *y, *stream;
  if (make_output(api, context, 0, shape, x.rank, &y) || stream_of(api, context, &stream)) return 1;
  const cuda::BlockSums s = {static_cast<const float*>(x.data), static_cast<float*>(y), columns, blocks, wide, shape[x.rank - 1]};
  const unsigned groups = unsigned((padded(blocks) + cuda::kWarpsPerBlock - 1) / cuda::kWarpsPerBlock);
  EDGEKV_LAUNCH(cuda::append_block_sums, dim3(groups, unsigned(rows)), dim3(32 * cuda::kWarpsPerBlock), 0, static_cast<cudaStream_t>(stream), s);
  const cudaError_t failed = cudaGetLastError();
  return failed == cudaSuccess ? 0 : fail("%s", cudaGetErrorString(failed));
}

}  // namespace

const CustomOp* cuda_append_block_sums() {
  static const CustomOp op = [] {
    CustomOp made = cuda_op<Kernel>();
    made.get_input_count = [](const CustomOp*) -> size_t { return 1; };
    made.get_input_type = [](const CustomOp*, size_t) { return kFloat; };
    made.get_input_presence = [](const CustomOp*, size_t) { return kRequired; };
    made.get_output_count = [](const CustomOp*) -> size_t { return 1; };
    made.get_output_type = [](const CustomOp*, size_t) { return kFloat; };
    return made;
  }();
  return &op;
}

}  // namespace edgekv::ort
