// The selective scan as operators of torch: schemas, CPU kernels, gradients. No Python in here, so
// that a C++ program can open the library and run artifacts that use the operators.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "native/autograd.hpp"
#include "native/empty.hpp"
#include "native/layout.hpp"
#include "native/torch.hpp"
#include "selective_scan/binding.hpp"
#include "selective_scan/checks.hpp"
#include "selective_scan/kernel.hpp"
#include "selective_scan/torch.hpp"

namespace fuseport::selective_scan {
namespace {

// The sum over batches of doubles, or pairs of them, in the shape and dtype of `like`.
Tensor over_batches(const Tensor& parts, const Tensor& like) {
  const Tensor total = empty_tensor(like.sizes(), like.options());
  const double* from = static_cast<const double*>(parts.const_data_ptr());
  const int64_t batches = parts.size(0), count = total.numel() * (like.is_complex() ? 2 : 1);
  if (c10::toRealValueType(like.scalar_type()) == at::kDouble) {
    sum_batches(from, batches, count, static_cast<double*>(total.mutable_data_ptr()));
  } else {
    sum_batches(from, batches, count, static_cast<float*>(total.mutable_data_ptr()));
  }
  return total;
}

Outputs forward_cpu(const char* op, const Tensor& u, const Tensor& delta, const Tensor& A,
                    const Tensor& B, const Tensor& C, const Tensor& D,
                    const std::optional<Tensor>& z, const Tensor& bias, bool softplus) {
  Check{op, u}.inputs(delta, A, B, C, D, z, bias);
  const Inputs inputs(u, delta, A, B, C, D, z, bias, softplus);
  const Problem& p = inputs.problem;
  Tensor out = empty_as(u);
  Tensor last_state = empty_tensor({p.batches, p.channels, p.states}, A.options());
  Tensor chunk_states = empty_tensor({p.batches, p.saved(), p.states, p.channels}, A.options());
  const Forward forward{mutable_sequence(out), last_state.mutable_data_ptr(),
                        chunk_states.mutable_data_ptr()};
  const Kernels& k = kernels();
  for_each_unit(Host{}, p, k.forward_scratch(p),
                [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
  return {out, last_state, chunk_states};
}

// Where the units' parts of dB or dC go, and what becomes of them.
struct CoefficientGradient {
  Tensor parts, like;

  CoefficientGradient(const Problem& p, const Coefficient& k, const Tensor& coefficient,
                      at::TensorOptions wide)
      : like(coefficient) {
    const at::TensorOptions real = wide.dtype(p.dtype == Dtype::float64 ? at::kDouble : at::kFloat);
    parts = k.varies ? empty_tensor({p.batches, p.blocks(), p.states, p.row()}, real)
                     : empty_tensor({p.batches, p.channels, p.states}, wide);
  }

  Tensor total(const Problem& p) const {
    if (like.dim() == 2) return parts.sum(0).to(like.scalar_type());
    Tensor result = empty_tensor(like.sizes(), like.options());
    const SumUnits sum{parts.const_data_ptr(), result.mutable_data_ptr(), groups(like)};
    const int64_t units = sum.units(p);
    parallel(units, threads_for(units, parts.numel()),
             [&](int64_t unit, int64_t) { kernels().sum_units(p, sum, unit); });
    return result;
  }
};

// (du, ddelta, dA, dB, dC, dD, dz, ddelta_bias); dz is undefined where there is no z.
std::array<Tensor, 8> backward_cpu(const char* op, const Tensor& dout, const Tensor& dlast_state,
                                   const Tensor& u, const Tensor& delta, const Tensor& A,
                                   const Tensor& B, const Tensor& C, const Tensor& D,
                                   const std::optional<Tensor>& z, const Tensor& bias,
                                   const Tensor& chunk_states, bool softplus) {
  const Check check{op, u};
  check.inputs(delta, A, B, C, D, z, bias);
  check.backward(dout, dlast_state, A, chunk_states);
  const Inputs inputs(u, delta, A, B, C, D, z, bias, softplus);
  const Problem& p = inputs.problem;
  const Tensor last = dlast_state.contiguous(), saved = chunk_states.contiguous();
  const at::TensorOptions wide = D.options().dtype(at::kDouble);
  const at::TensorOptions wide_A = A.options().dtype(p.complex ? at::kComplexDouble : at::kDouble);
  Tensor du = empty_as(u), ddelta = empty_as(delta), dz = z ? empty_as(*z) : Tensor();
  Tensor dA = empty_tensor({p.batches, p.channels, p.states}, wide_A);
  Tensor dD = empty_tensor({p.batches, p.channels}, wide);
  Tensor dbias = empty_tensor({p.batches, p.channels}, wide);
  const CoefficientGradient dB(p, p.B, B, wide_A), dC(p, p.C, C, wide_A);

  Backward backward;
  backward.dout = sequence(dout);
  backward.dlast_state = last.const_data_ptr();
  backward.chunk_states = saved.const_data_ptr();
  backward.du = mutable_sequence(du);
  backward.ddelta = mutable_sequence(ddelta);
  if (z) backward.dz = mutable_sequence(dz);
  backward.dA = static_cast<double*>(dA.mutable_data_ptr());
  backward.dD = dD.mutable_data_ptr<double>();
  backward.ddelta_bias = dbias.mutable_data_ptr<double>();
  backward.dB = dB.parts.mutable_data_ptr();
  backward.dC = dC.parts.mutable_data_ptr();
  const Kernels& k = kernels();
  for_each_unit(Host{}, p, k.backward_scratch(p),
                [&](int64_t unit, void* scratch) { k.backward(p, backward, unit, scratch); });

  return {du, ddelta, over_batches(dA, A), dB.total(p), dC.total(p), over_batches(dD, D), dz,
          over_batches(dbias, D)};
}

// The four operators, on the CPU.

Outputs scan(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
             const Tensor& C, const Tensor& D, const Tensor& delta_bias, bool softplus) {
  return forward_cpu("selective_scan", u, delta, A, B, C, D, {}, delta_bias, softplus);
}

Outputs scan_gated(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                   const Tensor& C, const Tensor& D, const Tensor& z, const Tensor& delta_bias,
                   bool softplus) {
  return forward_cpu("selective_scan_gated", u, delta, A, B, C, D, z, delta_bias, softplus);
}

Gradients scan_backward(const Tensor& dout, const Tensor& dlast_state, const Tensor& u,
                        const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                        const Tensor& D, const Tensor& delta_bias, const Tensor& chunk_states,
                        bool softplus) {
  auto g = backward_cpu("selective_scan_backward", dout, dlast_state, u, delta, A, B, C, D, {},
                        delta_bias, chunk_states, softplus);
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[7]};
}

GatedGradients scan_gated_backward(const Tensor& dout, const Tensor& dlast_state, const Tensor& u,
                                   const Tensor& delta, const Tensor& A, const Tensor& B,
                                   const Tensor& C, const Tensor& D, const Tensor& z,
                                   const Tensor& delta_bias, const Tensor& chunk_states,
                                   bool softplus) {
  auto g = backward_cpu("selective_scan_gated_backward", dout, dlast_state, u, delta, A, B, C, D,
                        z, delta_bias, chunk_states, softplus);
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7]};
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor D, "
      "Tensor delta_bias, bool delta_softplus) "
      "-> (Tensor out, Tensor last_state, Tensor chunk_states)");
  m.def(
      "selective_scan_gated(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor D, "
      "Tensor z, Tensor delta_bias, bool delta_softplus) "
      "-> (Tensor out, Tensor last_state, Tensor chunk_states)");
  m.def(
      "selective_scan_backward(Tensor dout, Tensor dlast_state, Tensor u, Tensor delta, Tensor A, "
      "Tensor B, Tensor C, Tensor D, Tensor delta_bias, Tensor chunk_states, bool delta_softplus) "
      "-> (Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, "
      "Tensor ddelta_bias)");
  m.def(
      "selective_scan_gated_backward(Tensor dout, Tensor dlast_state, Tensor u, Tensor delta, "
      "Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, Tensor delta_bias, Tensor chunk_states, "
      "bool delta_softplus) "
      "-> (Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, "
      "Tensor ddelta_bias)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("selective_scan", scan);
  m.impl("selective_scan_gated", scan_gated);
  m.impl("selective_scan_backward", scan_backward);
  m.impl("selective_scan_gated_backward", scan_gated_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "selective_scan", "selective_scan_backward");
  differentiated_by(m, "selective_scan_gated", "selective_scan_gated_backward");
}

}  // namespace
}  // namespace fuseport::selective_scan
