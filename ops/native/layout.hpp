// Strides of outputs as a function of the strides of an input: the same as ops/layout.py.
#pragma once

#include <ATen/core/Tensor.h>

#include "native/empty.hpp"

namespace fuseport {

// An uninitialised tensor of t's shape (b, d, l) and dtype: a transposed (b, l, d) buffer where t is
// laid out like one, else contiguous.
inline at::Tensor empty_as(const at::Tensor& t) {
  const int64_t b = t.size(0), d = t.size(1), l = t.size(2);
  if (t.stride(2) != 1 && t.stride(1) == 1) {
    return empty_tensor({b, l, d}, t.options()).transpose(1, 2);
  }
  return empty_tensor({b, d, l}, t.options());
}

}  // namespace fuseport
