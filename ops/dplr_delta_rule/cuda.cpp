// The operators of the rule on CUDA: the same schemas as in torch.cpp, another dispatch key. Schemas and
// autograd are that file's; so are inputs and outputs, to the strides.
#include <torch/library.h>

#include "dplr_delta_rule/cuda.hpp"
#include "dplr_delta_rule/torch.hpp"
#include "native/cuda_torch.hpp"

namespace fuseport::dplr_delta_rule {
namespace {

Outputs rule(FUSEPORT_INPUTS) {
  const auto start = [&](const char* op, const Problem& p, const Forward& to) {
    const OnDevice device(q);
    check_cuda(op, cuda::forward(p, to, device.stream()));
  };
  return forward_with(start, q, k, v, a, b, log_decay, initial_state, scale);
}

Gradients rule_backward(const Tensor& dout, const Tensor& dfinal_state, FUSEPORT_INPUTS) {
  const auto start = [&](const char* op, const Problem& p, const Backward& to) {
    const OnDevice device(q);
    const Tensor scratch = device_scratch(cuda::backward_scratch(p), q);
    check_cuda(op, cuda::backward(p, to, scratch.mutable_data_ptr(), device.stream()));
  };
  return backward_with(start, dout, dfinal_state, q, k, v, a, b, log_decay, initial_state, scale);
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("dplr_delta_rule", rule);
  m.impl("dplr_delta_rule_backward", rule_backward);
}

}  // namespace
}  // namespace fuseport::dplr_delta_rule
