// The layer on CUDA: the same schemas as in torch.cpp, another dispatch key. Products of more than a
// few rows are torch's own.
#include "nf4_linear/cuda.hpp"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "native/stored_cuda_torch.hpp"
#include "nf4_linear/checks.hpp"
#include "nf4_linear/torch.hpp"

namespace fuseport::nf4_linear {
namespace {

const stored::CudaKernels<Problem> layer{
    [](const Problem& p, const Forward& f) {
      return p.rows <= cuda::FEW || cuda::decodes_once(p, f);
    },
    [](const Problem& p, const Backward& b) { return cuda::decodes_once(p, b); },
    cuda::forward_scratch,
    cuda::forward,
    cuda::backward_scratch,
    cuda::backward,
    cuda::decode,
};

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& absmax, const Tensor& bias,
              int64_t in_features, int64_t block_size, int64_t quant_type) {
  const char* op = "nf4_linear";
  Check(op, "x", x).inputs(packed, absmax, bias, in_features, block_size, quant_type);
  const OnDevice device(x);
  const Inputs inputs(x, packed, absmax, in_features, bias.size(0), block_size, quant_type);
  return stored::linear(layer, op, device, inputs.problem, inputs.first, x, bias);
}

std::tuple<Tensor, Tensor> linear_backward(const Tensor& dout, const Tensor& packed,
                                           const Tensor& absmax, int64_t in_features,
                                           int64_t block_size, int64_t quant_type) {
  const char* op = "nf4_linear_backward";
  Check(op, "dout", dout).cotangent(packed, absmax, in_features, block_size, quant_type);
  const OnDevice device(dout);
  const Inputs inputs(dout, packed, absmax, in_features, dout.size(-1), block_size, quant_type);
  return stored::linear_backward(layer, op, device, inputs.problem, inputs.first, dout);
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("nf4_linear", linear);
  m.impl("nf4_linear_backward", linear_backward);
}

}  // namespace
}  // namespace fuseport::nf4_linear
