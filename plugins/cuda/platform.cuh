// What the kernels need from the platform: CUDA itself, or its emulation on a CPU (plugins/emulation), chosen by EDGEKV_EMULATE.
// Everything that differs between the two stands here, so that the kernels are one text for both.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef EDGEKV_EMULATE
#include "../emulation/cuda_emulation.h"
#define EDGEKV_SHARED(name) unsigned char* name = static_cast<unsigned char*>(::emulation::shared_memory())
// The copy of the arguments mirrors what a launch does.
#define EDGEKV_LAUNCH(kernel, grid, block, shared, stream, args) \
  do { auto copy = args; ::emulation::launch(grid, block, shared, [&] { kernel(copy); }); } while (0)
#else
#include <cuda_fp16.h>
#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>
#endif
#define EDGEKV_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define EDGEKV_LAUNCH(kernel, grid, block, shared, stream, args) kernel<<<grid, block, shared, stream>>>(args)
#endif

#define EDGEKV_HOST_DEVICE __host__ __device__ __forceinline__
#define EDGEKV_DEVICE __device__ __forceinline__

namespace edgekv {
namespace cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// 16 bytes from global to shared memory without passing through registers. Completed by copy_wait.
EDGEKV_DEVICE void copy_async_16(void* shared, const void* global) {
#ifdef EDGEKV_EMULATE
  ::emulation::copy_async(shared, global, 16);
#elif __CUDA_ARCH__ >= 800
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(at), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

EDGEKV_DEVICE void copy_commit() {
#ifdef EDGEKV_EMULATE
  ::emulation::copy_commit();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

}  // namespace cuda
}  // namespace edgekv

// Waits until at most `groups_left` of this thread's committed groups are in flight. A macro so that the emulation knows the place.
#ifdef EDGEKV_EMULATE
#define EDGEKV_COPY_WAIT(groups_left) ::emulation::copy_wait(groups_left, EMULATION_SITE)
#elif __CUDA_ARCH__ >= 800
#define EDGEKV_COPY_WAIT(groups_left) asm volatile("cp.async.wait_group %0;\n" ::"n"(groups_left) : "memory")
#else
#define EDGEKV_COPY_WAIT(groups_left)
#endif
