// Runs CUDA kernels on a CPU, so that the very same .cuh files are tested without a GPU. g++ compiles a kernel as an ordinary
// function; every CUDA thread is a fibre with a stack of its own; a fibre runs until it reaches a barrier, a warp exchange or its
// end, and then the scheduler picks another. Blocks run one after the other.
//
// CUDA promises no order between threads, so a kernel is right only if it is right in every order. The scheduler therefore has
// several (emulation_configure): lowest thread first, highest first, warps round robin, and random ones by seed. Shared memory starts as NaN
// patterns, and an asynchronous copy lands either at once or as late as the program allows. A missing barrier shows as a
// different result in one of the orders; emulation_drop removes any one barrier of the program so that tests can prove it.
//
// Only what our kernels use is here: 1-D blocks of whole warps, full-mask warp operations, dynamic shared memory.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) int2 { int x, y; };

// binary16 with the names of cuda_fp16.h.
struct __half { _Float16 value; };
struct alignas(4) __half2 { __half x, y; };
inline __half __float2half_rn(float v) { return {static_cast<_Float16>(v)}; }
inline float __half2float(__half v) { return static_cast<float>(v.value); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }

inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline unsigned __float_as_uint(float v) { unsigned u; std::memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(unsigned u) { float v; std::memcpy(&v, &u, 4); return v; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += int(static_cast<signed char>(a >> i)) * int(static_cast<signed char>(b >> i));
  return sum;
}

namespace emulation {

struct Thread { dim3 thread; };
Thread& current();
extern dim3 block_index, block_size, grid_size;

// One place in the source where threads wait.
struct Site {
  const char* file;
  int line;
  bool exchange;  // a warp exchange cannot be dropped: its value would be missing
  bool dropped = false;
  Site(const char* file, int line, bool exchange);  // registers itself
};

void block_barrier(const Site& site);
void warp_barrier(const Site& site);
// Every lane gives `value` and receives the values of the 32 lanes of its warp.
const uint64_t* warp_exchange(uint64_t value, const Site& site);
void* shared_memory();
void copy_async(void* shared, const void* global, size_t bytes);
void copy_commit();
void copy_wait(int groups_left, const Site& site);
// Runs the grid; false when a thread failed a check of the scheduler (the sentence is in emulation_error()).
bool launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);

template <typename T>
uint64_t to_bits(T v) { uint64_t u = 0; std::memcpy(&u, &v, sizeof(T)); return u; }
template <typename T>
T from_bits(uint64_t u) { T v; std::memcpy(&v, &u, sizeof(T)); return v; }
template <typename T>
T shuffle(T v, int lane, const Site& site) { return from_bits<T>(warp_exchange(to_bits(v), site)[lane & 31]); }
inline unsigned ballot(bool v, const Site& site) {
  const uint64_t* all = warp_exchange(v, site);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(all[i] != 0) << i;
  return bits;
}
inline unsigned lane() { return current().thread.x & 31; }

}  // namespace emulation

#define EMULATION_SITE_OF(exchange) (*[] { static ::emulation::Site site(__FILE__, __LINE__, exchange); return &site; }())
#define EMULATION_SITE EMULATION_SITE_OF(false)
#define threadIdx (::emulation::current().thread)
#define blockIdx (::emulation::block_index)
#define blockDim (::emulation::block_size)
#define gridDim (::emulation::grid_size)
#define __syncthreads() ::emulation::block_barrier(EMULATION_SITE)
#define __syncwarp() ::emulation::warp_barrier(EMULATION_SITE)
#define __shfl_sync(mask, v, source) ::emulation::shuffle(v, source, EMULATION_SITE_OF(true))
#define __shfl_xor_sync(mask, v, flip) ::emulation::shuffle(v, int(::emulation::lane() ^ unsigned(flip)), EMULATION_SITE_OF(true))
#define __ballot_sync(mask, v) ::emulation::ballot(v, EMULATION_SITE_OF(true))

// Fibres of a block share one OS thread, so an atomic is a plain operation.
template <typename T>
T atomicAdd(T* at, T v) { T old = *at; *at = old + v; return old; }

// The few host functions of the CUDA runtime that the launch code calls. Device memory is host memory.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
cudaError_t cudaGetLastError();
inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "emulated launch failed"; }

extern "C" {
// order: 0 lowest thread first, 1 highest first, 2 warps round robin, 3 random. Odd `seed` makes asynchronous copies land late in orders 0-2.
void emulation_configure(int order, uint64_t seed);
// Makes the barrier at `file`:`line` do nothing; an empty file restores all. Matches on the end of the file's name.
void emulation_drop(const char* file, int line);
// "file:line\n" of every barrier that threads have passed so far in this process.
const char* emulation_sites();
// What the scheduler found wrong in the last launch that failed, else "".
const char* emulation_error();
}
