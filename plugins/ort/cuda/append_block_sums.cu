// edgekv::AppendBlockSums for ONNX Runtime's CUDA provider: the same bits as plugins/ort/append_block_sums.cpp, one warp per block of 32.
#include "cuda/platform.cuh"
#include "ort/append_block_sums.h"
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

constexpr int64_t kMostRows = 65535;  // of a grid's second dimension

static_assert(cuda::kBlock == kSumBlock, "the kernel sums what the other op sums");

struct Kernel {
  static constexpr const char* kName = "AppendBlockSums";
  const Api* api;
  int create(const KernelInfo*) { return 0; }
  int compute(KernelContext* context) const;
};

int Kernel::compute(KernelContext* context) const {
  BlockSumsCall c;
  if (read_block_sums(api, context, &c)) return 1;
  if (c.rows > kMostRows) return fail("x has more than %lld rows", (long long)kMostRows);
  void *y, *stream;
  if (make_output(api, context, 0, c.shape, c.x.rank, &y) || stream_of(api, context, &stream)) return 1;
  const cuda::BlockSums s = {static_cast<const float*>(c.x.data), static_cast<float*>(y), c.columns, c.wide / kSumBlock, c.wide, c.width};
  const unsigned groups = unsigned((whole_sum_blocks(s.blocks) + cuda::kWarpsPerBlock - 1) / cuda::kWarpsPerBlock);
  EDGEKV_LAUNCH(cuda::append_block_sums, dim3(groups, unsigned(c.rows)), dim3(32 * cuda::kWarpsPerBlock), 0, static_cast<cudaStream_t>(stream), s);
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
