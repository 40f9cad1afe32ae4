// How kernels are told where the numbers of a sequence of heads lie, and of what type they compute.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport {

// Bytes of what is computed in: double for float64, else float.
FUSEPORT_INLINED constexpr int64_t real_bytes(Dtype dtype) {
  return dtype == Dtype::float64 ? 8 : 4;
}

// (b, l, heads, columns) or (b, l, heads); strides in elements, any value.
struct Strided {
  const void* data = nullptr;
  int64_t batch = 0, step = 0, head = 0, column = 0;
};

}  // namespace fuseport
