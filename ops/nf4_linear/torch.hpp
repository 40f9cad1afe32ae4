// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "native/empty.hpp"
#include "native/torch.hpp"
#include "nf4_linear/binding.hpp"
#include "nf4_linear/kernel.hpp"

namespace fuseport::nf4_linear {

using at::Tensor;

// Inputs that passed the checks. It holds tensors, since some are copied.
struct Inputs {
  Tensor packed, absmax, flat;
  Problem problem;
  Rows rows;

  Inputs(const Tensor& first, const Tensor& packed_, const Tensor& absmax_, int64_t in_features,
         int64_t out_features, int64_t block_size, int64_t quant_type)
      : packed(packed_.contiguous()), absmax(absmax_.contiguous()) {
    Problem& p = problem;
    p.dtype = dtype_of(first);
    p.rows = 1;
    for (int64_t i = 0; i < first.dim() - 1; ++i) p.rows *= first.size(i);
    p.in = in_features;
    p.out = out_features;
    p.block_shift = shift_of(block_size);
    p.quant_type = static_cast<int>(quant_type);
    p.packed = packed.const_data_ptr<uint8_t>();
    p.absmax = absmax.const_data_ptr();
    flat = first.reshape({p.rows, first.size(-1)});
    rows = {flat.const_data_ptr(), flat.stride(0), flat.stride(1)};
  }
};

// Of `t`'s leading sizes, and so many columns.
inline Tensor empty_rows(const Tensor& t, int64_t columns) {
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes.back() = columns;
  return empty_tensor(sizes, t.options());
}

}  // namespace fuseport::nf4_linear
