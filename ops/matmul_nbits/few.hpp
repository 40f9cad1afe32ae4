// The product of a row of W with few rows of x, with AVX-512: codes of four bits become values in
// registers.
#pragma once

#include "matmul_nbits/kernel.hpp"
#include "native/stored_few.hpp"

#if defined(__AVX512F__)

namespace fuseport::matmul_nbits::FUSEPORT_ISA {

using namespace stored::FUSEPORT_ISA;

// How many zero points of a row are made floats before its product.
inline int64_t zeros_apart(const Problem& p) { return p.group % GROUP ? p.groups : 0; }

FUSEPORT_INLINE __mmask16 first_lanes(int64_t count) {
  return (__mmask16)(0xffffu >> (16 - (count < 16 ? count : 16)));
}

// The lanes of the products of a row of W with COUNT rows of x, arranged. Where they are not ONE,
// the lanes of a vector have up to nine groups, and `zeros` their zero points.
template <int COUNT, bool ONE>
FUSEPORT_INLINE void dot(const Problem& p, int64_t row, const float* zeros, const float* x,
                         int64_t x_stride, F32::Vector (&sums)[COUNT]) {
  const uint8_t* bytes = p.packed + row * p.row_bytes();
  const float* scales = (const float*)p.scales + row * p.groups;
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 codes = _mm512_cvtepi32_ps(lanes);
  // Of the middle of each lane's values: so that what is cut off is right however it is rounded.
  const __m512 middles = _mm512_add_ps(_mm512_mul_ps(codes, _mm512_set1_ps(OF_LANE)),
                                       _mm512_set1_ps(OF_LANE / 2));
  const __m512 per_group = _mm512_set1_ps(1.0f / (float)p.group);
  int64_t group = 0, within = 0;
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; ++r) sums[r] = F32::Vector{};
  for (int64_t k = 0; k < p.in; k += GROUP, x += GROUP) {
    // The processor itself looks no further ahead than a page; beyond the end, this does nothing.
    _mm_prefetch((const char*)bytes + k / 2 + AHEAD, _MM_HINT_T0);
    const int64_t left = p.in - k, used = left < GROUP ? (left + OF_LANE - 1) / OF_LANE : 16;
    const __m512i words = _mm512_maskz_loadu_epi32(first_lanes(used), bytes + k / 2);
    __m512 scale, zero, table = codes;
    if constexpr (ONE) {
      scale = _mm512_set1_ps(scales[group]);
      zero = _mm512_set1_ps((float)p.zero_point(row, group));
      table = _mm512_sub_ps(codes, zero);
    } else {
      const __m512 places = _mm512_add_ps(middles, _mm512_set1_ps((float)within));
      const __m512i of_lane = _mm512_cvttps_epi32(_mm512_mul_ps(places, per_group));
      const __mmask16 there = first_lanes(p.groups - group);
      scale = _mm512_permutexvar_ps(of_lane, _mm512_maskz_loadu_ps(there, scales + group));
      zero = _mm512_permutexvar_ps(of_lane, _mm512_maskz_loadu_ps(there, zeros + group));
    }
    __m512 parts[COUNT];
#pragma GCC unroll 8
    for (int s = 0; s < OF_LANE; ++s) {
      __m512 values = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * s), table);
      if constexpr (!ONE) values = _mm512_sub_ps(values, zero);
#pragma GCC unroll 8
      for (int r = 0; r < COUNT; ++r) {
        const __m512 left_values = _mm512_loadu_ps(x + r * x_stride + s * F32::LANES);
        parts[r] = s == 0 ? values * left_values : _mm512_fmadd_ps(values, left_values, parts[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r)
      sums[r] = (F32::Vector)_mm512_fmadd_ps(parts[r], scale, (__m512)sums[r]);
    for (within += GROUP; within >= p.group; within -= p.group) ++group;
  }
}

}  // namespace fuseport::matmul_nbits::FUSEPORT_ISA

#endif
