// The weight as native/stored_units.hpp wants it. Compiled once per instruction set.
#pragma once

#include "nf4_linear/decode.hpp"
#include "nf4_linear/few.hpp"

namespace fuseport::nf4_linear::FUSEPORT_ISA {

using namespace stored::FUSEPORT_ISA;

struct Weight {
  static constexpr int MOST = stored::DECODING;
  static constexpr int TURN = 1;  // the first of two is in the high half of a byte

  const Problem& p;
  const Code code;

  FUSEPORT_INLINED Weight(const Problem& problem, float*) : p(problem), code(problem) {}

  static int64_t room(const Problem&) { return 0; }

  template <class F>
  FUSEPORT_INLINED void decode(int64_t row, int64_t column, int64_t count,
                              typename F::Real* to) const {
    nf4_linear::FUSEPORT_ISA::decode<F>(p, code, row * p.in + column, count, to);
  }

#if defined(__AVX512F__)
  FUSEPORT_INLINED bool in_registers() const { return p.in % OF_LANE == 0; }

  template <int COUNT>
  FUSEPORT_INLINED void dot(int64_t row, const float* x, int64_t x_stride,
                           F32::Vector (&sums)[COUNT]) const {
    nf4_linear::FUSEPORT_ISA::dot<COUNT>(p, code, row, x, x_stride, sums);
  }
#endif
};

}  // namespace fuseport::nf4_linear::FUSEPORT_ISA
