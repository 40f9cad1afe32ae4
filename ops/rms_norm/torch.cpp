// The norm for torch: schemas, CPU kernels, autograd.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "rms_norm/kernel.hpp"
#include "rms_norm/torch.hpp"

namespace fuseport::rms_norm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

// Autograd sees operators only, by their names, so that traces hold them whole and fakes stand in
// for them.
struct NormFunction : torch::autograd::Function<NormFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               double eps, int64_t group_size) {
    static const auto op = operator_named<decltype(norm)>("fuseport::rms_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [out, rstd] = op.call(x, weight, eps, group_size);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["group_size"] = group_size;
    ctx->save_for_backward({x, weight, rstd});
    ctx->mark_non_differentiable({rstd});
    return {out, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op = operator_named<decltype(norm_backward)>("fuseport::rms_norm_backward");
    const variable_list s = ctx->get_saved_variables();
    auto [dx, dweight] = op.call(cotangents[0], s[0], s[1], s[2], ctx->saved_data["eps"].toDouble(),
                                 ctx->saved_data["group_size"].toInt());
    return {dx, dweight, Tensor(), Tensor()};
  }
};

Outputs norm_autograd(const Tensor& x, const Tensor& weight, double eps, int64_t group_size) {
  auto y = NormFunction::apply(x, weight, eps, group_size);
  return {y[0], y[1]};
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
  m.impl("rms_norm", norm_autograd);
  // Gradients of gradients: it runs as it is, and refuses when it is differentiated.
  m.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::rms_norm
