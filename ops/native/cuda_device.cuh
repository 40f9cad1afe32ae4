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

// Copies so many bytes within device memory, on a stream; null, or what went wrong. It does not wait.
inline const char* copied(const void* from, void* to, int64_t bytes, void* stream) {
  const cudaError_t error = cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice,
                                            (cudaStream_t)stream);
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

// Bytes of shared memory for a block of the current device; what all have if it does not say.
inline int64_t most_shared() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess)
    return 48 * 1024;
  return bytes;
}

// Stores 4, 8 or 16 bytes at once to device memory.
template <int COUNT>
__device__ __forceinline__ void store_words(const uint32_t (&words)[COUNT], void* to) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
  const auto at = __cvta_generic_to_global(to);
  if constexpr (COUNT == 1) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(at), "r"(words[0]) : "memory");
  } else if constexpr (COUNT == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

// Loads 16 bytes at once from device memory that the kernel does not write.
__device__ __forceinline__ void load_words(const void* from, uint32_t (&words)[4]) {
  asm("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "l"(__cvta_generic_to_global(from)));
}

// Lanes of a warp see what the others wrote to shared memory before.
__device__ __forceinline__ void sync_warp() { __syncwarp(); }

__device__ __forceinline__ float bits_to_float(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint32_t float_to_bits(float x) { return __float_as_uint(x); }

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

// Two bfloat16 in 32 bits, the first in the lower half.
__device__ __forceinline__ uint32_t floats_to_bfloat16(float x, float y) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return both;
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

// Products of matrices of bfloat16, or of float16, two numbers in 32 bits, by all lanes of a warp:
// the fragments of PTX's mma.m16n8k16, of which lane 4·g + c has, in a matrix of 16 rows, rows g
// and g + 8.

// sum += a·b, of 16 × 16 and 16 × 8; of sum a lane has columns 2c and 2c + 1 of its rows.
__device__ __forceinline__ void add_product(float (&sum)[4], const uint32_t (&a)[4], uint32_t b,
                                            uint32_t b_next) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_next));
}

// The same of float16.
__device__ __forceinline__ void add_half_product(float (&sum)[4], const uint32_t (&a)[4],
                                                 uint32_t b, uint32_t b_next) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_next));
}

// Four matrices of 8 × 8 from shared memory: lane 8·i + j says where row j of the i-th is, 16 bytes.
// Of each a lane gets columns 2c and 2c + 1 of row g; of its transpose, if `TRANSPOSED`.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  const auto at = (uint32_t)__cvta_generic_to_shared(row);
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  }
}

// Copies 16 bytes to shared memory, or zeros, some time until wait_for_copies, which is of one thread.
__device__ __forceinline__ void copy_later(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   (uint32_t)__cvta_generic_to_shared(to)),
               "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace fuseport::cuda
