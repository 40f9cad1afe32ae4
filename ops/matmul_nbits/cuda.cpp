// The layer on CUDA: the same schemas as in torch.cpp, another dispatch key. Products of more than a
// few rows are torch's own.
#include "matmul_nbits/cuda.hpp"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "matmul_nbits/checks.hpp"
#include "matmul_nbits/torch.hpp"
#include "native/stored_cuda_torch.hpp"

namespace fuseport::matmul_nbits {
namespace {

const stored::CudaKernels<Problem> layer{
    [](const Problem& p, const Forward&) { return p.rows <= cuda::FEW; },
    [](const Problem&, const Backward&) { return false; },
    cuda::forward_scratch,
    cuda::forward,
    cuda::backward_scratch,
    cuda::backward,
    cuda::decode,
};

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& scales,
              const Tensor& zero_points, const Tensor& bias, int64_t in_features, int64_t bits,
              int64_t group_size) {
  const char* op = "matmul_nbits";
  Check(op, "x", x).inputs(packed, scales, zero_points, bias, in_features, bits, group_size);
  const OnDevice device(x);
  const Inputs inputs(x, packed, scales, zero_points, in_features, bits, group_size);
  return stored::linear(layer, op, device, inputs.problem, inputs.first, x, bias);
}

std::tuple<Tensor, Tensor> linear_backward(const Tensor& dout, const Tensor& packed,
                                           const Tensor& scales, const Tensor& zero_points,
                                           int64_t in_features, int64_t bits,
                                           int64_t group_size) {
  const char* op = "matmul_nbits_backward";
  Check(op, "dout", dout)
      .cotangent(packed, scales, zero_points, in_features, bits, group_size);
  const OnDevice device(dout);
  const Inputs inputs(dout, packed, scales, zero_points, in_features, bits, group_size);
  return stored::linear_backward(layer, op, device, inputs.problem, inputs.first, dout);
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("matmul_nbits", linear);
  m.impl("matmul_nbits_backward", linear_backward);
}

}  // namespace
}  // namespace fuseport::matmul_nbits
