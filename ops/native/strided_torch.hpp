// A tensor of torch as a sequence of heads.
#pragma once

#include <ATen/core/Tensor.h>

#include "native/strided.hpp"

namespace fuseport {

inline Strided strided(const at::Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2),
          t.dim() == 4 ? t.stride(3) : 0};
}

}  // namespace fuseport
