// The layer for torch: schemas, CPU kernels, autograd. No Python in here, so that a C++ program can
// open the library and run artifacts that use the operators.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "native/autograd.hpp"
#include "nf4_linear/checks.hpp"
#include "nf4_linear/torch.hpp"

namespace fuseport::nf4_linear {
namespace {

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& absmax, const Tensor& bias,
              int64_t in_features, int64_t block_size, int64_t quant_type) {
  Check("nf4_linear", "x", x).inputs(packed, absmax, bias, in_features, block_size, quant_type);
  const Inputs inputs(x, packed, absmax, in_features, bias.size(0), block_size, quant_type);
  return stored::linear(kernels(), inputs.problem, inputs.first.rows, x, bias);
}

std::tuple<Tensor, Tensor> linear_backward(const Tensor& dout, const Tensor& packed,
                                           const Tensor& absmax, int64_t in_features,
                                           int64_t block_size, int64_t quant_type) {
  const char* op = "nf4_linear_backward";
  Check(op, "dout", dout).cotangent(packed, absmax, in_features, block_size, quant_type);
  const Inputs inputs(dout, packed, absmax, in_features, dout.size(-1), block_size, quant_type);
  return stored::linear_backward(kernels(), inputs.problem, inputs.first.rows, dout);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "nf4_linear(Tensor x, Tensor packed, Tensor absmax, Tensor bias, int in_features, "
      "int block_size, int quant_type=1) -> Tensor out");
  m.def(
      "nf4_linear_backward(Tensor dout, Tensor packed, Tensor absmax, int in_features, "
      "int block_size, int quant_type=1) -> (Tensor dx, Tensor dbias)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("nf4_linear", linear);
  m.impl("nf4_linear_backward", linear_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "nf4_linear", "nf4_linear_backward");
}

}  // namespace
}  // namespace fuseport::nf4_linear
