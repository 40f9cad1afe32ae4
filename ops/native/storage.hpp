// How numbers of each dtype lie in memory, and become the reals that a kernel computes with.
// Compiled once per instruction set, as vector.hpp is.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/vector.hpp"

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

FUSEPORT_INLINE float to_real(BFloat16 x) { return bits<float>((uint32_t)x.raw << 16); }

// Exponent and mantissa move into place; the product with 2^112 mends the exponent's bias, for
// subnormal numbers too. The largest exponent means Inf and NaN, and stays the largest.
FUSEPORT_INLINE float to_real(Half x) {
  const uint32_t magnitude = (uint32_t)(x.raw & 0x7fff) << 13;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  const uint32_t scaled = bits<uint32_t>(bits<float>(magnitude) * 0x1p112f);
  return bits<float>(scaled | special | ((uint32_t)(x.raw & 0x8000) << 16));
}

FUSEPORT_INLINE void from_real(float x, float* to) { *to = x; }
FUSEPORT_INLINE void from_real(double x, double* to) { *to = x; }

// To the nearest, ties to even; NaN stays NaN.
FUSEPORT_INLINE void from_real(float x, BFloat16* to) {
  const uint32_t raw = bits<uint32_t>(x);
  const uint32_t rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  to->raw = (uint16_t)(x != x ? 0x7fc0u : rounded);
}

// To the nearest, ties to even. Normal halves round in the integer that holds them; for subnormal
// ones the sum with 0.5, whose ulp is their spacing, rounds.
FUSEPORT_INLINE void from_real(float x, Half* to) {
  const uint32_t raw = bits<uint32_t>(x);
  const uint32_t magnitude = raw & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - bits<uint32_t>(0.5f);
  uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? 0x7c00u : result;  // 2^16 and more; 65520 rounds up above
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  to->raw = (uint16_t)(result | ((raw >> 16) & 0x8000u));
}

}  // namespace fuseport::FUSEPORT_ISA
