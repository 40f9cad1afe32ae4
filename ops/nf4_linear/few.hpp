// The product of a row of W with few rows of x, with AVX-512: indices become values in registers.
#pragma once

#include "native/stored_few.hpp"
#include "nf4_linear/decode.hpp"

#if defined(__AVX512F__)

namespace fuseport::nf4_linear::FUSEPORT_ISA {

using namespace stored::FUSEPORT_ISA;

// The lanes of the products of a row of W with COUNT rows of x, arranged.
template <int COUNT>
FUSEPORT_INLINE void dot(const Problem& p, const Code& code, int64_t row, const float* x,
                         int64_t x_stride, F32::Vector (&sums)[COUNT]) {
  int64_t at = row * p.in;  // it and p.in are multiples of 8
  const __m512i firsts = _mm512_slli_epi32(
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 3);
  const int64_t block = (int64_t)1 << p.block_shift;
  const __m128i shift = _mm_cvtsi32_si128(p.block_shift);
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; ++r) sums[r] = F32::Vector{};
  for (int64_t k = 0; k < p.in; k += GROUP, at += GROUP, x += GROUP) {
    // The processor itself looks no further ahead than a page; beyond the end, this does nothing.
    _mm_prefetch((const char*)p.packed + (at >> 1) + AHEAD, _MM_HINT_T0);
    const int64_t left = p.in - k;
    const int used = (int)(left < GROUP ? left : GROUP) / OF_LANE, within = (int)(at & (block - 1));
    const __m512i bytes = _mm512_maskz_loadu_epi32((__mmask16)(0xffffu >> (16 - used)),
                                                   p.packed + (at >> 1));
    const int blocks = ((within + OF_LANE * (used - 1)) >> p.block_shift) + 1;
    const __m512 scales = _mm512_maskz_loadu_ps((__mmask16)(0xffffu >> (16 - blocks)),
                                                (const float*)p.absmax + (at >> p.block_shift));
    const __m512i of_lane = _mm512_srl_epi32(_mm512_add_epi32(firsts, _mm512_set1_epi32(within)),
                                             shift);
    const __m512 scale = _mm512_permutexvar_ps(of_lane, scales);
    __m512 parts[COUNT];
#pragma GCC unroll 8
    for (int s = 0; s < OF_LANE; ++s) {
      const __m512 values = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4 * s), code.all);
#pragma GCC unroll 8
      for (int r = 0; r < COUNT; ++r) {
        const __m512 left_values = _mm512_loadu_ps(x + r * x_stride + s * F32::LANES);
        parts[r] = s == 0 ? values * left_values : _mm512_fmadd_ps(values, left_values, parts[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r)
      sums[r] = (F32::Vector)_mm512_fmadd_ps(parts[r], scale, (__m512)sums[r]);
  }
}

}  // namespace fuseport::nf4_linear::FUSEPORT_ISA

#endif
