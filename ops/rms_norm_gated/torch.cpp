// The gated norm for torch: schemas, CPU kernels, autograd.
#include <torch/library.h>

#include "native/autograd.hpp"
#include "rms_norm/torch.hpp"
#include "rms_norm_gated/kernel.hpp"

namespace fuseport::rms_norm_gated {
namespace {

using at::Tensor;

using Outputs = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Outputs norm(const Tensor& x, const Tensor& z, const Tensor& weight, double eps,
             int64_t group_size, bool norm_before_gate) {
  return rms_norm::forward_cpu(kernels(), "rms_norm_gated", x, z, weight, eps, group_size,
                               norm_before_gate);
}

Gradients norm_backward(const Tensor& dout, const Tensor& x, const Tensor& z,
                        const Tensor& weight, const Tensor& rstd, double eps, int64_t group_size,
                        bool norm_before_gate) {
  return rms_norm::backward_cpu(kernels(), "rms_norm_gated_backward", dout, x, z, weight, rstd,
                                eps, group_size, norm_before_gate);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "rms_norm_gated(Tensor x, Tensor z, Tensor weight, float eps, int group_size, "
      "bool norm_before_gate) -> (Tensor out, Tensor rstd)");
  m.def(
      "rms_norm_gated_backward(Tensor dout, Tensor x, Tensor z, Tensor weight, Tensor rstd, "
      "float eps, int group_size, bool norm_before_gate) "
      "-> (Tensor dx, Tensor dz, Tensor dweight)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("rms_norm_gated", norm);
  m.impl("rms_norm_gated_backward", norm_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "rms_norm_gated", "rms_norm_gated_backward");
}

}  // namespace
}  // namespace fuseport::rms_norm_gated
