// The operators of the selective scan on CUDA: the same schemas as in torch.cpp, another dispatch key.
// Schemas and autograd are that file's; so are inputs and outputs, to the strides.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <optional>

#include "native/cuda_torch.hpp"
#include "native/layout.hpp"
#include "selective_scan/cuda.hpp"
#include "selective_scan/torch.hpp"

namespace fuseport::selective_scan {
namespace {

Outputs forward_cuda(const char* op, const Tensor& u, const Tensor& delta, const Tensor& A,
                     const Tensor& B, const Tensor& C, const Tensor& D,
                     const std::optional<Tensor>& z, const Tensor& bias, bool softplus) {
  Check{op, u}.inputs(delta, A, B, C, D, z, bias);
  const OnDevice device(u);
  const Inputs inputs(u, delta, A, B, C, D, z, bias, softplus);
  const Problem& p = inputs.problem;
  Tensor out = empty_as(u);
  Tensor last_state = at::empty({p.batches, p.channels, p.states}, A.options());
  Tensor chunk_states = at::empty({p.batches, p.saved(), p.states, p.channels}, A.options());
  const Forward forward{mutable_sequence(out), last_state.mutable_data_ptr(),
                        chunk_states.mutable_data_ptr()};
  const cuda::Plan plan = cuda::forward_plan(p);
  const Tensor scratch = device_scratch(cuda::forward_scratch(p, plan), u);
  check_cuda(op, cuda::forward(p, plan, forward, scratch.mutable_data_ptr(), device.stream()));
  return {out, last_state, chunk_states};
}

// (du, ddelta, dA, dB, dC, dD, dz, ddelta_bias); dz is undefined where there is no z.
std::array<Tensor, 8> backward_cuda(const char* op, const Tensor& dout, const Tensor& dlast_state,
                                    const Tensor& u, const Tensor& delta, const Tensor& A,
                                    const Tensor& B, const Tensor& C, const Tensor& D,
                                    const std::optional<Tensor>& z, const Tensor& bias,
                                    const Tensor& chunk_states, bool softplus) {
  const Check check{op, u};
  check.inputs(delta, A, B, C, D, z, bias);
  check.backward(dout, dlast_state, A, chunk_states);
  const OnDevice device(u);
  const Inputs inputs(u, delta, A, B, C, D, z, bias, softplus);
  const Problem& p = inputs.problem;
  const Tensor last = dlast_state.contiguous(), saved = chunk_states.contiguous();
  const auto flat = [&](const Tensor& like) {
    // No kernel writes the gradient of a coefficient that no channel has.
    return p.channels ? at::empty(like.sizes(), like.options())
                      : at::zeros(like.sizes(), like.options());
  };
  Tensor du = empty_as(u), ddelta = empty_as(delta), dz = z ? empty_as(*z) : Tensor();
  Tensor dA = flat(A), dB = flat(B), dC = flat(C), dD = flat(D), dbias = flat(bias);
  cuda::Gradients k;
  k.dout = sequence(dout);
  k.dlast_state = last.const_data_ptr();
  k.chunk_states = saved.const_data_ptr();
  k.du = mutable_sequence(du);
  k.ddelta = mutable_sequence(ddelta);
  if (z) k.dz = mutable_sequence(dz);
  k.dA = dA.mutable_data_ptr();
  k.dB = dB.mutable_data_ptr();
  k.dC = dC.mutable_data_ptr();
  k.dD = dD.mutable_data_ptr();
  k.ddelta_bias = dbias.mutable_data_ptr();
  const cuda::Plan plan = cuda::backward_plan(p);
  const Tensor scratch = device_scratch(cuda::backward_scratch(p, plan), u);
  check_cuda(op, cuda::backward(p, plan, k, scratch.mutable_data_ptr(), device.stream()));
  return {du, ddelta, dA, dB, dC, dD, dz, dbias};
}

Outputs scan(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
             const Tensor& C, const Tensor& D, const Tensor& delta_bias, bool softplus) {
  return forward_cuda("selective_scan", u, delta, A, B, C, D, {}, delta_bias, softplus);
}

Outputs scan_gated(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                   const Tensor& C, const Tensor& D, const Tensor& z, const Tensor& delta_bias,
                   bool softplus) {
  return forward_cuda("selective_scan_gated", u, delta, A, B, C, D, z, delta_bias, softplus);
}

Gradients scan_backward(const Tensor& dout, const Tensor& dlast_state, const Tensor& u,
                        const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                        const Tensor& D, const Tensor& delta_bias, const Tensor& chunk_states,
                        bool softplus) {
  auto g = backward_cuda("selective_scan_backward", dout, dlast_state, u, delta, A, B, C, D, {},
                         delta_bias, chunk_states, softplus);
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[7]};
}

GatedGradients scan_gated_backward(const Tensor& dout, const Tensor& dlast_state, const Tensor& u,
                                   const Tensor& delta, const Tensor& A, const Tensor& B,
                                   const Tensor& C, const Tensor& D, const Tensor& z,
                                   const Tensor& delta_bias, const Tensor& chunk_states,
                                   bool softplus) {
  auto g = backward_cuda("selective_scan_gated_backward", dout, dlast_state, u, delta, A, B, C, D,
                         z, delta_bias, chunk_states, softplus);
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7]};
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("selective_scan", scan);
  m.impl("selective_scan_gated", scan_gated);
  m.impl("selective_scan_backward", scan_backward);
  m.impl("selective_scan_gated_backward", scan_gated_backward);
}

}  // namespace
}  // namespace fuseport::selective_scan
