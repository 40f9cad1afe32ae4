// Vectors of the widest registers that a kernel is compiled for, and exp, softplus and the logistic
// function over them. Everything lives in a namespace per instruction set, and nothing comes from
// the standard library's templates: the linker would keep one copy of such a function for all
// instruction sets, and a machine without AVX-512 might run the one that needs it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define FUSEPORT_INLINE static inline __attribute__((always_inline))

namespace fuseport::FUSEPORT_ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif

// exp(r) = 1 + r + r²·EXP(r) for |r| ≤ ln(2)/2; LN2_HIGH has so few bits that k·LN2_HIGH is exact.
// 2·atanh(s) = s·(2 + s²·ATANH(s²)) for 0 ≤ s ≤ 1/3. Both are polynomials through the Chebyshev
// nodes of their range (mpmath's chebyfit, 50 digits), lowest power first, and good to a tenth of an
// ulp of the result. ROUND + k holds the integer k in its low bits.
struct F32 {
  using Real = float;
  typedef float Vector __attribute__((vector_size(WIDTH)));
  typedef int32_t Integers __attribute__((vector_size(WIDTH)));
  typedef uint32_t Bits __attribute__((vector_size(WIDTH)));
  static constexpr int LANES = WIDTH / 4, MANTISSA = 23, BIAS = 127;
  static constexpr float LOWEST = -104.0f, HIGHEST = 89.0f;  // exp is 0 below, Inf above
  static constexpr float ROUND = 0x1.8p23f, LOG2E = 0x1.715476p0f;
  static constexpr float LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
  static constexpr float EXP[] = {0.5f, 0x1.5554dep-3f, 0x1.55551ap-5f, 0x1.120b62p-7f,
                                  0x1.6d10fcp-10f};
  static constexpr float ATANH[] = {0x1.555556p-1f, 0x1.9999ap-2f, 0x1.248f58p-2f, 0x1.c7fb36p-3f,
                                    0x1.65ad56p-3f, 0x1.a9bafcp-3f};
};

struct F64 {
  using Real = double;
  typedef double Vector __attribute__((vector_size(WIDTH)));
  typedef int64_t Integers __attribute__((vector_size(WIDTH)));
  typedef uint64_t Bits __attribute__((vector_size(WIDTH)));
  static constexpr int LANES = WIDTH / 8, MANTISSA = 52, BIAS = 1023;
  static constexpr double LOWEST = -746.0, HIGHEST = 710.0;
  static constexpr double ROUND = 0x1.8p52, LOG2E = 0x1.71547652b82fep0;
  static constexpr double LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 0x1.a39ef35793c76p-33;
  static constexpr double EXP[] = {
      0.5,
      0x1.5555555555556p-3,
      0x1.5555555553d68p-5,
      0x1.11111111109b5p-7,
      0x1.6c16c17889ef1p-10,
      0x1.a01a01a7c2efep-13,
      0x1.a019b9149a41cp-16,
      0x1.71de0db2f6b19p-19,
      0x1.28917c89a43a7p-22,
      0x1.af389ecfc4b9cp-26};
  static constexpr double ATANH[] = {
      0x1.5555555555555p-1, 0x1.999999999999ap-2, 0x1.2492492492491p-2, 0x1.c71c71c71ca1dp-3,
      0x1.745d1745bafd2p-3, 0x1.3b13b1415cc9ap-3, 0x1.11110fedff7ecp-3, 0x1.e1e2292bfd01dp-4,
      0x1.af225bc679ebbp-4, 0x1.8674e45c1d0c9p-4, 0x1.60558e67dbae1p-4, 0x1.63553ca44fd47p-4,
      0x1.610015dacf8a8p-5, 0x1.2dbf0bcbc0f89p-3};
};

