// What differs between a GPU and the CPU that stands in for one: a launch, shared memory, and the
// functions that a GPU has instructions for. The header of tests has the same names.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// Shared memory whose size a launch gives.
#define FUSEPORT_SHARED(name) extern __shared__ __align__(16) char name[]

namespace fuseport::cuda {

// Launches a kernel on a stream; null, or what went wrong. It does not wait.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared,
                   void* stream, const Arguments&... arguments) {
  constexpr int64_t WITHOUT_ASKING = 48 * 1024, MOST_BLOCKS = (1ll << 31) - 1;
  if (shared > WITHOUT_ASKING) {
    const cudaError_t error = cudaFuncSetAttribute(
        (const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  const auto grid = (unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
  kernel<<<grid, (unsigned)threads, (size_t)shared, (cudaStream_t)stream>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Makes so many bytes of device memory 0, on a stream; null, or what went wrong. It does not wait.
inline const char* set_to_zero(void* data, int64_t bytes, void* stream) {
  const cudaError_t error = cudaMemsetAsync(data, 0, (size_t)bytes, (cudaStream_t)stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Of the current device; 1 if it does not say.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 1;
  return count;
}

__device__ __forceinline__ float bits_to_float(uint32_t x) { return __uint_as_float(x); }

__device__ __forceinline__ float half_to_float(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ __forceinline__ uint16_t float_to_half(float x) {
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint16_t float_to_bfloat16(float x) {
  uint16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// 2^x by the special-function unit, to 2 ulps; subnormal results are 0.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_of(double x) { return ::exp2(x); }
__device__ __forceinline__ double exp_of(double x) { return ::exp(x); }
__device__ __forceinline__ double log1p_of(double x) { return ::log1p(x); }
__device__ __forceinline__ float expm1_of(float x) { return ::expm1f(x); }
__device__ __forceinline__ double expm1_of(double x) { return ::expm1(x); }
__device__ __forceinline__ float fma_of(float x, float y, float z) { return __fmaf_rn(x, y, z); }
__device__ __forceinline__ double fma_of(double x, double y, double z) {
  return __fma_rn(x, y, z);
}
// x·y, rounded: what is added to it later is not fused with it.
__device__ __forceinline__ float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double rounded_product(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ float nearest(float x) { return ::rintf(x); }
__device__ __forceinline__ double nearest(double x) { return ::rint(x); }
__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }
__device__ __forceinline__ void sine_and_cosine_of_pi(float x, float* sine, float* cosine) {
  ::sincospif(x, sine, cosine);
}
__device__ __forceinline__ void sine_and_cosine_of_pi(double x, double* sine, double* cosine) {
  ::sincospi(x, sine, cosine);
}

}  // namespace fuseport::cuda
