// The causal convolution as operators of torch: schemas, CPU kernels, gradients. No Python in here,
// so that a C++ program can open the library and run artifacts that use the operators.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "causal_conv1d/binding.hpp"
#include "causal_conv1d/torch.hpp"
#include "native/autograd.hpp"
#include "native/empty.hpp"
#include "native/layout.hpp"

namespace fuseport::causal_conv1d {
namespace {

Outputs forward_cpu(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const std::optional<Tensor>& initial_states,
                    const std::optional<Tensor>& seq_idx, bool silu) {
  Check{op, x}.inputs(weight, bias, initial_states, seq_idx);
  const Inputs inputs(x, weight, bias, initial_states, seq_idx, silu);
  const Problem& p = inputs.problem;
  Tensor out = empty_as(x), final_states = inputs.states(x);
  const Forward forward{mutable_sequence(out), final_states.mutable_data_ptr()};
  const Kernels& k = kernels();
  for_each_unit(Host{}, p,
                [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
  return {out, final_states};
}

// (dx, dweight, dbias, dinitial_states); the last is undefined where there are none.
Gradients backward_cpu(const char* op, const Tensor& dout, const Tensor& dfinal_states,
                       const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const std::optional<Tensor>& initial_states,
                       const std::optional<Tensor>& seq_idx, bool silu) {
  const Check check{op, x};
  check.inputs(weight, bias, initial_states, seq_idx);
  check.cotangents(dout, dfinal_states, weight);
  const Inputs inputs(x, weight, bias, initial_states, seq_idx, silu);
  const Problem& p = inputs.problem;
  Tensor dx = empty_as(x), dinitial = initial_states ? inputs.states(x) : Tensor();
  Tensor dweight = empty_tensor(weight.sizes(), weight.options());
  Tensor dbias = empty_tensor(bias.sizes(), bias.options());
  const at::TensorOptions wide = x.options().dtype(at::kDouble);
  const Tensor weight_parts = empty_tensor({p.batches, p.channels, p.width}, wide);
  const Tensor bias_parts = empty_tensor({p.batches, p.channels}, wide);

  Backward backward;
  backward.dout = sequence(dout);
  backward.dfinal = sequence(dfinal_states);
  backward.dx = mutable_sequence(dx);
  if (initial_states) backward.dinitial = dinitial.mutable_data_ptr();
  backward.weight_parts = weight_parts.mutable_data_ptr<double>();
  backward.bias_parts = bias_parts.mutable_data_ptr<double>();
  backward.dweight = dweight.mutable_data_ptr();
  backward.dbias = dbias.mutable_data_ptr();
  const Kernels& k = kernels();
  for_each_unit(Host{}, p,
                [&](int64_t unit, void* scratch) { k.backward(p, backward, unit, scratch); });
  k.finish(p, backward);
  return {dx, dweight, dbias, dinitial};
}

// The four operators, on the CPU.

Outputs conv(const Tensor& x, const Tensor& weight, const Tensor& bias,
             const Tensor& initial_states, bool silu) {
  return forward_cpu("causal_conv1d", x, weight, bias, initial_states, {}, silu);
}

Outputs conv_packed(const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& seq_idx, bool silu) {
  return forward_cpu("causal_conv1d_packed", x, weight, bias, {}, seq_idx, silu);
}

Gradients conv_backward(const Tensor& dout, const Tensor& dfinal_states, const Tensor& x,
                        const Tensor& weight, const Tensor& bias, const Tensor& initial_states,
                        bool silu) {
  return backward_cpu("causal_conv1d_backward", dout, dfinal_states, x, weight, bias,
                      initial_states, {}, silu);
}

PackedGradients conv_packed_backward(const Tensor& dout, const Tensor& dfinal_states,
                                     const Tensor& x, const Tensor& weight, const Tensor& bias,
                                     const Tensor& seq_idx, bool silu) {
  auto [dx, dweight, dbias, none] = backward_cpu(
      "causal_conv1d_packed_backward", dout, dfinal_states, x, weight, bias, {}, seq_idx, silu);
  return {dx, dweight, dbias};
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor bias, Tensor initial_states, bool silu) "
      "-> (Tensor out, Tensor final_states)");
  m.def(
      "causal_conv1d_packed(Tensor x, Tensor weight, Tensor bias, Tensor seq_idx, bool silu) "
      "-> (Tensor out, Tensor final_states)");
  m.def(
      "causal_conv1d_backward(Tensor dout, Tensor dfinal_states, Tensor x, Tensor weight, "
      "Tensor bias, Tensor initial_states, bool silu) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_states)");
  m.def(
      "causal_conv1d_packed_backward(Tensor dout, Tensor dfinal_states, Tensor x, Tensor weight, "
      "Tensor bias, Tensor seq_idx, bool silu) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("causal_conv1d", conv);
  m.impl("causal_conv1d_packed", conv_packed);
  m.impl("causal_conv1d_backward", conv_backward);
  m.impl("causal_conv1d_packed_backward", conv_packed_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "causal_conv1d", "causal_conv1d_backward");
  differentiated_by(m, "causal_conv1d_packed", "causal_conv1d_packed_backward");
}

}  // namespace
}  // namespace fuseport::causal_conv1d
