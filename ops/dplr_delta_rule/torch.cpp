// The rule as operators of torch: schemas, CPU kernels, gradients. No Python in here, so that a C++
// program can open the library and run artifacts that use the operators.
#include "dplr_delta_rule/torch.hpp"

#include <torch/library.h>

#include "native/autograd.hpp"

namespace fuseport::dplr_delta_rule {
namespace {

Outputs rule(FUSEPORT_INPUTS) {
  const auto start = [](const char*, const Problem& p, const Forward& to) {
    run_forward(Host{}, p, to);
  };
  return forward_with(start, q, k, v, a, b, log_decay, initial_state, scale);
}

Gradients rule_backward(const Tensor& dout, const Tensor& dfinal_state, FUSEPORT_INPUTS) {
  const auto start = [](const char*, const Problem& p, const Backward& to) {
    run_backward(Host{}, p, to);
  };
  return backward_with(start, dout, dfinal_state, q, k, v, a, b, log_decay, initial_state, scale);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "dplr_delta_rule(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor log_decay, "
      "Tensor initial_state, float scale) -> (Tensor out, Tensor final_state)");
  m.def(
      "dplr_delta_rule_backward(Tensor dout, Tensor dfinal_state, Tensor q, Tensor k, Tensor v, "
      "Tensor a, Tensor b, Tensor log_decay, Tensor initial_state, float scale) -> (Tensor dq, "
      "Tensor dk, Tensor dv, Tensor da, Tensor db, Tensor dlog_decay, Tensor dinitial_state)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("dplr_delta_rule", rule);
  m.impl("dplr_delta_rule_backward", rule_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "dplr_delta_rule", "dplr_delta_rule_backward");
}

}  // namespace
}  // namespace fuseport::dplr_delta_rule
