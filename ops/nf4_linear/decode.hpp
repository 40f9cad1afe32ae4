// Values of a weight from its indices of four bits. Compiled once per instruction set.
#pragma once

#include "native/vector.hpp"
#include "nf4_linear/code.hpp"
#include "nf4_linear/kernel.hpp"

namespace fuseport::nf4_linear::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

alignas(64) constexpr float CODES[][16] = FUSEPORT_CODES;

// A problem's code: made before a loop, it stays in registers there.
struct Code {
  const float* values;
#if defined(__AVX512F__)
  __m512 all;
#elif defined(__AVX2__)
  __m256 low, high;
#endif

  FUSEPORT_INLINED explicit Code(const Problem& p) : values(CODES[p.quant_type]) {
#if defined(__AVX512F__)
    all = _mm512_load_ps(values);
#elif defined(__AVX2__)
    low = _mm256_load_ps(values);
    high = _mm256_load_ps(values + 8);
#endif
  }
};

// The value at a place in the flattened weight.
template <class Real>
FUSEPORT_INLINE Real one_value(const Problem& p, const Code& code, int64_t at) {
  const int byte = p.packed[at >> 1], index = at & 1 ? byte & 15 : byte >> 4;
  return (Real)code.values[index] * ((const Real*)p.absmax)[at >> p.block_shift];
}

#if defined(__AVX512F__) || defined(__AVX2__)
// As many values in a row as a vector of floats has lanes; `bytes` hold them.
FUSEPORT_INLINE F32::Vector values_of(const Code& code, const uint8_t* bytes,
                                      F32::Vector scale) {
#if defined(__AVX512F__)
  const __m128i raw = _mm_loadl_epi64((const __m128i*)bytes);
  const __m512i twice = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(raw, raw));
  const __m512i high_first = _mm512_set1_epi64(4);  // shifts of 4 and 0 by turns
  const __m512i index = _mm512_srlv_epi32(twice, high_first);
  return (F32::Vector)_mm512_permutexvar_ps(index, code.all) * scale;
#else
  int32_t four;
  memcpy(&four, bytes, sizeof four);
  const __m128i raw = _mm_cvtsi32_si128(four);
  const __m256i twice = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(raw, raw));
  const __m256i index = _mm256_srlv_epi32(twice, _mm256_set1_epi64x(4));
  const __m256 low = _mm256_permutevar8x32_ps(code.low, index);
  const __m256 high = _mm256_permutevar8x32_ps(code.high, index);
  const __m256 chosen = _mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(index, 28));
  return (F32::Vector)chosen * scale;
#endif
}
#endif

// `count` values of one block, from an even place on.
template <class F>
FUSEPORT_INLINE void decode_in_block(const Problem& p, const Code& code, int64_t at, int64_t count,
                                     typename F::Real* to) {
  using Real = typename F::Real;
  const Real scale = ((const Real*)p.absmax)[at >> p.block_shift];
  const uint8_t* bytes = p.packed + (at >> 1);
  int64_t i = 0;
#if defined(__AVX512F__) || defined(__AVX2__)
  if constexpr (sizeof(Real) == 4) {
    const F32::Vector scales = splat<F32>(scale);
    for (; i + F32::LANES <= count; i += F32::LANES)
      store<F32>(to + i, values_of(code, bytes + i / 2, scales));
  }
#endif
  for (; i < count; ++i) {
    const int byte = bytes[i >> 1];
    to[i] = (Real)code.values[i & 1 ? byte & 15 : byte >> 4] * scale;
  }
}

// `count` values from `at` on, in the order of the flattened weight.
template <class F>
FUSEPORT_INLINE void decode(const Problem& p, const Code& code, int64_t at, int64_t count,
                            typename F::Real* to) {
  using Real = typename F::Real;
  const int64_t end = at + count, block = (int64_t)1 << p.block_shift;
  if (at < end && at & 1) *to++ = one_value<Real>(p, code, at++);
  while (at < end) {
    const int64_t next = (at & -block) + block, stop = next < end ? next : end;
    decode_in_block<F>(p, code, at, stop - at, to);
    to += stop - at;
    at = stop;
  }
}

}  // namespace fuseport::nf4_linear::FUSEPORT_ISA
