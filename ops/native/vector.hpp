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
// 2^r = 1 + r·EXP2(r) for |r| ≤ 1/2, and log(1 + e) = e·LOG1P(e) for 0 ≤ e ≤ 1. sin(πf) = f·SIN(f²)
// and cos(πf) = 1 + f²·COS(f²) for |f| ≤ 1/2. These are polynomials through the Chebyshev nodes of
// their range (mpmath's chebyfit, 50 digits), lowest power first, and good to a tenth of an ulp of the
// result, or of 1 for the last two. ROUND + k holds the integer k in its low bits; from WHOLE on all
// numbers are integers.
//
// A vector of 16 or 8 floats holds ROOTS, 2^(i/16) or 2^(i/8) times a number near 1, too. Of a number in
// such parts the low bits choose among them, as they are in PARTS + k; what is left, |r| ≤ 1/32 or 1/16,
// needs shorter polynomials. That number is the first root, and one of those for which the others round
// best: of 16 to 0.27 of an ulp, and the two next to it to 0.07; of 8 to 0.05. A recurrence that decays
// slowly multiplies by one of these again and again, and errors of one sign add up. The polynomials
// divide by it: with it, 1 + EXP2_NEAR(r) is 2^r, and 1 + EXP_NEAR(r) is exp(r) for |r| ≤ ln(2)/32 or
// ln(2)/16. Those for 8 roots have their errors where they do not add up: 0.03 of an ulp near r = 0, and
// 0.3 at the ends (minimax, with a weight of 1/10 + 9/10·|r|/|r|max).
struct F32 {
  using Real = float;
  typedef float Vector __attribute__((vector_size(WIDTH)));
  typedef double Wide __attribute__((vector_size(2 * WIDTH)));  // as many numbers
  typedef int32_t Integers __attribute__((vector_size(WIDTH)));
  typedef uint32_t Bits __attribute__((vector_size(WIDTH)));
  static constexpr int LANES = WIDTH / 4, MANTISSA = 23, BIAS = 127;
  static constexpr float LOWEST = -104.0f, HIGHEST = 89.0f;  // exp is 0 below, Inf above
  static constexpr float FAR = 0x1p64f, NEAR = 125;          // powers: see exp2_of_product
  static constexpr float ROUND = 0x1.8p23f, LOG2E = 0x1.715476p0f;
  static constexpr float LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
  static constexpr float EXP[] = {0.5f, 0x1.5554dep-3f, 0x1.55551ap-5f, 0x1.120b62p-7f,
                                  0x1.6d10fcp-10f};
  static constexpr float EXP2[] = {0x1.62e43p-1f,  0x1.ebfbep-3f,  0x1.c6af6cp-5f,
                                   0x1.3b2a54p-7f, 0x1.5f089p-10f, 0x1.44138ap-13f};
  static constexpr float LOG1P[] = {
      0x1p+0f, -0x1.ffffb8p-2f, 0x1.554bd6p-2f, -0x1.ff0254p-3f, 0x1.92b43p-3f, -0x1.38b908p-3f,
      0x1.afdde8p-4f, -0x1.cdd008p-5f, 0x1.402f4cp-6f, -0x1.a04acap-9f};
#if defined(__AVX512F__)
  static constexpr float PARTS = 0x1.8p19f;
  static constexpr float ROOTS[] = {0x1.fef9a0p-1f, 0x1.0acc88p+0f, 0x1.169c74p+0f, 0x1.22f242p+0f,
                                    0x1.2fd3dep+0f, 0x1.3d477ap+0f, 0x1.4b538cp+0f, 0x1.59fed4p+0f,
                                    0x1.695060p+0f, 0x1.794f8ap+0f, 0x1.8a0402p+0f, 0x1.9b75d2p+0f,
                                    0x1.adad58p+0f, 0x1.c0b358p+0f, 0x1.d490f4p+0f, 0x1.e94fbap+0f};
  static constexpr float EXP2_NEAR[] = {0x1.06e6bap-9f, 0x1.639a6ap-1f, 0x1.ecfc32p-3f,
                                        0x1.c79c14p-5f};
  static constexpr float EXP_NEAR[] = {0x1.06e6bap-9f, 0x1.008374p+0f, 0x1.008560p-1f,
                                       0x1.560624p-3f};
#else
  static constexpr float PARTS = 0x1.8p20f;
  // As bits, of which i·2^20 is taken: adding a number of eighths, times 2^20, gives it back, and adds
  // what is whole to the exponent. They are 0x1.feb052p-1, 0x1.16747cp+0, 0x1.2fa848p+0, 0x1.4b2404p+0,
  // 0x1.691c8ap+0, 0x1.89cb7cp+0, 0x1.ad6fb4p+0 and 0x1.d44dbcp+0.
  static constexpr int32_t ROOTS[] = {0x3f7f5829, 0x3f7b3a3e, 0x3f77d424, 0x3f759202,
                                      0x3f748e45, 0x3f74e5be, 0x3f76b7da, 0x3f7a26de};
  static constexpr float EXP2_NEAR[] = {0x1.508a8ap-9f, 0x1.63cd76p-1f, 0x1.ed4f22p-3f,
                                        0x1.c7e9d0p-5f};
  static constexpr float EXP_NEAR[] = {0x1.508a8ap-9f, 0x1.00a846p+0f, 0x1.00b088p-1f,
                                       0x1.564080p-3f};
#endif
  static constexpr float WHOLE = 0x1p23f;
  static constexpr float SIN[] = {0x1.921fb6p1f, -0x1.4abbc4p2f, 0x1.4668fp1f, -0x1.32531ep-1f,
                                  0x1.3e142p-4f};
  static constexpr float COS[] = {-0x1.3bd3ccp2f, 0x1.03c1eep2f, -0x1.55d24ap0f, 0x1.e16eacp-3f,
                                  -0x1.937d98p-6f};
};

