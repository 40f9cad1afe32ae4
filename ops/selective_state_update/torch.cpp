// The state update as operators of torch: schemas, CPU kernels. No Python in here, so that a C++
// program can open the library and run artifacts that use the operators.
#include <torch/library.h>

#include <optional>

#include "native/autograd.hpp"
#include "selective_state_update/torch.hpp"

namespace fuseport::selective_state_update {
namespace {

Outputs update_cpu(const char* op, const Tensor& state, const Tensor& x, const Tensor& dt,
                   const Tensor& A, const Tensor& B, const Tensor& C, const Tensor& D,
                   const std::optional<Tensor>& z, const Tensor& dt_bias, bool softplus) {
  const auto start = [](const char*, const Problem& p) { run(Host{}, p); };
  return update_with(start, op, state, x, dt, A, B, C, D, z, dt_bias, softplus);
}

Outputs update(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A,
               const Tensor& B, const Tensor& C, const Tensor& D, const Tensor& dt_bias,
               bool softplus) {
  return update_cpu("selective_state_update", state, x, dt, A, B, C, D, {}, dt_bias, softplus);
}

Outputs update_gated(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A,
                     const Tensor& B, const Tensor& C, const Tensor& D, const Tensor& z,
                     const Tensor& dt_bias, bool softplus) {
  return update_cpu("selective_state_update_gated", state, x, dt, A, B, C, D, z, dt_bias,
                    softplus);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "selective_state_update(Tensor state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
      "Tensor D, Tensor dt_bias, bool dt_softplus) -> (Tensor out, Tensor new_state)");
  m.def(
      "selective_state_update_gated(Tensor state, Tensor x, Tensor dt, Tensor A, Tensor B, "
      "Tensor C, Tensor D, Tensor z, Tensor dt_bias, bool dt_softplus) "
      "-> (Tensor out, Tensor new_state)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("selective_state_update", update);
  m.impl("selective_state_update_gated", update_gated);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  undifferentiated(m, "selective_state_update");
  undifferentiated(m, "selective_state_update_gated");
}

}  // namespace
}  // namespace fuseport::selective_state_update
