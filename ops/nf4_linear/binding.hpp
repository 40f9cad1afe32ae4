// What the bindings of the kernels to torch and to ONNX Runtime do alike, over raw pointers.
#pragma once

#include "nf4_linear/kernel.hpp"

namespace fuseport::nf4_linear {

inline int shift_of(int64_t block_size) {
  int shift = 0;
  while (block_size >> shift > 1) ++shift;
  return shift;
}

}  // namespace fuseport::nf4_linear
