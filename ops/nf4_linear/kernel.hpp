// What the kernels of the layer take and give, over raw pointers: the interface between kernel.cpp,
// compiled once per instruction set, and its bindings.
#pragma once

#include "native/stored_weight.hpp"

namespace fuseport::nf4_linear {

using stored::Backward;
using stored::Forward;
using stored::Rows;

struct Problem : stored::Sizes {
  int block_shift = 6;              // a block is 2^block_shift values
  int quant_type = 1;               // which of the codes of code.hpp
  const uint8_t* packed = nullptr;  // contiguous, as absmax is
  const void* absmax = nullptr;     // of the type of computation
};

using Kernels = stored::Kernels<Problem>;

FUSEPORT_CHOOSE_KERNELS()

}  // namespace fuseport::nf4_linear
