// Inputs of torch as the kernel's problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "causal_conv1d_update/kernel.hpp"
#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/torch.hpp"

namespace fuseport::causal_conv1d_update {

// The checks of shapes.py, in their order, with their messages.
inline void check_inputs(const Check& check, const Tensor& conv_state,
                         const std::optional<Tensor>& cache_seqlens, const Tensor& weight,
                         const Tensor& bias) {
  const Tensor& x = check.first;
  check.require(x.dim() == 3, "x", "(b, d, l)", tuple(x.sizes()));
  const at::ScalarType dtype = x.scalar_type();
  check.require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                    dtype == at::kDouble,
                "x", "float16, bfloat16, float32 or float64", name_of(dtype));
  const int64_t b = x.size(0), d = x.size(1);
  const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  check.like("weight", weight, weight.scalar_type() == wide ? wide : dtype);
  check.require(weight.dim() == 2, "weight", "(d, W)", tuple(weight.sizes()));
  const int64_t width = weight.size(1);
  check.require(width >= 1, "weight", "of width 1 or more", width);
  check.shape("weight", weight, "(d, W)", {d, width});
  check.like("bias", bias, weight.scalar_type());
  check.shape("bias", bias, "(d,)", {d});
  check.like("conv_state", conv_state, dtype);
  check.require(conv_state.dim() == 3, "conv_state", "(b, d, S)", tuple(conv_state.sizes()));
  const int64_t slots = conv_state.size(2);
  check.shape("conv_state", conv_state, "(b, d, S)", {b, d, slots});
  const int64_t least = cache_seqlens && width == 1 ? 1 : width - 1;
  check.require(slots >= least, "conv_state", "of " + std::to_string(least) + " slots or more",
                slots);
  if (cache_seqlens) {
    check.like("cache_seqlens", *cache_seqlens, at::kInt);
    check.shape("cache_seqlens", *cache_seqlens, "(b,)", {b});
  }
}

inline Sequence sequence(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

using Outputs = std::tuple<Tensor, Tensor>;

// Checks inputs, and calls start(op, problem).
template <class Start>
Outputs update_with(const Start& start, const char* op, const Tensor& x, const Tensor& conv_state,
                    const std::optional<Tensor>& cache_seqlens, const Tensor& weight,
                    const Tensor& bias, bool silu) {
  check_inputs({op, "x", x}, conv_state, cache_seqlens, weight, bias);
  const Tensor weights = weight.contiguous(), biases = bias.contiguous();
  const Tensor seqlens = cache_seqlens ? cache_seqlens->contiguous() : Tensor();
  Tensor out = empty_tensor(x.sizes(), x.options());
  Tensor new_state = empty_tensor(conv_state.sizes(), x.options());
  Problem p;
  p.dtype = dtype_of(x);
  p.wide_weight = weight.scalar_type() != x.scalar_type();
  p.silu = silu;
  p.batches = x.size(0);
  p.channels = x.size(1);
  p.length = x.size(2);
  p.slots = conv_state.size(2);
  p.width = weight.size(1);
  p.x = sequence(x);
  p.state = sequence(conv_state);
  if (cache_seqlens) {
    p.circular = true;
    p.seqlens = seqlens.const_data_ptr<int32_t>();
  }
  p.weight = weights.const_data_ptr();
  p.bias = biases.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.new_state = new_state.mutable_data_ptr();
  start(op, p);
  return {out, new_state};
}

}  // namespace fuseport::causal_conv1d_update
