// What the kernels of the layer take and give, over raw pointers: the interface between kernel.cpp,
// compiled once per instruction set, and its bindings.
#pragma once

#include "native/stored_weight.hpp"

namespace fuseport::matmul_nbits {

using stored::Backward;
using stored::Forward;
using stored::Rows;

struct Problem : stored::Sizes {
  int bits = 4;  // of a code: 2, 4 or 8
  int64_t group = 128, groups = 0;  // codes in a group, a multiple of 16; groups in a row
  const uint8_t* packed = nullptr;  // contiguous, as the others are
  const void* scales = nullptr;     // of the type of computation
  const uint8_t* zero_points = nullptr;

  FUSEPORT_INLINED int64_t row_bytes() const { return groups * group / 8 * bits; }
  FUSEPORT_INLINED int64_t zero_bytes() const { return (groups * bits + 7) / 8; }
  FUSEPORT_INLINED int zero_point(int64_t row, int64_t of) const {
    const int64_t at = of * bits;
    return zero_points[row * zero_bytes() + (at >> 3)] >> (at & 7) & ((1 << bits) - 1);
  }
};

using Kernels = stored::Kernels<Problem>;

FUSEPORT_CHOOSE_KERNELS()

}  // namespace fuseport::matmul_nbits
