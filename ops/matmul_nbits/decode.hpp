// Values of a weight from its codes. Compiled once per instruction set.
#pragma once

#include <cstring>

#include "matmul_nbits/kernel.hpp"
#include "native/vector.hpp"

namespace fuseport::matmul_nbits::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

#if defined(__AVX512F__) || defined(__AVX2__)
// As many codes in a row as a vector of floats has lanes; `bytes` hold them, the first in the lowest
// bits.
template <int BITS>
FUSEPORT_INLINE F32::Vector codes_of(const uint8_t* bytes) {
  __m128i each = _mm_setzero_si128();  // a byte for each lane
  memcpy(&each, bytes, F32::LANES * BITS / 8);
  for (int bits = BITS; bits < 8; bits *= 2) each = _mm_unpacklo_epi8(each, each);
  const __m128i shifts = BITS == 2   ? _mm_set_epi32(6, 4, 2, 0)
                         : BITS == 4 ? _mm_set_epi32(4, 0, 4, 0)
                                     : _mm_setzero_si128();
  constexpr int MASK = (1 << BITS) - 1;
#if defined(__AVX512F__)
  const __m512i moved =
      _mm512_srlv_epi32(_mm512_cvtepu8_epi32(each), _mm512_broadcast_i32x4(shifts));
  return (F32::Vector)_mm512_cvtepi32_ps(_mm512_and_si512(moved, _mm512_set1_epi32(MASK)));
#else
  const __m256i moved =
      _mm256_srlv_epi32(_mm256_cvtepu8_epi32(each), _mm256_broadcastsi128_si256(shifts));
  return (F32::Vector)_mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(MASK)));
#endif
}
#endif

// `count` values of one group, whose first code begins a byte.
template <class F, int BITS>
FUSEPORT_INLINE void decode_in_group(const uint8_t* bytes, int64_t count, typename F::Real zero,
                                     typename F::Real scale, typename F::Real* to) {
  using Real = typename F::Real;
  constexpr int PER_BYTE = 8 / BITS;
  int64_t i = 0;
#if defined(__AVX512F__) || defined(__AVX2__)
  if constexpr (sizeof(Real) == 4) {
    const F32::Vector zeros = splat<F32>(zero), scales = splat<F32>(scale);
    for (; i + F32::LANES <= count; i += F32::LANES)
      store<F32>(to + i, (codes_of<BITS>(bytes + i / PER_BYTE) - zeros) * scales);
  }
#endif
  for (; i < count; ++i) {
    const int code = bytes[i / PER_BYTE] >> (i % PER_BYTE * BITS) & ((1 << BITS) - 1);
    to[i] = ((Real)code - zero) * scale;
  }
}

// `count` values of a row, from a multiple of 16 on.
template <class F, int BITS>
FUSEPORT_INLINE void decode_codes(const Problem& p, int64_t row, int64_t column, int64_t count,
                                  typename F::Real* to) {
  using Real = typename F::Real;
  const uint8_t* bytes = p.packed + row * p.row_bytes();
  const Real* scales = (const Real*)p.scales + row * p.groups;
  const int64_t end = column + count;
  for (int64_t group = column / p.group; column < end; ++group) {
    const int64_t next = (group + 1) * p.group, stop = next < end ? next : end;
    decode_in_group<F, BITS>(bytes + column / 8 * BITS, stop - column,
                             (Real)p.zero_point(row, group), scales[group], to);
    to += stop - column;
    column = stop;
  }
}

template <class F>
FUSEPORT_INLINE void decode(const Problem& p, int64_t row, int64_t column, int64_t count,
                            typename F::Real* to) {
  switch (p.bits) {
    case 2:
      return decode_codes<F, 2>(p, row, column, count, to);
    case 4:
      return decode_codes<F, 4>(p, row, column, count, to);
    default:
      return decode_codes<F, 8>(p, row, column, count, to);
  }
}

}  // namespace fuseport::matmul_nbits::FUSEPORT_ISA
