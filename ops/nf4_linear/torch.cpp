// The layer for torch: schemas, CPU kernels, autograd. No Python in here, so that a C++ program can
// open the library and run artifacts that use the operators.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "native/empty.hpp"
#include "nf4_linear/binding.hpp"
#include "nf4_linear/checks.hpp"
#include "nf4_linear/torch.hpp"

namespace fuseport::nf4_linear {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& absmax, const Tensor& bias,
              int64_t in_features, int64_t block_size) {
  Check("nf4_linear", "x", x).inputs(packed, absmax, bias, in_features, block_size);
  const Inputs inputs(x, packed, absmax, in_features, bias.size(0), block_size);
  const Tensor addend = bias.contiguous();
  Tensor out = empty_rows(x, bias.size(0));
  run_forward(Host{}, inputs.problem,
              {inputs.rows, addend.const_data_ptr(), out.mutable_data_ptr()});
  return out;
}

std::tuple<Tensor, Tensor> linear_backward(const Tensor& dout, const Tensor& packed,
                                           const Tensor& absmax, int64_t in_features,
                                           int64_t block_size) {
  Check("nf4_linear_backward", "dout", dout).cotangent(packed, absmax, in_features, block_size);
  const Inputs inputs(dout, packed, absmax, in_features, dout.size(-1), block_size);
  Tensor dx = empty_rows(dout, in_features), dbias = empty_tensor({dout.size(-1)}, dout.options());
  run_backward(Host{}, inputs.problem,
               {inputs.rows, dx.mutable_data_ptr(), dbias.mutable_data_ptr()});
  return {dx, dbias};
}

// Autograd sees operators only, by their names, so that traces hold them whole and fakes stand in
// for them.
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& packed,
                        const Tensor& absmax, const Tensor& bias, int64_t in_features,
                        int64_t block_size) {
    static const auto op = operator_named<decltype(linear)>("fuseport::nf4_linear");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["in_features"] = in_features;
    ctx->saved_data["block_size"] = block_size;
    ctx->save_for_backward({packed, absmax});
    return op.call(x, packed, absmax, bias, in_features, block_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op =
        operator_named<decltype(linear_backward)>("fuseport::nf4_linear_backward");
    const variable_list s = ctx->get_saved_variables();
    auto [dx, dbias] = op.call(cotangents[0], s[0], s[1], ctx->saved_data["in_features"].toInt(),
                               ctx->saved_data["block_size"].toInt());
    return {dx, Tensor(), Tensor(), dbias, Tensor(), Tensor()};
  }
};

Tensor linear_autograd(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                       const Tensor& bias, int64_t in_features, int64_t block_size) {
  return LinearFunction::apply(x, packed, absmax, bias, in_features, block_size);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "nf4_linear(Tensor x, Tensor packed, Tensor absmax, Tensor bias, int in_features, "
      "int block_size) -> Tensor out");
  m.def(
      "nf4_linear_backward(Tensor dout, Tensor packed, Tensor absmax, int in_features, "
      "int block_size) -> (Tensor dx, Tensor dbias)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("nf4_linear", linear);
  m.impl("nf4_linear_backward", linear_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  m.impl("nf4_linear", linear_autograd);
  // Gradients of gradients: it runs as it is, and refuses when it is differentiated.
  m.impl("nf4_linear_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::nf4_linear
