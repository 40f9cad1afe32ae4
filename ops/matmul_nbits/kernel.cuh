// The weight on CUDA, as native/cuda_stored.cuh wants it.
#pragma once

#include "matmul_nbits/cuda.hpp"
#include "native/cuda_stored.cuh"

namespace fuseport::matmul_nbits::cuda {

using namespace stored::cuda;

template <class Real>
struct Weight {
  static constexpr int BYTES = 0;

  const Problem& p;

  FUSEPORT_DEVICE Weight(const Problem& problem, char*) : p(problem) {}

  FUSEPORT_DEVICE Real one(int64_t row, int64_t column) const {
    const int64_t group = quotient_of(column, p.group), at = column * p.bits;
    const int code = p.packed[row * p.row_bytes() + (at >> 3)] >> (at & 7) & ((1 << p.bits) - 1);
    return (Real)(code - p.zero_point(row, group)) * scale(row, group);
  }

  // RUN values of one group that are not decoded yet.
  struct Asked {
    uint32_t words[RUN / 4];  // or as many as these codes are in
    int zero;
    Real scale;
  };

  FUSEPORT_DEVICE Asked ask(int64_t row, int64_t column) const {
    const uint8_t* const at = p.packed + row * p.row_bytes() + (column >> 3) * p.bits;
    const int64_t group = quotient_of(column, p.group);
    Asked asked{{}, p.zero_point(row, group), scale(row, group)};
    if (p.bits == 4) load<4>(at, asked);
    else if (p.bits == 8) load<8>(at, asked);
    else load<2>(at, asked);
    return asked;
  }

  FUSEPORT_DEVICE void decode(const Asked& asked, Real* to) const {
    if (p.bits == 4) decode_codes<4>(asked, to);
    else if (p.bits == 8) decode_codes<8>(asked, to);
    else decode_codes<2>(asked, to);
  }

  static bool in_runs(const Problem& p, int64_t column, int64_t columns) {
    return p.in % RUN == 0 && column % RUN == 0 && columns % RUN == 0 &&
           (uintptr_t)p.packed % (RUN / 8 * p.bits) == 0;
  }

 private:
  FUSEPORT_DEVICE Real scale(int64_t row, int64_t group) const {
    return ((const Real*)p.scales)[row * p.groups + group];
  }

  template <int BITS>
  static FUSEPORT_DEVICE void load(const uint8_t* from, Asked& asked) {
    constexpr int COUNT = RUN * BITS / 32;
    const auto words = *(const Pack<uint32_t, COUNT>*)from;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asked.words[i] = words.at[i];
  }

  template <int BITS>
  static FUSEPORT_DEVICE void decode_codes(const Asked& asked, Real* to) {
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const uint32_t from = asked.words[i * BITS / 32] >> (i * BITS % 32);
      to[i] = (Real)((int)(from & ((1u << BITS) - 1)) - asked.zero) * asked.scale;
    }
  }
};

}  // namespace fuseport::matmul_nbits::cuda
