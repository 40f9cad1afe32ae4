// How numbers of each dtype lie in memory, and become the reals that a kernel computes with.
// Compiled once per instruction set, as vector.hpp is.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/dtype.hpp"
#include "native/vector.hpp"

// Returns CALL(F, Stored), with the type of vectors, and the type that numbers of `dtype` are stored
// in.
#define FUSEPORT_DISPATCH(dtype, CALL)  \
  switch (dtype) {                      \
    case fuseport::Dtype::float16:      \
      return CALL(F32, Half);           \
    case fuseport::Dtype::bfloat16:     \
      return CALL(F32, BFloat16);       \
    case fuseport::Dtype::float32:      \
      return CALL(F32, float);          \
    case fuseport::Dtype::float64:      \
      return CALL(F64, double);         \
  }

namespace fuseport::FUSEPORT_ISA {

template <class To, class From>
FUSEPORT_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

struct Half {
  uint16_t raw;
};

struct BFloat16 {
  uint16_t raw;
};

FUSEPORT_INLINE float to_real(float x) { return x; }
FUSEPORT_INLINE double to_real(double x) { return x; }
FUSEPORT_INLINE void from_real(float x, float* to) { *to = x; }
FUSEPORT_INLINE void from_real(double x, double* to) { *to = x; }

// The formulas below are over the bits of one number (Real, Bits = float, uint32_t) or of a vector
// of them; a comparison selects.

template <class Real, class Bits>
FUSEPORT_INLINE Real widened(BFloat16, Bits raw) {
  return bits<Real>(raw << 16);
}

// Exponent and mantissa move into place; the product with 2^112 mends the exponent's bias, for
// subnormal numbers too. The largest exponent means Inf and NaN, and stays the largest.
template <class Real, class Bits>
FUSEPORT_INLINE Real widened(Half, Bits raw) {
  const Bits magnitude = (raw & 0x7fffu) << 13;
  const Bits special = magnitude >= 0x0f800000u ? Bits{} + 0x7f800000u : Bits{};
  const Bits scaled = bits<Bits>(bits<Real>(magnitude) * 0x1p112f);
  return bits<Real>(scaled | special | ((raw & 0x8000u) << 16));
}

// To the nearest, ties to even; NaN stays NaN.
template <class Real, class Bits>
FUSEPORT_INLINE Bits narrowed(BFloat16, Bits raw) {
  const Bits rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  return (raw & 0x7fffffffu) > 0x7f800000u ? Bits{} + 0x7fc0u : rounded;
}

// To the nearest, ties to even. Normal halves round in the integer that holds them; for subnormal
// ones the sum with 0.5, whose ulp is their spacing, rounds.
template <class Real, class Bits>
FUSEPORT_INLINE Bits narrowed(Half, Bits raw) {
  const Bits magnitude = raw & 0x7fffffffu;
  const Bits normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Bits subnormal = bits<Bits>(bits<Real>(magnitude) + 0.5f) - 0x3f000000u;
  Bits result = magnitude < (113u << 23) ? subnormal : normal;
  // 2^16 and more; what rounds up from 65520 has become Inf already.
  result = magnitude >= (143u << 23) ? Bits{} + 0x7c00u : result;
  result = magnitude > 0x7f800000u ? Bits{} + 0x7e00u : result;
  return result | ((raw >> 16) & 0x8000u);
}

template <class Stored>
FUSEPORT_INLINE float to_real(Stored x) {
  return widened<float, uint32_t>(x, (uint32_t)x.raw);
}

template <class Stored>
FUSEPORT_INLINE void from_real(float x, Stored* to) {
  to->raw = (uint16_t)narrowed<float, uint32_t>(*to, bits<uint32_t>(x));
}

typedef uint16_t Shorts __attribute__((vector_size(WIDTH / 2)));

// As many numbers in a row as a vector has lanes, as reals.
template <class F, class Stored>
FUSEPORT_INLINE typename F::Vector load_reals(const Stored* from) {
  if constexpr (sizeof(Stored) == sizeof(typename F::Real)) {
    return load<F>((const typename F::Real*)from);
  } else {
    Shorts raw;
    memcpy(&raw, from, sizeof raw);
    return widened<typename F::Vector>(Stored{}, __builtin_convertvector(raw, typename F::Bits));
  }
}

template <class F, class Stored>
FUSEPORT_INLINE void store_reals(typename F::Vector v, Stored* to) {
  if constexpr (sizeof(Stored) == sizeof(typename F::Real)) {
    store<F>((typename F::Real*)to, v);
  } else {
    const auto raw = narrowed<typename F::Vector>(Stored{}, bits<typename F::Bits>(v));
    const Shorts shorts = __builtin_convertvector(raw, Shorts);
    memcpy(to, &shorts, sizeof shorts);
  }
}

}  // namespace fuseport::FUSEPORT_ISA
