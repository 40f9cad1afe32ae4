// Steps of one head as rows of reals; columns that fill a row up to whole vectors are zero. Compiled
// once per instruction set.
#pragma once

#include "gated_delta_rule/kernel.hpp"
#include "native/blocks.hpp"
#include "native/scratch.hpp"

namespace fuseport::gated_delta_rule::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

// Numbers in a row of so many that are in use.
template <class F>
FUSEPORT_INLINE int64_t padded(int64_t count) {
  return (count + F::LANES - 1) / F::LANES * F::LANES;
}

// `count` rows from step `start` on, of columns from `first` on.
template <class F, class Stored>
static void load_steps(const Strided& s, int64_t batch, int64_t head, int64_t start, int count,
                       int64_t first, int columns, int64_t row, typename F::Real* tile) {
  const Stored* from = (const Stored*)s.data + batch * s.batch + start * s.step + head * s.head +
                       first * s.column;
  if (columns < row) memset(tile, 0, sizeof *tile * count * row);
  load_block<F>(from, s.step, s.column, count, columns, tile, (int)row);
}

// The decays of `count` steps, a row of key channels for each; zero beyond the last channel.
template <class F>
static void load_decays(const Problem& p, int64_t batch, int64_t head, int64_t start, int count,
                        int64_t row, typename F::Real* tile) {
  using Real = typename F::Real;
  if (p.channels) {
    load_steps<F, Real>(p.g, batch, head, start, count, 0, (int)p.keys, row, tile);
    for (int64_t i = 0; i < count * row; i += F::LANES) store<F>(tile + i, exp<F>(load<F>(tile + i)));
    for (int t = 0; t < count; ++t)
      for (int64_t i = p.keys; i < row; ++i) tile[t * row + i] = 0;
    return;
  }
  const Real* from =
      (const Real*)p.g.data + batch * p.g.batch + start * p.g.step + head * p.g.head;
  for (int t = 0; t < count; t += F::LANES) {
    Real some[F::LANES] = {};
    const int here = count - t < F::LANES ? count - t : F::LANES;
    for (int i = 0; i < here; ++i) some[i] = from[(t + i) * p.g.step];
    store<F>(some, exp<F>(load<F>(some)));
    for (int r = 0; r < here; ++r)
      for (int64_t i = 0; i < row; ++i) tile[(t + r) * row + i] = i < p.keys ? some[r] : (Real)0;
  }
}

template <class F>
static void load_rates(const Problem& p, int64_t batch, int64_t head, int64_t start, int count,
                       typename F::Real* rates) {
  const auto* from = (const typename F::Real*)p.beta.data + batch * p.beta.batch +
                     start * p.beta.step + head * p.beta.head;
  for (int t = 0; t < count; ++t) rates[t] = from[t * p.beta.step];
}

template <class Real>
FUSEPORT_INLINE void fill(Real* row, int64_t count, Real with) {
  for (int64_t i = 0; i < count; ++i) row[i] = with;
}

template <class F>
FUSEPORT_INLINE void scale_tile(typename F::Real* tile, int64_t count, typename F::Real by) {
  for (int64_t i = 0; i < count; i += F::LANES) store<F>(tile + i, load<F>(tile + i) * by);
}

}  // namespace fuseport::gated_delta_rule::FUSEPORT_ISA
