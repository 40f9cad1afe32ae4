// The operators of the causal convolution on CUDA: the same schemas as in torch.cpp, another dispatch
// key. Schemas and autograd are that file's; so are inputs and outputs, to the strides.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "causal_conv1d/cuda.hpp"
#include "causal_conv1d/torch.hpp"
#include "native/cuda_torch.hpp"
#include "native/layout.hpp"

namespace fuseport::causal_conv1d {
namespace {

Outputs forward_cuda(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias,
                     const std::optional<Tensor>& initial_states,
                     const std::optional<Tensor>& seq_idx, bool silu) {
  Check{op, x}.inputs(weight, bias, initial_states, seq_idx);
  const OnDevice device(x);
  const Inputs inputs(x, weight, bias, initial_states, seq_idx, silu);
  Tensor out = empty_as(x), final_states = inputs.states(x);
  const Forward forward{mutable_sequence(out), final_states.mutable_data_ptr()};
  const cuda::Plan plan = cuda::forward_plan(inputs.problem, forward);
  check_cuda(op, cuda::forward(inputs.problem, plan, forward, device.stream()));
  return {out, final_states};
}

// (dx, dweight, dbias, dinitial_states); the last is undefined where there are none.
Gradients backward_cuda(const char* op, const Tensor& dout, const Tensor& dfinal_states,
                        const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const std::optional<Tensor>& initial_states,
                        const std::optional<Tensor>& seq_idx, bool silu) {
  const Check check{op, x};
  check.inputs(weight, bias, initial_states, seq_idx);
  check.cotangents(dout, dfinal_states, weight);
  const OnDevice device(x);
  const Inputs inputs(x, weight, bias, initial_states, seq_idx, silu);
  const Problem& p = inputs.problem;
  Tensor dx = empty_as(x), dinitial = initial_states ? inputs.states(x) : Tensor();
  Tensor dweight = at::empty(weight.sizes(), weight.options());
  Tensor dbias = at::empty(bias.sizes(), bias.options());
  cuda::Gradients k;
  k.dout = sequence(dout);
  k.dfinal = sequence(dfinal_states);
  k.dx = mutable_sequence(dx);
  if (initial_states) k.dinitial = dinitial.mutable_data_ptr();
  k.dweight = dweight.mutable_data_ptr();
  k.dbias = dbias.mutable_data_ptr();
  const cuda::Plan plan = cuda::backward_plan(p, k);
  const Tensor scratch = device_scratch(cuda::backward_scratch(p, plan), x);
  check_cuda(op, cuda::backward(p, plan, k, scratch.mutable_data_ptr(), device.stream()));
  return {dx, dweight, dbias, dinitial};
}

Outputs conv(const Tensor& x, const Tensor& weight, const Tensor& bias,
             const Tensor& initial_states, bool silu) {
  return forward_cuda("causal_conv1d", x, weight, bias, initial_states, {}, silu);
}

Outputs conv_packed(const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& seq_idx, bool silu) {
  return forward_cuda("causal_conv1d_packed", x, weight, bias, {}, seq_idx, silu);
}

Gradients conv_backward(const Tensor& dout, const Tensor& dfinal_states, const Tensor& x,
                        const Tensor& weight, const Tensor& bias, const Tensor& initial_states,
                        bool silu) {
  return backward_cuda("causal_conv1d_backward", dout, dfinal_states, x, weight, bias,
                       initial_states, {}, silu);
}

PackedGradients conv_packed_backward(const Tensor& dout, const Tensor& dfinal_states,
                                     const Tensor& x, const Tensor& weight, const Tensor& bias,
                                     const Tensor& seq_idx, bool silu) {
  auto [dx, dweight, dbias, none] = backward_cuda(
      "causal_conv1d_packed_backward", dout, dfinal_states, x, weight, bias, {}, seq_idx, silu);
  return {dx, dweight, dbias};
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("causal_conv1d", conv);
  m.impl("causal_conv1d_packed", conv_packed);
  m.impl("causal_conv1d_backward", conv_backward);
  m.impl("causal_conv1d_packed_backward", conv_packed_backward);
}

}  // namespace
}  // namespace fuseport::causal_conv1d
