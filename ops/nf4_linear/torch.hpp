// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include "native/stored_torch.hpp"
#include "nf4_linear/binding.hpp"

namespace fuseport::nf4_linear {

using at::Tensor;

// Inputs that passed the checks. It holds tensors, since some are copied.
struct Inputs {
  Problem problem;
  stored::FirstInput first;
  Tensor packed, absmax;

  Inputs(const Tensor& first_, const Tensor& packed_, const Tensor& absmax_, int64_t in_features,
         int64_t out_features, int64_t block_size, int64_t quant_type)
      : first(first_, in_features, out_features, problem),
        packed(packed_.contiguous()),
        absmax(absmax_.contiguous()) {
    problem.block_shift = shift_of(block_size);
    problem.quant_type = static_cast<int>(quant_type);
    problem.packed = packed.const_data_ptr<uint8_t>();
    problem.absmax = absmax.const_data_ptr();
  }
};

}  // namespace fuseport::nf4_linear
