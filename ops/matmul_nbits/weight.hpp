// The weight as native/stored_units.hpp wants it. Compiled once per instruction set.
#pragma once

#include "matmul_nbits/decode.hpp"
#include "matmul_nbits/few.hpp"

namespace fuseport::matmul_nbits::FUSEPORT_ISA {

struct Weight {
  static constexpr int MOST = 8;  // of more, a decoded tile is the faster way
  static constexpr int TURN = 0;  // the first of two is in the low half of a byte

  const Problem& p;
  float* zeros;

  FUSEPORT_INLINED Weight(const Problem& problem, float* room) : p(problem), zeros(room) {}

  template <class F>
  FUSEPORT_INLINED void decode(int64_t row, int64_t column, int64_t count,
                               typename F::Real* to) const {
    matmul_nbits::FUSEPORT_ISA::decode<F>(p, row, column, count, to);
  }

#if defined(__AVX512F__)
  static int64_t room(const Problem& p) { return zeros_apart(p); }

  FUSEPORT_INLINED bool in_registers() const { return p.bits == 4; }

  template <int COUNT>
  FUSEPORT_INLINED void dot(int64_t row, const float* x, int64_t x_stride,
                            F32::Vector (&sums)[COUNT]) const {
    if (p.group % GROUP == 0) {
      matmul_nbits::FUSEPORT_ISA::dot<COUNT, true>(p, row, zeros, x, x_stride, sums);
    } else {
      const uint8_t* bytes = p.zero_points + row * p.zero_bytes();
      decode_in_group<F32, 4>(bytes, p.groups, 0, 1, zeros);
      matmul_nbits::FUSEPORT_ISA::dot<COUNT, false>(p, row, zeros, x, x_stride, sums);
    }
  }
#else
  static int64_t room(const Problem&) { return 0; }
#endif
};

}  // namespace fuseport::matmul_nbits::FUSEPORT_ISA
