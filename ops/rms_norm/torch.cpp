// The norm for torch: schemas, CPU kernels, autograd.
#include <torch/library.h>

#include "native/autograd.hpp"
#include "rms_norm/kernel.hpp"
#include "rms_norm/torch.hpp"

namespace fuseport::rms_norm {
namespace {

using Outputs = std::tuple<Tensor, Tensor>;

Outputs norm(const Tensor& x, const Tensor& weight, double eps, int64_t group_size) {
  return forward_cpu(kernels(), "rms_norm", x, {}, weight, eps, group_size, true);
}

Outputs norm_backward(const Tensor& dout, const Tensor& x, const Tensor& weight,
                      const Tensor& rstd, double eps, int64_t group_size) {
  auto [dx, dz, dweight] = backward_cpu(kernels(), "rms_norm_backward", dout, x, {}, weight, rstd,
                                        eps, group_size, true);
  return {dx, dweight};
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "rms_norm(Tensor x, Tensor weight, float eps, int group_size) "
      "-> (Tensor out, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor dout, Tensor x, Tensor weight, Tensor rstd, float eps, "
      "int group_size) -> (Tensor dx, Tensor dweight)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("rms_norm", norm);
  m.impl("rms_norm_backward", norm_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "rms_norm", "rms_norm_backward");
}

}  // namespace
}  // namespace fuseport::rms_norm
