// The operators of the gated norm on CUDA: the same schemas as in torch.cpp, another dispatch key.
// Schemas and autograd are that file's; so are inputs and outputs, to the strides.
#include <torch/library.h>

#include "rms_norm/cuda_torch.hpp"
#include "rms_norm_gated/cuda.hpp"

namespace fuseport::rms_norm_gated {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> norm(const Tensor& x, const Tensor& z, const Tensor& weight, double eps,
                                int64_t group_size, bool norm_before_gate) {
  return rms_norm::forward_cuda(cuda::kernels(), "rms_norm_gated", x, z, weight, eps, group_size,
                                norm_before_gate);
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& dout, const Tensor& x,
                                                 const Tensor& z, const Tensor& weight,
                                                 const Tensor& rstd, double eps,
                                                 int64_t group_size, bool norm_before_gate) {
  return rms_norm::backward_cuda(cuda::kernels(), "rms_norm_gated_backward", dout, x, z, weight,
                                 rstd, eps, group_size, norm_before_gate);
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("rms_norm_gated", norm);
  m.impl("rms_norm_gated_backward", norm_backward);
}

}  // namespace
}  // namespace fuseport::rms_norm_gated
