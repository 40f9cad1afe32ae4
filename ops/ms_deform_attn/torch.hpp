// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "ms_deform_attn/kernel.hpp"
#include "native/torch.hpp"

namespace fuseport::ms_deform_attn {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// Inputs that passed the checks. It holds tensors, since some are made contiguous.
struct Inputs {
  Tensor value, shapes, starts, locations, weights;
  Problem problem;

  Inputs(const Tensor& value_, const Tensor& shapes_, const Tensor& starts_,
         const Tensor& locations_, const Tensor& weights_)
      : value(value_.contiguous()),
        shapes(shapes_.contiguous()),
        starts(starts_.contiguous()),
        locations(locations_.contiguous()),
        weights(weights_.contiguous()) {
    Problem& p = problem;
    p.dtype = dtype_of(value);
    p.wide_points = locations.scalar_type() != value.scalar_type();
    p.batches = value.size(0);
    p.positions = value.size(1);
    p.heads = value.size(2);
    p.channels = value.size(3);
    p.queries = locations.size(1);
    p.levels = locations.size(3);
    p.points = locations.size(4);
    p.value = value.const_data_ptr();
    p.shapes = shapes.const_data_ptr<int64_t>();
    p.starts = starts.const_data_ptr<int64_t>();
    p.locations = locations.const_data_ptr();
    p.weights = weights.const_data_ptr();
  }
};

}  // namespace fuseport::ms_deform_attn
