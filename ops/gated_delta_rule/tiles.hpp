// What a step decays by and writes by, as rows of reals. Compiled once per instruction set.
#pragma once

#include "gated_delta_rule/kernel.hpp"
#include "native/rule_tiles.hpp"

namespace fuseport::gated_delta_rule::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

// The decays of `count` steps, a row of key channels for each; zero beyond the last channel.
template <class F>
static void load_decays(const Problem& p, int64_t batch, int64_t head, int64_t start, int count,
                        int64_t row, typename F::Real* tile) {
  using Real = typename F::Real;
  if (p.channels)
    return load_channel_decays<F>(p.g, batch, head, start, count, p.keys, row, tile);
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

}  // namespace fuseport::gated_delta_rule::FUSEPORT_ISA
