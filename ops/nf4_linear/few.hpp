// x · Wᵀ for the few rows of x that decoding has, with AVX-512: indices become values in registers,
// and the weight is read once, as it is stored.
#pragma once

#include "native/blocks.hpp"
#include "nf4_linear/decode.hpp"

#if defined(__AVX512F__)

namespace fuseport::nf4_linear::FUSEPORT_ISA {

constexpr int GROUP = 128;    // values in a vector of bytes: lane i has those from 8·i on
constexpr int AT_ONCE = 8;    // rows of x
constexpr int AHEAD = 4096;   // bytes of the weight that are on their way to the cache
constexpr int OF_LANE = 8;    // values in a lane: the s-th lowest four bits are value s ^ 1 of it

// Each group of x in the order that its values are used in: (GROUP) → (OF_LANE, lanes).
static void arrange(float* x, int64_t groups) {
  constexpr std::make_integer_sequence<int, F32::LANES> lanes;
  constexpr int HALF = OF_LANE / 2;
  for (float* end = x + groups * GROUP; x < end; x += GROUP) {
    F32::Vector v[OF_LANE];
#pragma GCC unroll 8
    for (int i = 0; i < OF_LANE; ++i) v[i] = load<F32>(x + i * F32::LANES);
#pragma GCC unroll 4
    for (int bit = 0; bit < 4; ++bit) {  // of a lane's number: a perfect shuffle moves it down
      F32::Vector mixed[OF_LANE];
#pragma GCC unroll 4
      for (int i = 0; i < HALF; ++i) {
        mixed[2 * i] = zip<F32, 0>(v[i], v[i + HALF], lanes);
        mixed[2 * i + 1] = zip<F32, F32::LANES / 2>(v[i], v[i + HALF], lanes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < OF_LANE; ++i) v[i] = mixed[i];
    }
#pragma GCC unroll 8
    for (int s = 0; s < OF_LANE; ++s) store<F32>(x + s * F32::LANES, v[s ^ 1]);
  }
}

// The lanes of the products of a row of W, whose first value is at `at`, with COUNT rows of x,
// arranged; `at` and p.in are multiples of 8.
template <int COUNT>
FUSEPORT_INLINE void dot(const Problem& p, int64_t at, const float* x, int64_t x_stride,
                         F32::Vector (&sums)[COUNT]) {
  const Code code(p);
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

// `sums` (COUNT, stride), for rows of x that are arranged.
template <int COUNT>
static void dots(const Problem& p, const float* x, int64_t x_stride, int64_t column, int columns,
                 float* sums, int stride) {
  for (int c = 0; c < columns; c += F32::LANES) {
    F32::Vector lanes[COUNT][F32::LANES] = {};
    for (int i = 0; i < F32::LANES && c + i < columns; ++i) {
      F32::Vector found[COUNT];
      dot<COUNT>(p, (column + c + i) * p.in, x, x_stride, found);
      for (int r = 0; r < COUNT; ++r) lanes[r][i] = found[r];
    }
    for (int r = 0; r < COUNT; ++r) store<F32>(sums + r * stride + c, sums_of_lanes<F32>(lanes[r]));
  }
}

// A strip for all rows of x, by AT_ONCE rows; `panel` has room for these, in whole groups.
template <class Stored>
static void strip_of_decoding(const Problem& p, const Rows& x, int64_t column, int columns,
                              float* panel, float* sums, int stride) {
  const int64_t groups = (p.in + GROUP - 1) / GROUP, length = groups * GROUP;
  for (int64_t row = 0; row < p.rows; row += AT_ONCE) {
    const int rows = (int)(p.rows - row < AT_ONCE ? p.rows - row : AT_ONCE);
    const int count = rows <= 2 ? rows : rows <= 4 ? 4 : AT_ONCE;  // the others are zeros
    for (int r = 0; r < count; ++r) {
      float* to = panel + r * length;
      const int64_t known = r < rows ? p.in : 0;
      const Stored* from = (const Stored*)x.data + (row + r) * x.row_stride;
      if (known) load_block<F32>(from, 0, x.column_stride, 1, (int)p.in, to, 0);
      memset(to + known, 0, sizeof *to * (length - known));
      if (known) arrange(to, groups);
    }
    float found[AT_ONCE * STRIP];
    switch (count) {
      case 1:
        dots<1>(p, panel, length, column, columns, found, STRIP);
        break;
      case 2:
        dots<2>(p, panel, length, column, columns, found, STRIP);
        break;
      case 4:
        dots<4>(p, panel, length, column, columns, found, STRIP);
        break;
      default:
        dots<AT_ONCE>(p, panel, length, column, columns, found, STRIP);
    }
    for (int r = 0; r < rows; ++r)
      memcpy(sums + (row + r) * stride, found + r * STRIP, sizeof *sums * columns);
  }
}

}  // namespace fuseport::nf4_linear::FUSEPORT_ISA

#endif
