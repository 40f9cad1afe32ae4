// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "native/torch.hpp"
#include "selective_scan/binding.hpp"
#include "selective_scan/checks.hpp"
#include "selective_scan/kernel.hpp"

namespace fuseport::selective_scan {

using Outputs = std::tuple<Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using GatedGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline Sequence sequence(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline MutableSequence mutable_sequence(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline Coefficient coefficient(const Tensor& t, int64_t channels) {
  const void* data = t.const_data_ptr();
  if (t.dim() == 2) return {data, false, 1, 0, t.stride(0), t.stride(1), 0};
  if (t.dim() == 3) return {data, true, channels, t.stride(0), 0, t.stride(1), t.stride(2)};
  return {data,        true,        channels / t.size(1), t.stride(0),
          t.stride(1), t.stride(2), t.stride(3)};
}

inline int64_t groups(const Tensor& coefficient) {
  return coefficient.dim() == 4 ? coefficient.size(1) : 1;
}

// Inputs that passed the checks. It holds tensors, since some are made contiguous.
struct Inputs {
  Tensor A, D, delta_bias;
  Problem problem;

  Inputs(const Tensor& u, const Tensor& delta, const Tensor& A_, const Tensor& B, const Tensor& C,
         const Tensor& D_, const std::optional<Tensor>& z, const Tensor& bias, bool softplus)
      : A(A_.contiguous()), D(D_.contiguous()), delta_bias(bias.contiguous()) {
    Problem& p = problem;
    p.dtype = dtype_of(u);
    p.complex = A.is_complex();
    p.batches = u.size(0);
    p.channels = u.size(1);
    p.length = u.size(2);
    p.states = A.size(1);
    p.span = span_of(p.channels, groups(B), groups(C));
    p.softplus = softplus;
    p.u = sequence(u);
    p.delta = sequence(delta);
    if (z) p.z = sequence(*z);
    p.A = A.const_data_ptr();
    p.D = D.const_data_ptr();
    p.delta_bias = delta_bias.const_data_ptr();
    p.B = coefficient(B, p.channels);
    p.C = coefficient(C, p.channels);
  }
};

}  // namespace fuseport::selective_scan
