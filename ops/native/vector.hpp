// Vectors of the widest registers that a kernel is compiled for, and exp, softplus, the logistic
// function, cosine and sine over them. Everything lives in a namespace per instruction set, and no
// function comes from the standard library's templates: the linker would keep one copy of such a
// function for all instruction sets, and a machine without AVX-512 might run the one that needs it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "native/isa.hpp"
#include "native/reals.hpp"

#define FUSEPORT_INLINE static inline __attribute__((always_inline))

namespace fuseport::FUSEPORT_ISA {

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
  return x - typename F::Vector{};  // a sum would turn -0 to 0, and so be computed
}

// The larger, or smaller, of x and a bound; x itself where it is NaN, as these instructions have it.
template <class F>
FUSEPORT_INLINE typename F::Vector at_least(typename F::Vector bound, typename F::Vector x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4)
    return (typename F::Vector)_mm512_max_ps((__m512)bound, (__m512)x);
  return (typename F::Vector)_mm512_max_pd((__m512d)bound, (__m512d)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(typename F::Real) == 4)
    return (typename F::Vector)_mm256_max_ps((__m256)bound, (__m256)x);
  return (typename F::Vector)_mm256_max_pd((__m256d)bound, (__m256d)x);
#else
  return x < bound ? bound : x;
#endif
}

template <class F>
FUSEPORT_INLINE typename F::Vector at_least(typename F::Real bound, typename F::Vector x) {
  return at_least<F>(splat<F>(bound), x);
}

template <class F>
FUSEPORT_INLINE typename F::Vector at_most(typename F::Vector bound, typename F::Vector x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4)
    return (typename F::Vector)_mm512_min_ps((__m512)bound, (__m512)x);
  return (typename F::Vector)_mm512_min_pd((__m512d)bound, (__m512d)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(typename F::Real) == 4)
    return (typename F::Vector)_mm256_min_ps((__m256)bound, (__m256)x);
  return (typename F::Vector)_mm256_min_pd((__m256d)bound, (__m256d)x);
#else
  return x > bound ? bound : x;
#endif
}

template <class F>
FUSEPORT_INLINE typename F::Vector at_most(typename F::Real bound, typename F::Vector x) {
  return at_most<F>(splat<F>(bound), x);
}

// Whether a comparison holds in some lane.
template <class Compared>
FUSEPORT_INLINE bool any(Compared lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
  const Compared none = {};
  return memcmp(&lanes, &none, sizeof none) != 0;
#endif
}

