// A CPU in the place of a GPU, for tests: the names of ops/native/cuda_device.cuh and what kernels use
// of CUDA's language. device.cpp runs blocks one after the other, and a block's threads as fibers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define FUSEPORT_SHARED(name) char* const name = ::fuseport::cuda::on_cpu::shared_memory()

struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace fuseport::cuda {

namespace on_cpu {

char* shared_memory();
void barrier();
uint64_t exchange(uint64_t mine, int mask);
const char* run(int64_t blocks, int threads, int64_t shared, const std::function<void()>& body);
int multiprocessors();

}  // namespace on_cpu

template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared,
                   void*, const Arguments&... arguments) {
  return on_cpu::run(blocks, threads, shared, [&] { kernel(arguments...); });
}

inline const char* set_to_zero(void* data, int64_t bytes, void*) {
  std::memset(data, 0, (size_t)bytes);
  return nullptr;
}

inline int multiprocessors() { return on_cpu::multiprocessors(); }

inline float bits_to_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline float half_to_float(uint16_t x) {
  _Float16 y;
  std::memcpy(&y, &x, sizeof y);
  return (float)y;
}

inline uint16_t float_to_half(float x) {
  const _Float16 y = (_Float16)x;
  uint16_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  return bits;
}

inline uint16_t float_to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fff;
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float exp2_of(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0 : y;
}
inline double exp2_of(double x) { return std::exp2(x); }
inline double exp_of(double x) { return std::exp(x); }
inline double log1p_of(double x) { return std::log1p(x); }
inline float expm1_of(float x) { return std::expm1(x); }
inline double expm1_of(double x) { return std::expm1(x); }
inline float fma_of(float x, float y, float z) { return std::fma(x, y, z); }
inline double fma_of(double x, double y, double z) { return std::fma(x, y, z); }
inline float rounded_product(float x, float y) {
  volatile const float product = x * y;
  return product;
}
inline double rounded_product(double x, double y) {
  volatile const double product = x * y;
  return product;
}
inline float nearest(float x) { return std::rint(x); }
inline double nearest(double x) { return std::rint(x); }
inline float quotient(float x, float y) { return x / y; }
inline double quotient(double x, double y) { return x / y; }

template <class Real>
void sine_and_cosine_of_pi(Real x, Real* sine, Real* cosine) {
  constexpr long double PI = 3.14159265358979323846264338327950288L;
  const long double angle = PI * (long double)(x - 2 * std::rint(x / 2));
  *sine = (Real)std::sin(angle);
  *cosine = (Real)std::cos(angle);
}

}  // namespace fuseport::cuda

inline void __syncthreads() { fuseport::cuda::on_cpu::barrier(); }

// Of all lanes of a warp.
template <class Number>
Number __shfl_xor_sync(unsigned, Number x, int mask) {
  static_assert(sizeof(Number) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  bits = fuseport::cuda::on_cpu::exchange(bits, mask);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