struct F64 {
  using Real = double;
  typedef double Vector __attribute__((vector_size(WIDTH)));
  typedef Vector Wide;
  typedef int64_t Integers __attribute__((vector_size(WIDTH)));
  typedef uint64_t Bits __attribute__((vector_size(WIDTH)));
  static constexpr int LANES = WIDTH / 8, MANTISSA = 52, BIAS = 1023;
  static constexpr double LOWEST = -746.0, HIGHEST = 710.0;
  static constexpr double FAR = 0x1p148, NEAR = 1021;
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
  static constexpr double EXP2[] = {
      0x1.62e42fefa39efp-1,  0x1.ebfbdff82c598p-3,  0x1.c6b08d704a0c2p-5,  0x1.3b2ab6fba1ddap-7,
      0x1.5d87fe78a5276p-10, 0x1.430913096fd9fp-13, 0x1.ffcbfc670dcd4p-17, 0x1.62bfd47773353p-20,
      0x1.b524fae627834p-24, 0x1.e6063f7217bc6p-28, 0x1.e9d3fe3952179p-32};
  static constexpr double LOG1P[] = {
      0x1p+0, -0x1.fffffffffffe2p-2, 0x1.555555555426cp-2, -0x1.ffffffff675fp-3,
      0x1.999999851ab6dp-3, -0x1.555553a360d3bp-3, 0x1.2492310403adp-3, -0x1.fffe16d429dd8p-4,
      0x1.c70e13a2c5d8ep-4, -0x1.99470de1e7dfcp-4, 0x1.72ea81f4306bfp-4, -0x1.502a5940104acp-4,
      0x1.2c324b858157p-4, -0x1.01965f46f9127p-4, 0x1.9a3bf844ccce4p-5, -0x1.2310e9937c018p-5,
      0x1.606fc4b32e031p-6, -0x1.5bd286de8976p-7, 0x1.0946fb1ce4ee5p-8, -0x1.22d14be88b9f2p-10,
      0x1.956569bb68299p-13, -0x1.0cc64e91b8745p-16};
  static constexpr double WHOLE = 0x1p52;
  static constexpr double SIN[] = {
      0x1.921fb54442d18p1,   -0x1.4abbce625be52p2,  0x1.466bc6775aa7dp1,
      -0x1.32d2cce627c86p-1, 0x1.5078348551854p-4,  -0x1.e3074dfaf87afp-8,
      0x1.e8f3675ee37ddp-12, -0x1.6f7acdb8f658p-16, 0x1.9d462020fcc78p-21};
  static constexpr double COS[] = {
      -0x1.3bd3cc9be45dep2, 0x1.03c1f081b5a9fp2,   -0x1.55d3c7e3c9051p0,  0x1.e1f5068620bcbp-3,
      -0x1.a6d1f12b0bef2p-6, 0x1.f9d2c1f3b2167p-10, -0x1.b6a6feabe52e9p-14, 0x1.179a329ef414p-18};
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

// exp(x) for x ≤ F::HIGHEST: see the next one.
template <class F>
FUSEPORT_INLINE typename F::Vector exp_below(typename F::Vector x) {
  using Vector = typename F::Vector;
  x = at_least<F>(F::LOWEST, x);
#if defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4) {
    const Vector shifted = x * F::LOG2E + F::PARTS, k = shifted - F::PARTS;
    const Vector r = x - k * F::LN2_HIGH - k * F::LN2_LOW;
    return (Vector)scaled_root((__m512)shifted, (__m512)k, (__m512)polynomial(F::EXP_NEAR, r));
  }
#endif
  const Vector shifted = x * F::LOG2E + F::ROUND;
  const Vector k = shifted - F::ROUND;
  Vector r = x - k * F::LN2_HIGH;
  r = r - k * F::LN2_LOW;
  const Vector mantissa = r * r * polynomial_by_halves(F::EXP, r) + r + (typename F::Real)1;
#if defined(__AVX512F__)
  return (Vector)_mm512_scalef_pd((__m512d)mantissa, (__m512d)k);
#else
  using Integers = typename F::Integers;
  return scale<F>(mantissa, (Integers)shifted - (Integers)splat<F>(F::ROUND));
#endif
}

// exp to about one ulp, down to the subnormal numbers; exp(-Inf) = 0, and Inf and NaN stay.
template <class F>
FUSEPORT_INLINE typename F::Vector exp(typename F::Vector x) {
  return exp_below<F>(at_most<F>(F::HIGHEST, x));
}

// exp(-|x|).
template <class F>
FUSEPORT_INLINE typename F::Vector exp_of_minus_magnitude(typename F::Vector x) {
  using Vector = typename F::Vector;
  using Bits = typename F::Bits;
  constexpr int sign = 8 * (int)sizeof(typename F::Real) - 1;
  x = (Vector)((Bits)x | (Bits{} + 1) << sign);
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4) {
    x = at_least<F>(F::LOWEST, x);
    const Vector shifted = x * F::LOG2E + F::PARTS, k = shifted - F::PARTS;
    const Vector r = x - k * F::LN2_HIGH - k * F::LN2_LOW;
    return scaled_root<64>(shifted, polynomial(F::EXP_NEAR, r)) * 0x1p-64f;
  }
#endif
  return exp_below<F>(x);
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
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(typename F::Real) == 4)
    return (typename F::Vector)_mm256_fmadd_ps((__m256)x, (__m256)c, (__m256)y);
  return (typename F::Vector)_mm256_fmadd_pd((__m256d)x, (__m256d)c, (__m256d)y);
#endif
  return x * c + y;
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
