// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include "matmul_nbits/kernel.hpp"
#include "native/stored_torch.hpp"

namespace fuseport::matmul_nbits {

using at::Tensor;

// Inputs that passed the checks. It holds tensors, since some are copied.
struct Inputs {
  Problem problem;
  stored::FirstInput first;
  Tensor packed, scales, zero_points;

  Inputs(const Tensor& first_, const Tensor& packed_, const Tensor& scales_,
         const Tensor& zero_points_, int64_t in_features, int64_t bits, int64_t group_size)
      : first(first_, in_features, scales_.size(0), problem),
        packed(packed_.contiguous()),
        scales(scales_.contiguous()),
        zero_points(zero_points_.contiguous()) {
    problem.bits = static_cast<int>(bits);
    problem.group = group_size;
    problem.groups = scales.size(1);
    problem.packed = packed.const_data_ptr<uint8_t>();
    problem.scales = scales.const_data_ptr();
    problem.zero_points = zero_points.const_data_ptr<uint8_t>();
  }
};

}  // namespace fuseport::matmul_nbits
