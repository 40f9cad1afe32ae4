// The gated norm for torch: schemas, CPU kernels, autograd.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "rms_norm/torch.hpp"
#include "rms_norm_gated/kernel.hpp"

namespace fuseport::rms_norm_gated {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

// Autograd sees operators only, by their names, so that traces hold them whole and fakes stand in
// for them.
struct NormFunction : torch::autograd::Function<NormFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& z,
                               const Tensor& weight, double eps, int64_t group_size,
                               bool norm_before_gate) {
    static const auto op = operator_named<decltype(norm)>("fuseport::rms_norm_gated");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [out, rstd] = op.call(x, z, weight, eps, group_size, norm_before_gate);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["norm_before_gate"] = norm_before_gate;
    ctx->save_for_backward({x, z, weight, rstd});
    ctx->mark_non_differentiable({rstd});
    return {out, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op =
        operator_named<decltype(norm_backward)>("fuseport::rms_norm_gated_backward");
    const variable_list s = ctx->get_saved_variables();
    auto [dx, dz, dweight] =
        op.call(cotangents[0], s[0], s[1], s[2], s[3], ctx->saved_data["eps"].toDouble(),
                ctx->saved_data["group_size"].toInt(),
                ctx->saved_data["norm_before_gate"].toBool());
    return {dx, dz, dweight, Tensor(), Tensor(), Tensor()};
  }
};

Outputs norm_autograd(const Tensor& x, const Tensor& z, const Tensor& weight, double eps,
                      int64_t group_size, bool norm_before_gate) {
  auto y = NormFunction::apply(x, z, weight, eps, group_size, norm_before_gate);
  return {y[0], y[1]};
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
  m.impl("rms_norm_gated", norm_autograd);
  // Gradients of gradients: it runs as it is, and refuses when it is differentiated.
  m.impl("rms_norm_gated_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::rms_norm_gated
