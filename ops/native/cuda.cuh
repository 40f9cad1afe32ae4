// What kernels for CUDA are written with: launches, functions of a number, sums over lanes, numbers in
// a row. No header of torch, and nothing that waits for a device.
//
// Without nvcc the header that stands for CUDA is one of tests: it runs the same kernels on the CPU.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#include "native/cuda_device.cuh"
#else
#include "cuda_on_cpu/device.hpp"
#endif

#define FUSEPORT_DEVICE __device__ __forceinline__

namespace fuseport::cuda {

struct Half {
  uint16_t raw;
};

struct BFloat16 {
  uint16_t raw;
};

FUSEPORT_DEVICE float to_real(float x) { return x; }
FUSEPORT_DEVICE double to_real(double x) { return x; }
FUSEPORT_DEVICE float to_real(Half x) { return half_to_float(x.raw); }
FUSEPORT_DEVICE float to_real(BFloat16 x) { return bits_to_float((uint32_t)x.raw << 16); }
FUSEPORT_DEVICE void from_real(float x, float* to) { *to = x; }
FUSEPORT_DEVICE void from_real(double x, double* to) { *to = x; }
FUSEPORT_DEVICE void from_real(float x, Half* to) { to->raw = float_to_half(x); }
FUSEPORT_DEVICE void from_real(float x, BFloat16* to) { to->raw = float_to_bfloat16(x); }

// Calls call(Stored{}), with the type that numbers of `dtype` are stored in: double if Real is.
template <class Real, class Call>
FUSEPORT_DEVICE void with_stored(Dtype dtype, const Call& call) {
  if constexpr (sizeof(Real) == 8) {
    call(double{});
  } else if (dtype == Dtype::float16) {
    call(Half{});
  } else if (dtype == Dtype::bfloat16) {
    call(BFloat16{});
  } else {
    call(float{});
  }
}

// x within ±2^63; NaN stays, which fmin and fmax would drop.
template <class Real>
FUSEPORT_DEVICE Real bounded(Real x) {
  constexpr Real large = (Real)0x1p63;
  return x < -large ? -large : x > large ? large : x;
}

// exp(-|x|), to about an ulp: 2^t with t = x·log2(e) rounded, times what the rounding left out.
FUSEPORT_DEVICE float exp_of_minus_abs(float x) {
  constexpr float LOG2E = 0x1.715476p0f, LOG2E_LOW = 0x1.4ae0cp-26f, LN2 = 0x1.62e43p-1f;
  x = x < 0 ? x : -x;
  x = x < -104.0f ? -104.0f : x;  // whose exp is 0, as that of all below
  const float t = x * LOG2E;
  const float lost = fma_of(x, LOG2E_LOW, fma_of(x, LOG2E, -t));
  const float e = exp2_of(t);
  return fma_of(e * LN2, lost, e);
}
FUSEPORT_DEVICE double exp_of_minus_abs(double x) { return exp_of(x < 0 ? x : -x); }

// 1 / (1 + exp(-x)).
template <class Real>
FUSEPORT_DEVICE Real logistic(Real x) {
  const Real e = exp_of_minus_abs(x), share = quotient((Real)1, (Real)1 + e);
  return x < 0 ? e * share : share;
}

// log(1 + e) for 0 ≤ e ≤ 1: the polynomial of native/vector.hpp.
FUSEPORT_DEVICE float log1p_of_share(float e) {
  float sum = -0x1.a04acap-9f;
  sum = fma_of(sum, e, 0x1.402f4cp-6f);
  sum = fma_of(sum, e, -0x1.cdd008p-5f);
  sum = fma_of(sum, e, 0x1.afdde8p-4f);
  sum = fma_of(sum, e, -0x1.38b908p-3f);
  sum = fma_of(sum, e, 0x1.92b43p-3f);
  sum = fma_of(sum, e, -0x1.ff0254p-3f);
  sum = fma_of(sum, e, 0x1.554bd6p-2f);
  sum = fma_of(sum, e, -0x1.ffffb8p-2f);
  return fma_of(sum, e, 1.0f) * e;
}
FUSEPORT_DEVICE double log1p_of_share(double e) { return log1p_of(e); }

// log(1 + exp(x)), and x itself above 20, as torch has it. Of float that needs no branch, which loads
// that come after it would have to wait for: what is added to x there is less than it has room for.
template <class Real>
FUSEPORT_DEVICE Real softplus(Real x) {
  const auto sum = [x] { return (x > 0 ? x : (Real)0) + log1p_of_share(exp_of_minus_abs(x)); };
  if constexpr (sizeof(Real) == 8) return x > 20 ? x : sum();
  else return sum();
}

// The derivative of softplus, from its value.
template <class Real>
FUSEPORT_DEVICE Real softplus_slope(Real y) {
  return y > 20 ? (Real)1 : -expm1_of(-y);
}

template <class Real>
struct Complex {
  Real re, im;
};

template <class Real>
FUSEPORT_DEVICE Real shuffled(Real x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

// Sums each of v[0..COUNT) over LANES lanes that are STRIDE apart, and shares the sums out: of
// those lanes the j-th gets, in v[0] and on, the COUNT/LANES sums from j·COUNT/LANES on, or, where
// lanes are more than sums, LANES/COUNT lanes in a row get the same one. Half of what is left goes to
// the other half of the lanes each time: a shuffle for each number, and not for each and every bit.
template <int LANES, int STRIDE, int COUNT, class Real>
FUSEPORT_DEVICE void sum_over_lanes(Real* v) {
  if constexpr (LANES > 1) {
    constexpr int mask = LANES / 2 * STRIDE;
    if constexpr (COUNT > 1) {
      const bool upper = threadIdx.x & mask;
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        const Real sent = upper ? v[i] : v[i + COUNT / 2];
        v[i] = (upper ? v[i + COUNT / 2] : v[i]) + shuffled(sent, mask);
      }
      sum_over_lanes<LANES / 2, STRIDE, COUNT / 2>(v);
    } else {
      v[0] += shuffled(v[0], mask);
      sum_over_lanes<LANES / 2, STRIDE, 1>(v);
    }
  }
}

template <class Stored, int COUNT>
struct alignas(sizeof(Stored) * COUNT) Pack {
  Stored at[COUNT];
};

}  // namespace fuseport::cuda
