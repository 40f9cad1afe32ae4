// x · Wᵀ for the few rows of x that decoding has, with AVX-512, where codes of W have four bits: they
// become values in registers, and the weight is read once, as it is stored. Compiled once per
// instruction set.
#pragma once

#include <utility>

#include "native/blocks.hpp"
#include "native/stored_weight.hpp"

#if defined(__AVX512F__)

namespace fuseport::stored::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;


constexpr int GROUP = 128;    // values in a vector of bytes: lane i has those from 8·i on
constexpr int AT_ONCE = 8;    // rows of x
constexpr int AHEAD = 4096;   // bytes of the weight that are on their way to the cache
constexpr int OF_LANE = 8;    // values in a lane

// Each group of x in the order that its values are used in: (GROUP) → (OF_LANE, lanes). The s-th
// lowest four bits of a lane are value s ^ TURN of it.
template <int TURN>
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
    for (int s = 0; s < OF_LANE; ++s) store<F32>(x + s * F32::LANES, v[s ^ TURN]);
  }
}

// `sums` (COUNT, stride), for rows of x that are arranged.
template <class Weight, int COUNT>
static void dots(const Weight& weight, const float* x, int64_t x_stride, int64_t column,
                 int columns, float* sums, int stride) {
  for (int c = 0; c < columns; c += F32::LANES) {
    F32::Vector lanes[COUNT][F32::LANES] = {};
    for (int i = 0; i < F32::LANES && c + i < columns; ++i) {
      F32::Vector found[COUNT];
      weight.template dot<COUNT>(column + c + i, x, x_stride, found);
      for (int r = 0; r < COUNT; ++r) lanes[r][i] = found[r];
    }
    for (int r = 0; r < COUNT; ++r) store<F32>(sums + r * stride + c, sums_of_lanes<F32>(lanes[r]));
  }
}

// A strip for all rows of x, by AT_ONCE rows; `panel` has room for these, in whole groups.
template <class Weight, class Stored>
static void strip_of_decoding(const Weight& weight, const Sizes& p, const Rows& x, int64_t column,
                              int columns, float* panel, float* sums, int stride) {
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
      if (known) arrange<Weight::TURN>(to, groups);
    }
    float found[AT_ONCE * STRIP];
    switch (count) {
      case 1:
        dots<Weight, 1>(weight, panel, length, column, columns, found, STRIP);
        break;
      case 2:
        dots<Weight, 2>(weight, panel, length, column, columns, found, STRIP);
        break;
      case 4:
        dots<Weight, 4>(weight, panel, length, column, columns, found, STRIP);
        break;
      default:
        dots<Weight, AT_ONCE>(weight, panel, length, column, columns, found, STRIP);
    }
    for (int r = 0; r < rows; ++r)
      memcpy(sums + (row + r) * stride, found + r * STRIP, sizeof *sums * columns);
  }
}

}  // namespace fuseport::stored::FUSEPORT_ISA

#endif
