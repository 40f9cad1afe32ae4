// The chunked scan as operators of torch: schemas, CPU kernels, gradients. No Python in here, so
// that a C++ program can open the library and run artifacts that use the operators.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "native/autograd.hpp"
#include "ssd_chunk_scan/binding.hpp"
#include "ssd_chunk_scan/discrete.hpp"
#include "ssd_chunk_scan/kernel.hpp"

namespace fuseport::ssd_chunk_scan {
namespace {

Outputs forward_cpu(const char* op, const Tensor& x, const Tensor& dt, const Tensor& A,
                    const Tensor& B, const Tensor& C, const Tensor& D,
                    const std::optional<Tensor>& z, const Tensor& dt_bias,
                    const Tensor& initial_states, const Tensor& seq_idx, const Tensor& dt_limit,
                    bool softplus) {
  Check{op, x}.inputs(dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit);
  Tensor out = flat(x), final_states = flat(initial_states);
  if (x.numel() == 0) {
    final_states.copy_(initial_states);  // of no steps
    return {out, final_states};
  }
  const Inputs inputs(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit, softplus);
  run_forward(Host{}, inputs.problem,
              Forward{out.mutable_data_ptr(), final_states.mutable_data_ptr()});
  return {out, final_states};
}

// Of x, dt, A, B, C, D, z, dt_bias, initial_states; z's is undefined where there is none.
std::array<Tensor, 9> backward_cpu(const char* op, const Tensor& dout, const Tensor& dfinal,
                                   const Tensor& x, const Tensor& dt, const Tensor& A,
                                   const Tensor& B, const Tensor& C, const Tensor& D,
                                   const std::optional<Tensor>& z, const Tensor& dt_bias,
                                   const Tensor& initial_states, const Tensor& seq_idx,
                                   const Tensor& dt_limit, bool softplus) {
  const Check check{op, x};
  check.inputs(dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit);
  check.backward(dout, dfinal, B);
  std::array<Tensor, 9> g{flat(x), flat(dt), flat(A),
                          flat(B), flat(C),  flat(D),
                          z ? flat(*z) : Tensor(), flat(dt_bias), flat(initial_states)};
  if (x.numel() == 0) {
    for (Tensor& t : g)
      if (t.defined()) t.zero_();
    g[8].copy_(dfinal);
    return g;
  }
  const Inputs inputs(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit, softplus);
  const Tensor dfinal_states = dfinal.contiguous();
  Backward backward;
  backward.dout = strided(dout);
  backward.dfinal_states = dfinal_states.const_data_ptr();
  backward.dx = g[0].mutable_data_ptr();
  backward.ddt = g[1].mutable_data_ptr();
  if (z) backward.dz = g[6].mutable_data_ptr();
  backward.dinitial_states = g[8].mutable_data_ptr();
  const Totals totals{g[2].mutable_data_ptr(), g[3].mutable_data_ptr(), g[4].mutable_data_ptr(),
                      g[5].mutable_data_ptr(), g[7].mutable_data_ptr()};
  run_backward(Host{}, inputs.problem, backward, totals);
  return g;
}

// The operators, on the CPU.

Outputs discrete(FUSEPORT_DISCRETE) {
  const auto run = [](const Problem& p, const Forward& to) { run_forward(Host{}, p, to); };
  return discrete_forward(run, x, log_decay, B, C, D, initial_states, seq_idx);
}

DiscreteGradients discrete_gradients(const Tensor& dout, const Tensor& dfinal, FUSEPORT_DISCRETE) {
  const auto run = [](const Problem& p, const Backward& to, const Totals& totals) {
    run_backward(Host{}, p, to, totals);
  };
  return discrete_backward(run, dout, dfinal, x, log_decay, B, C, D, initial_states, seq_idx);
}

Outputs scan(FUSEPORT_INPUTS, FUSEPORT_REST) {
  return forward_cpu("ssd_chunk_scan", x, dt, A, B, C, D, {}, dt_bias, initial_states, seq_idx,
                     dt_limit, softplus);
}

Outputs scan_gated(FUSEPORT_INPUTS, const Tensor& z, FUSEPORT_REST) {
  return forward_cpu("ssd_chunk_scan_gated", x, dt, A, B, C, D, z, dt_bias, initial_states,
                     seq_idx, dt_limit, softplus);
}

Gradients scan_backward(const Tensor& dout, const Tensor& dfinal, FUSEPORT_INPUTS, FUSEPORT_REST) {
  auto g = backward_cpu("ssd_chunk_scan_backward", dout, dfinal, x, dt, A, B, C, D, {}, dt_bias,
                        initial_states, seq_idx, dt_limit, softplus);
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[7], g[8]};
}

GatedGradients scan_gated_backward(const Tensor& dout, const Tensor& dfinal, FUSEPORT_INPUTS,
                                   const Tensor& z, FUSEPORT_REST) {
  auto g = backward_cpu("ssd_chunk_scan_gated_backward", dout, dfinal, x, dt, A, B, C, D, z,
                        dt_bias, initial_states, seq_idx, dt_limit, softplus);
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8]};
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "ssd_chunk_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, "
      "Tensor dt_bias, Tensor initial_states, Tensor seq_idx, Tensor dt_limit, bool dt_softplus) "
      "-> (Tensor out, Tensor final_states)");
  m.def(
      "ssd_chunk_scan_gated(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, "
      "Tensor dt_bias, Tensor initial_states, Tensor seq_idx, Tensor dt_limit, bool dt_softplus) "
      "-> (Tensor out, Tensor final_states)");
  m.def(
      "ssd_chunk_scan_backward(Tensor dout, Tensor dfinal_states, Tensor x, Tensor dt, Tensor A, "
      "Tensor B, Tensor C, Tensor D, Tensor dt_bias, Tensor initial_states, Tensor seq_idx, "
      "Tensor dt_limit, bool dt_softplus) -> (Tensor dx, Tensor ddt, Tensor dA, Tensor dB, "
      "Tensor dC, Tensor dD, Tensor ddt_bias, Tensor dinitial_states)");
  m.def(
      "ssd_chunk_scan_gated_backward(Tensor dout, Tensor dfinal_states, Tensor x, Tensor dt, "
      "Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, Tensor dt_bias, Tensor initial_states, "
      "Tensor seq_idx, Tensor dt_limit, bool dt_softplus) -> (Tensor dx, Tensor ddt, Tensor dA, "
      "Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddt_bias, Tensor dinitial_states)");
  m.def(
      "ssd_chunk_scan_discrete(Tensor x, Tensor log_decay, Tensor B, Tensor C, Tensor D, "
      "Tensor initial_states, Tensor seq_idx) -> (Tensor out, Tensor final_states)");
  m.def(
      "ssd_chunk_scan_discrete_backward(Tensor dout, Tensor dfinal_states, Tensor x, "
      "Tensor log_decay, Tensor B, Tensor C, Tensor D, Tensor initial_states, Tensor seq_idx) -> "
      "(Tensor dx, Tensor dlog_decay, Tensor dB, Tensor dC, Tensor dD, Tensor dinitial_states)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("ssd_chunk_scan", scan);
  m.impl("ssd_chunk_scan_gated", scan_gated);
  m.impl("ssd_chunk_scan_backward", scan_backward);
  m.impl("ssd_chunk_scan_gated_backward", scan_gated_backward);
  m.impl("ssd_chunk_scan_discrete", discrete);
  m.impl("ssd_chunk_scan_discrete_backward", discrete_gradients);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "ssd_chunk_scan", "ssd_chunk_scan_backward");
  differentiated_by(m, "ssd_chunk_scan_gated", "ssd_chunk_scan_gated_backward");
  differentiated_by(m, "ssd_chunk_scan_discrete", "ssd_chunk_scan_discrete_backward");
}

}  // namespace
}  // namespace fuseport::ssd_chunk_scan
