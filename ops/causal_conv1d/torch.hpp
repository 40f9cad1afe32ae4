// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "causal_conv1d/checks.hpp"
#include "causal_conv1d/kernel.hpp"
#include "native/empty.hpp"
#include "native/torch.hpp"

namespace fuseport::causal_conv1d {

using Outputs = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using PackedGradients = std::tuple<Tensor, Tensor, Tensor>;

inline Sequence sequence(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline MutableSequence mutable_sequence(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

// Inputs that passed the checks. It holds tensors, since some are made contiguous.
struct Inputs {
  Tensor weight, bias, seq_idx;
  Problem problem;

  Inputs(const Tensor& x, const Tensor& weight_, const Tensor& bias_,
         const std::optional<Tensor>& initial_states, const std::optional<Tensor>& seq_idx_,
         bool silu)
      : weight(weight_.contiguous()), bias(bias_.contiguous()) {
    Problem& p = problem;
    p.dtype = dtype_of(x);
    p.wide_weight = weight.scalar_type() != x.scalar_type();
    p.silu = silu;
    p.time_last = x.stride(2) == 1 || x.stride(1) != 1;  // as empty_as has it
    p.batches = x.size(0);
    p.channels = x.size(1);
    p.length = x.size(2);
    p.width = weight.size(1);
    p.x = sequence(x);
    p.weight = weight.const_data_ptr();
    p.bias = bias.const_data_ptr();
    if (initial_states) p.initial = sequence(*initial_states);
    if (seq_idx_) {
      seq_idx = seq_idx_->contiguous();
      p.packed = true;
      p.seq_idx = seq_idx.const_data_ptr<int32_t>();
    }
  }

  Tensor states(const Tensor& x) const {
    return empty_tensor({problem.batches, problem.channels, problem.width - 1}, x.options());
  }
};

}  // namespace fuseport::causal_conv1d