template <class F>
FUSEPORT_INLINE typename F::Vector load(const typename F::Real* p) {
  typename F::Vector v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class F>
FUSEPORT_INLINE void store(typename F::Real* p, typename F::Vector v) {
  memcpy(p, &v, sizeof v);
}

template <class F>
FUSEPORT_INLINE typename F::Vector splat(typename F::Real x) {
  return typename F::Vector{} + x;
}

template <class Real, int COUNT, class Vector>
FUSEPORT_INLINE Vector polynomial(const Real (&coefficients)[COUNT], Vector x) {
  Vector sum = Vector{} + coefficients[COUNT - 1];
#pragma GCC unroll 16
  for (int i = COUNT - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// The product of v with 2^k, for integral k; two steps, since 2^k itself may not be representable.
template <class F>
FUSEPORT_INLINE typename F::Vector scale(typename F::Vector v, typename F::Integers k) {
  using Vector = typename F::Vector;
  using Bits = typename F::Bits;
  const typename F::Integers half = k >> 1;
  const Bits first = ((Bits)(half + F::BIAS)) << F::MANTISSA;
  const Bits second = ((Bits)(k - half + F::BIAS)) << F::MANTISSA;
  return v * (Vector)first * (Vector)second;
}

// exp to about one ulp, down to the subnormal numbers; exp(-Inf) = 0, and Inf and NaN stay.
template <class F>
FUSEPORT_INLINE typename F::Vector exp(typename F::Vector x) {
  using Vector = typename F::Vector;
  // Written so that NaN, for which both comparisons are false, passes.
  x = x > F::HIGHEST ? splat<F>(F::HIGHEST) : x;
  x = x < F::LOWEST ? splat<F>(F::LOWEST) : x;
  const Vector shifted = x * F::LOG2E + F::ROUND;
  const Vector k = shifted - F::ROUND;
  Vector r = x - k * F::LN2_HIGH;
  r = r - k * F::LN2_LOW;
  const Vector mantissa = r * r * polynomial(F::EXP, r) + r + (typename F::Real)1;
#if defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4) {
    return (Vector)_mm512_scalef_ps((__m512)mantissa, (__m512)k);
  } else {
    return (Vector)_mm512_scalef_pd((__m512d)mantissa, (__m512d)k);
  }
#else
  using Integers = typename F::Integers;
  return scale<F>(mantissa, (Integers)shifted - (Integers)splat<F>(F::ROUND));
#endif
}

// 1 / (1 + exp(-x)).
template <class F>
FUSEPORT_INLINE typename F::Vector logistic(typename F::Vector x) {
  return (typename F::Real)1 / ((typename F::Real)1 + exp<F>(-x));
}

// log(1 + exp(x)), and x itself above 20, as torch has it: max(x, 0) + log(1 + e) with e = exp(-|x|)
// at most 1, and log(1 + e) = 2·atanh(e / (2 + e)), which is accurate for small e too.
template <class F>
FUSEPORT_INLINE typename F::Vector softplus(typename F::Vector x) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  const Vector e = exp<F>(x > (Real)0 ? -x : x);
  const Vector s = e / ((Real)2 + e);
  const Vector q = s * s;
  const Vector log = s * (q * polynomial(F::ATANH, q) + (Real)2);
  const Vector sum = (x > (Real)0 ? x : Vector{}) + log;
  return x > (Real)20 ? x : sum;
}

// The sum of the lanes, by halves.
template <class F>
FUSEPORT_INLINE typename F::Real sum(typename F::Vector v) {
  typename F::Real lanes[F::LANES];
  memcpy(lanes, &v, sizeof v);
#pragma GCC unroll 8
  for (int width = F::LANES / 2; width > 0; width /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// v in the first `count` lanes, zero in the others, whatever they hold.
template <class F>
FUSEPORT_INLINE typename F::Vector first_lanes(typename F::Vector v, int count) {
  typename F::Integers lane;
  for (int i = 0; i < F::LANES; ++i) lane[i] = i;
  return lane < (typename F::Integers{} + count) ? v : typename F::Vector{};
}

}  // namespace fuseport::FUSEPORT_ISA
