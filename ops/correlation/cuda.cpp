// Correlation on CUDA: the same schemas as in torch.cpp, another dispatch key.
#include "correlation/cuda.hpp"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "correlation/torch.hpp"
#include "native/cuda_torch.hpp"

namespace fuseport::correlation {
namespace {

struct Cuda {
  static Tensor forward(const Look& look, const Inputs& inputs) {
    const Tensor& like = inputs.input1;
    const OnDevice device(like);
    const Problem& p = inputs.problem;
    const Tensor out = at::empty(out_sizes(p), like.options());
    const Tensor scratch = device_scratch(cuda::scratch(p), like);
    check_cuda(look.op, cuda::forward(p, {out.mutable_data_ptr()}, scratch.mutable_data_ptr(),
                                      device.stream()));
    return out;
  }

  static Gradients backward(const Look& look, const Inputs& inputs, const Tensor& dout) {
    const Tensor& like = inputs.input1;
    const OnDevice device(like);
    const Problem& p = inputs.problem;
    const Tensor dinput1 = at::empty(like.sizes(), like.options());
    const Tensor dinput2 = at::empty(like.sizes(), like.options());
    const Tensor scratch = device_scratch(cuda::scratch(p), like);
    const Backward b{dout.const_data_ptr(), dinput1.mutable_data_ptr(),
                     dinput2.mutable_data_ptr()};
    check_cuda(look.op, cuda::backward(p, b, scratch.mutable_data_ptr(), device.stream()));
    return {dinput1, dinput2};
  }
};

using OnCuda = Operators<Cuda>;

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("correlation", OnCuda::forward);
  m.impl("correlation_backward", OnCuda::backward);
}

}  // namespace
}  // namespace fuseport::correlation
