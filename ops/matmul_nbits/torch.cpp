// The layer for torch: schemas, CPU kernels, autograd. No Python in here, so that a C++ program can
// open the library and run artifacts that use the operators.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "matmul_nbits/checks.hpp"
#include "matmul_nbits/torch.hpp"
#include "native/autograd.hpp"

namespace fuseport::matmul_nbits {
namespace {

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& scales,
              const Tensor& zero_points, const Tensor& bias, int64_t in_features, int64_t bits,
              int64_t group_size) {
  Check("matmul_nbits", "x", x)
      .inputs(packed, scales, zero_points, bias, in_features, bits, group_size);
  const Inputs inputs(x, packed, scales, zero_points, in_features, bits, group_size);
  return stored::linear(kernels(), inputs.problem, inputs.first.rows, x, bias);
}

std::tuple<Tensor, Tensor> linear_backward(const Tensor& dout, const Tensor& packed,
                                           const Tensor& scales, const Tensor& zero_points,
                                           int64_t in_features, int64_t bits,
                                           int64_t group_size) {
  Check("matmul_nbits_backward", "dout", dout)
      .cotangent(packed, scales, zero_points, in_features, bits, group_size);
  const Inputs inputs(dout, packed, scales, zero_points, in_features, bits, group_size);
  return stored::linear_backward(kernels(), inputs.problem, inputs.first.rows, dout);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "matmul_nbits(Tensor x, Tensor packed, Tensor scales, Tensor zero_points, Tensor bias, "
      "int in_features, int bits, int group_size) -> Tensor out");
  m.def(
      "matmul_nbits_backward(Tensor dout, Tensor packed, Tensor scales, Tensor zero_points, "
      "int in_features, int bits, int group_size) -> (Tensor dx, Tensor dbias)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("matmul_nbits", linear);
  m.impl("matmul_nbits_backward", linear_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "matmul_nbits", "matmul_nbits_backward");
}

}  // namespace
}  // namespace fuseport::matmul_nbits
