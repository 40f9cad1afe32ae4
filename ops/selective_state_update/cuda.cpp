// The operators of the state update on CUDA: the same schemas as in torch.cpp, another dispatch key.
// Schemas and autograd are that file's; so are inputs and outputs, to the strides.
#include <torch/library.h>

#include <optional>

#include "native/cuda_torch.hpp"
#include "selective_state_update/cuda.hpp"
#include "selective_state_update/torch.hpp"

namespace fuseport::selective_state_update {
namespace {

Outputs update_cuda(const char* op, const Tensor& state, const Tensor& x, const Tensor& dt,
                    const Tensor& A, const Tensor& B, const Tensor& C, const Tensor& D,
                    const std::optional<Tensor>& z, const Tensor& dt_bias, bool softplus) {
  const auto start = [&](const char* name, const Problem& p) {
    const OnDevice device(x);
    check_cuda(name, cuda::update(p, device.stream()));
  };
  return update_with(start, op, state, x, dt, A, B, C, D, z, dt_bias, softplus);
}

Outputs update(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A,
               const Tensor& B, const Tensor& C, const Tensor& D, const Tensor& dt_bias,
               bool softplus) {
  return update_cuda("selective_state_update", state, x, dt, A, B, C, D, {}, dt_bias, softplus);
}

Outputs update_gated(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A,
                     const Tensor& B, const Tensor& C, const Tensor& D, const Tensor& z,
                     const Tensor& dt_bias, bool softplus) {
  return update_cuda("selective_state_update_gated", state, x, dt, A, B, C, D, z, dt_bias,
                    softplus);
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("selective_state_update", update);
  m.impl("selective_state_update_gated", update_gated);
}

}  // namespace
}  // namespace fuseport::selective_state_update