template <class Real, int COUNT, class Vector>
FUSEPORT_INLINE Vector polynomial(const Real (&coefficients)[COUNT], Vector x) {
  Vector sum = Vector{} + coefficients[COUNT - 1];
#pragma GCC unroll 16
  for (int i = COUNT - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// The same with half as long a chain of dependent sums, and one product more.
template <class Real, int COUNT, class Vector>
FUSEPORT_INLINE Vector polynomial_by_halves(const Real (&coefficients)[COUNT], Vector x) {
  const Vector square = x * x;
  Vector last = Vector{} + coefficients[COUNT - 1], other = Vector{} + coefficients[COUNT - 2];
#pragma GCC unroll 16
  for (int i = COUNT - 3; i >= 0; i -= 2) {
    last = last * square + coefficients[i];
    if (i > 0) other = other * square + coefficients[i - 1];
  }
  return COUNT % 2 ? other * x + last : last * x + other;
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

// 2^k·(1 + q), but for the number that is in ROOTS, for k in parts, of which `shifted` is PARTS + k.
#if defined(__AVX512F__)
FUSEPORT_INLINE __m512 scaled_root(__m512 shifted, __m512 k, __m512 q) {
  const __m512 root = _mm512_permutexvar_ps((__m512i)shifted, _mm512_loadu_ps(F32::ROOTS));
  return _mm512_scalef_ps(_mm512_fmadd_ps(root, q, root), k);  // which takes the floor of k
}
#elif defined(__AVX2__)
// Times 2^RAISED, and for k + RAISED from -125 to 128.
template <int RAISED>
FUSEPORT_INLINE F32::Vector scaled_root(F32::Vector shifted, F32::Vector q) {
  F32::Integers roots;
  memcpy(&roots, F32::ROOTS, sizeof roots);
  roots += RAISED << F32::MANTISSA;
  const auto root = (F32::Integers)_mm256_permutevar8x32_epi32((__m256i)roots, (__m256i)shifted);
  const F32::Vector scaled = (F32::Vector)(root + ((F32::Integers)shifted << (F32::MANTISSA - 3)));
  return scaled * q + scaled;
}
#endif

// What exp starts with: k·log(2) + r of x, where k has no fraction, or with ROOTED, few bits of it, and
// `shifted` holds k in its low bits. UPTO_1: x ≤ 0, else x ≤ F::HIGHEST.
template <class F, bool UPTO_1>
struct Reduced {
  static constexpr bool ROOTED =
      sizeof(typename F::Real) == 4 && (WIDTH == 64 || (WIDTH == 32 && UPTO_1));

  typename F::Vector shifted, k, r;

  FUSEPORT_INLINED explicit Reduced(typename F::Vector x) {
    typename F::Real shift = F::ROUND;
    if constexpr (ROOTED) shift = F::PARTS;
    x = at_least<F>(F::LOWEST, x);
    shifted = x * F::LOG2E + shift;
    k = shifted - shift;
    r = x - k * F::LN2_HIGH - k * F::LN2_LOW;
  }

  // exp(x).
  FUSEPORT_INLINED typename F::Vector exp() const {
    using Vector = typename F::Vector;
#if defined(__AVX512F__)
    if constexpr (ROOTED)
      return (Vector)scaled_root((__m512)shifted, (__m512)k, (__m512)polynomial(F::EXP_NEAR, r));
#elif defined(__AVX2__)
    if constexpr (ROOTED)
      return scaled_root<64>(shifted, polynomial(F::EXP_NEAR, r)) * 0x1p-64f;
#endif
    const Vector mantissa = r * r * polynomial_by_halves(F::EXP, r) + r + (typename F::Real)1;
#if defined(__AVX512F__)
    return (Vector)_mm512_scalef_pd((__m512d)mantissa, (__m512d)k);
#else
    using Integers = typename F::Integers;
    return scale<F>(mantissa, (Integers)shifted - (Integers)splat<F>(F::ROUND));
#endif
  }
};

// exp to about one ulp, down to the subnormal numbers; exp(-Inf) = 0, and Inf and NaN stay.
template <class F>
FUSEPORT_INLINE typename F::Vector exp(typename F::Vector x) {
  return Reduced<F, false>(at_most<F>(F::HIGHEST, x)).exp();
}

template <class F>
FUSEPORT_INLINE Reduced<F, true> reduced_minus_magnitude(typename F::Vector x) {
  using Bits = typename F::Bits;
  constexpr int sign = 8 * (int)sizeof(typename F::Real) - 1;
  return Reduced<F, true>((typename F::Vector)((Bits)x | (Bits{} + 1) << sign));
}

// exp(-|x|).
template <class F>
FUSEPORT_INLINE typename F::Vector exp_of_minus_magnitude(typename F::Vector x) {
  return reduced_minus_magnitude<F>(x).exp();
}

// 1 / d, for 1 ≤ d ≤ 2.
template <class F>
FUSEPORT_INLINE typename F::Vector reciprocal(typename F::Vector d) {
#if defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4) {  // a step of Newton's after 14 bits; NaN stays
    const typename F::Vector near = (typename F::Vector)_mm512_rcp14_ps((__m512)d);
    return near + near * (1 - near * d);
  }
#endif
  return (typename F::Real)1 / d;
}

// Of e = exp(-|x|): 1 / (1 + exp(-x)).
template <class F>
FUSEPORT_INLINE typename F::Vector logistic_of(typename F::Vector x, typename F::Vector e) {
  const typename F::Vector larger = reciprocal<F>(e + (typename F::Real)1);
  return x > (typename F::Real)0 ? larger : e * larger;
}

// 1 / (1 + exp(-x)).
template <class F>
FUSEPORT_INLINE typename F::Vector logistic(typename F::Vector x) {
  return logistic_of<F>(x, exp_of_minus_magnitude<F>(x));
}

// x·c + y: rounded once where there is FMA. Said, since a compiler takes it or not as it likes.
template <class F>
FUSEPORT_INLINE typename F::Vector sum_of_product(typename F::Vector x, typename F::Vector c,
                                                  typename F::Vector y) {
  using Vector = typename F::Vector;
  constexpr bool SINGLE = sizeof(typename F::Real) == 4;
#if defined(__AVX512F__)
  if constexpr (SINGLE) return (Vector)_mm512_fmadd_ps((__m512)x, (__m512)c, (__m512)y);
  return (Vector)_mm512_fmadd_pd((__m512d)x, (__m512d)c, (__m512d)y);
#elif defined(__AVX2__)
  if constexpr (SINGLE) return (Vector)_mm256_fmadd_ps((__m256)x, (__m256)c, (__m256)y);
  return (Vector)_mm256_fmadd_pd((__m256d)x, (__m256d)c, (__m256d)y);
#else
  return x * c + y;
#endif
}

template <class F>
FUSEPORT_INLINE typename F::Vector sum_of_product(typename F::Vector x, typename F::Vector c,
                                                  typename F::Real y) {
  return sum_of_product<F>(x, c, splat<F>(y));
}

// 2^(x·c), for |x·c| ≤ F::NEAR: to about (1 + |x·c|/2) ulps, since c is rounded, and without FMA x·c is.
// But with AVX-512, times 2^RAISED.
template <class F, int RAISED = 0>
FUSEPORT_INLINE typename F::Vector exp2_of_near_product(typename F::Vector x,
                                                        typename F::Vector c) {
  using Vector = typename F::Vector;
#if defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4) {
    const Vector shifted = x * c + F::PARTS, k = shifted - F::PARTS;
    const Vector r = (Vector)_mm512_fmsub_ps((__m512)x, (__m512)c, (__m512)k);
    return (Vector)scaled_root((__m512)shifted, (__m512)k, (__m512)polynomial(F::EXP2_NEAR, r));
  } else {
    const __m512d t = (__m512d)(x * c);
    const __m512d k = _mm512_roundscale_pd(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector r = (Vector)_mm512_fmsub_pd((__m512d)x, (__m512d)c, k);
    return (Vector)_mm512_scalef_pd((__m512d)(polynomial(F::EXP2, r) * r + 1.0), k);
  }
#else
  using Real = typename F::Real;
#if defined(__AVX2__)
  if constexpr (sizeof(Real) == 4) {
    const Vector shifted = sum_of_product<F>(x, c, F::PARTS);
    const Vector r = sum_of_product<F>(x, c, F::PARTS - shifted);
    return scaled_root<RAISED>(shifted, polynomial(F::EXP2_NEAR, r));
  }
#endif
  // 2^k moves into the exponent as an integer.
  using Integers = typename F::Integers;
  const Vector shifted = sum_of_product<F>(x, c, F::ROUND);
  const Vector r = sum_of_product<F>(x, c, F::ROUND - shifted);
  const Vector mantissa = polynomial(F::EXP2, r) * r + (Real)1;
  const Integers exponent = ((Integers)shifted + RAISED) << F::MANTISSA;
  return (Vector)((Integers)mantissa + exponent);
#endif
}

// The same for |x·c| ≤ F::FAR; the same bits where that is near.
template <class F>
FUSEPORT_INLINE typename F::Vector exp2_of_product(typename F::Vector x, typename F::Vector c) {
  using Vector = typename F::Vector;
  using Real = typename F::Real;
  const Vector near = exp2_of_near_product<F>(x, c);
#if defined(__AVX512F__)
  return near;
#else
  constexpr Real LARGE = F::BIAS + 1, ZERO = -(F::BIAS + F::MANTISSA + 1);
  const Vector t = x * c, infinite = t * (Real)__builtin_inf();  // NaN stays
  const Vector small = exp2_of_near_product<F, 64>(x, c) * (Real)0x1p-64;
  const Vector most = t < -F::NEAR ? small : near;
  return t < ZERO ? Vector{} : t < LARGE ? most : infinite;
#endif
}

// To the nearest integer; NaN and Inf stay.
template <class F>
FUSEPORT_INLINE typename F::Vector nearest(typename F::Vector x) {
  using Vector = typename F::Vector;
#if defined(__AVX512F__)
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  if constexpr (sizeof(typename F::Real) == 4) {
    return (Vector)_mm512_roundscale_ps((__m512)x, mode);
  } else {
    return (Vector)_mm512_roundscale_pd((__m512d)x, mode);
  }
#elif defined(__AVX2__)
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  if constexpr (sizeof(typename F::Real) == 4) {
    return (Vector)_mm256_round_ps((__m256)x, mode);
  } else {
    return (Vector)_mm256_round_pd((__m256d)x, mode);
  }
#else
  const Vector whole = splat<F>(F::WHOLE);
  const Vector shift = x < 0 ? (x > -whole ? -whole : Vector{}) : (x < whole ? whole : Vector{});
  return (x + shift) - shift;
#endif
}

// x·c - nearest(x·c): rounded once, or without FMA as good as that to 2^-10 of an ulp of x·c. It is
// in ±1/2, or where x·c has no fraction that a vector could hold, what was lost in rounding x·c.
template <class F>
FUSEPORT_INLINE typename F::Vector fraction_of_product(typename F::Vector x, typename F::Vector c) {
  using Vector = typename F::Vector;
  const Vector t = x * c, k = nearest<F>(t);
#if defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4) {
    return (Vector)_mm512_fmsub_ps((__m512)x, (__m512)c, (__m512)k);
  } else {
    return (Vector)_mm512_fmsub_pd((__m512d)x, (__m512d)c, (__m512d)k);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(typename F::Real) == 4) {
    return (Vector)_mm256_fmsub_ps((__m256)x, (__m256)c, (__m256)k);
  } else {
    return (Vector)_mm256_fmsub_pd((__m256d)x, (__m256d)c, (__m256d)k);
  }
#else
  // Of halves of x and c, products are exact (T. J. Dekker, "A floating-point technique for
  // extending the available precision", 1971; the halves are cut here, not rounded).
  using Bits = typename F::Bits;
  const Bits upper = ~Bits{} << ((F::MANTISSA + 2) / 2);
  const Vector x_high = (Vector)((Bits)x & upper), x_low = x - x_high;
  const Vector c_high = (Vector)((Bits)c & upper), c_low = c - c_high;
  const Vector lost = ((x_high * c_high - t) + x_high * c_low + x_low * c_high) + x_low * c_low;
  return (t - k) + lost;
#endif
}

template <class F>
struct Complex {
  typename F::Vector re, im;
};

// m·exp(2πi·x·(c + c_low)), for any x and c whose product is finite, and NaN where it is not; c_low
// is what rounding c lost, which would add up over many x with one c. Each part is good to 3.5 ulps of
// m, and what an error of c + c_low makes of the angle: whole turns are taken off without error (or
// without FMA 2^-33 of them), in float32 up to 2^45. Beyond, the angle is lost; the modulus is not.
template <class F>
FUSEPORT_INLINE Complex<F> turned(typename F::Vector m, typename F::Vector x, typename F::Vector c,
                                  typename F::Vector c_low) {
  using Vector = typename F::Vector;
  using Bits = typename F::Bits;
  using Real = typename F::Real;
  const Vector half_turns = (fraction_of_product<F>(x, c) + x * c_low) * (Real)2;
  const Vector k = nearest<F>(half_turns), f = half_turns - k, square = f * f;
  constexpr int sign = 8 * (int)sizeof(Real) - 1;
  const Vector signed_m = (Vector)((Bits)m ^ ((Bits)(k + F::ROUND) << sign));  // - where k is odd
  return {signed_m * (polynomial(F::COS, square) * square + (Real)1),
          signed_m * (polynomial(F::SIN, square) * f)};
}

// x within ±limit; NaN stays.
template <class F>
FUSEPORT_INLINE typename F::Vector bounded(typename F::Vector x, typename F::Vector limit) {
  return at_least<F>(-limit, at_most<F>(limit, x));
}

// log(1 + exp(x)), and x itself above 20, as torch has it: max(x, 0) + log(1 + e) with e = exp(-|x|).
template <class F>
FUSEPORT_INLINE typename F::Vector softplus_of(typename F::Vector x, typename F::Vector e) {
  const typename F::Vector sum = polynomial_by_halves(F::LOG1P, e) * e + at_least<F>(0, x);
  if constexpr (sizeof(typename F::Real) == 4) return sum;  // above 17 it is x itself
  return x > (typename F::Real)20 ? x : sum;
}

template <class F>
FUSEPORT_INLINE typename F::Vector softplus(typename F::Vector x) {
  return softplus_of<F>(x, exp_of_minus_magnitude<F>(x));
}

// v in the first `count` lanes, a number in the others, whatever they hold.
template <class F>
FUSEPORT_INLINE typename F::Vector first_or(typename F::Vector v, int count,
                                            typename F::Real other) {
  typename F::Integers lane;
  for (int i = 0; i < F::LANES; ++i) lane[i] = i;
  return lane < (typename F::Integers{} + count) ? v : splat<F>(other);
}

// The same with zero.
template <class F>
FUSEPORT_INLINE typename F::Vector first_lanes(typename F::Vector v, int count) {
  return first_or<F>(v, count, 0);
}

}  // namespace fuseport::FUSEPORT_ISA
