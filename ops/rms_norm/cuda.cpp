// The operators of the norm on CUDA: the same schemas as in torch.cpp, another dispatch key. Schemas
// and autograd are that file's; so are inputs and outputs, to the strides.
#include <torch/library.h>

#include "rms_norm/cuda_torch.hpp"

namespace fuseport::rms_norm {
namespace {

std::tuple<Tensor, Tensor> norm(const Tensor& x, const Tensor& weight, double eps,
                                int64_t group_size) {
  return forward_cuda(cuda::kernels(), "rms_norm", x, {}, weight, eps, group_size, true);
}

std::tuple<Tensor, Tensor> norm_backward(const Tensor& dout, const Tensor& x, const Tensor& weight,
                                         const Tensor& rstd, double eps, int64_t group_size) {
  auto [dx, dz, dweight] = backward_cuda(cuda::kernels(), "rms_norm_backward", dout, x, {}, weight,
                                         rstd, eps, group_size, true);
  return {dx, dweight};
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("rms_norm", norm);
  m.impl("rms_norm_backward", norm_backward);
}

}  // namespace
}  // namespace fuseport::rms_norm
