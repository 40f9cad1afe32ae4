// The backward kernel: all queries of one head of one batch entry. Its pixels lie in scratch, with
// their gradients beside them, in the type of sums and up to whole vectors of channels, and after
// them one that stands for all outside.
#pragma once

#include "ms_deform_attn/samples.hpp"
#include "native/blocks.hpp"

namespace fuseport::ms_deform_attn::FUSEPORT_ISA {

template <class F>
static int64_t backward_bytes(const Problem& p) {
  const int64_t row = whole(p.channels, F::LANES);
  return whole(Samples<F>::bytes(p), 64) +
         (2 * (p.positions + 1) + 1) * row * (int64_t)sizeof(typename F::Real);
}

template <class F, class Stored, class Point>
static void backward_unit(const Problem& p, const Backward& b, int64_t unit, void* scratch) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  constexpr int64_t LANES = F::LANES;
  const Samples<F> s(p, scratch);
  const int64_t n = s.n, row = whole(p.channels, LANES), stride = p.heads * p.channels;
  const int64_t batch = unit / p.heads, head = unit % p.heads;
  const int64_t first = batch * p.positions * stride + head * p.channels;
  Real* const value = (Real*)((char*)scratch + whole(Samples<F>::bytes(p), 64));
  Real* const dvalue = value + (p.positions + 1) * row;
  Real* const g = dvalue + (p.positions + 1) * row;
  memset(value, 0, (2 * (p.positions + 1) + 1) * row * sizeof(Real));
  load_block<F>((const Stored*)p.value + first, stride, 1, (int)p.positions, (int)p.channels,
                value, (int)row);

  for (int64_t q = 0; q < p.queries; ++q) {
    const int64_t number = (batch * p.queries + q) * p.heads + head;
    s.template read<Point>(p, number);
    load_block<F>((const Stored*)b.dout + number * p.channels, 0, 1, 1, (int)p.channels, g,
                  (int)row);
    for (int64_t m = 0; m < s.pixels; m += LANES) {
      Vector sums[LANES];
#pragma GCC unroll 4
      for (int i = 0; i < LANES; ++i) {
        const int64_t index = s.index[m + i];
        const int64_t position = index < 0 ? p.positions : index;
        const Real* const from = value + position * row;
        Real* const to = dvalue + position * row;
        const Vector share = splat<F>(s.share[m + i]);
        Vector sum{};
        for (int64_t c = 0; c < row; c += LANES) {
          const Vector gradient = load<F>(g + c);
          sum += gradient * load<F>(from + c);
          store<F>(to + c, load<F>(to + c) + share * gradient);
        }
        sums[i] = sum;
      }
      store<F>(s.dots + m, sums_of_lanes<F>(sums));
    }
    Point* const dlocation = (Point*)b.dlocations + number * 2 * n;
    Point* const dweight = (Point*)b.dweights + number * n;
    for (int64_t j = 0; j < n; ++j) {
      const Real x = s.share_x[j], y = s.share_y[j], one = 1;
      const Real upper_left = s.dots[j], upper_right = s.dots[n + j];
      const Real lower_left = s.dots[2 * n + j], lower_right = s.dots[3 * n + j];
      const Real upper = (one - x) * upper_left + x * upper_right;
      const Real lower = (one - x) * lower_left + x * lower_right;
      const Real across = (one - y) * (upper_right - upper_left) + y * (lower_right - lower_left);
      from_real((one - y) * upper + y * lower, dweight + j);
      from_real(s.weights[j] * s.widths[j] * across, dlocation + 2 * j);
      from_real(s.weights[j] * s.heights[j] * (lower - upper), dlocation + 2 * j + 1);
    }
  }
  store_block<F>(dvalue, (int)row, (int)p.positions, (int)p.channels, (Stored*)b.dvalue + first,
                 stride, 1);
}

}  // namespace fuseport::ms_deform_attn::FUSEPORT_ISA
