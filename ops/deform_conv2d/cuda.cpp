// Deformable convolution on CUDA: the same schemas as in torch.cpp, another dispatch key.
#include "deform_conv2d/cuda.hpp"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "deform_conv2d/torch.hpp"
#include "native/cuda_torch.hpp"

namespace fuseport::deform_conv2d {
namespace {

Tensor empty_on_device(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

struct Cuda {
  static Tensor forward(const char* op, const Tensor& input, const Tensor& offset,
                        const Tensor& mask, const Tensor& weight, const Tensor& bias,
                        const Options& options) {
    const Look look(op, input);
    const OnDevice device(input);
    const Inputs inputs(look, input, offset, mask, weight, bias, options);
    const Problem& p = inputs.problem;
    const Tensor out = at::empty(inputs.out_sizes(), input.options());
    const Tensor scratch = device_scratch(cuda::forward_scratch(p), input);
    check_cuda(op, cuda::forward(p, {out.mutable_data_ptr()}, scratch.mutable_data_ptr(),
                                 device.stream()));
    return out;
  }

  static Gradients backward(const char* op, const Tensor& dout, const Tensor& input,
                            const Tensor& offset, const Tensor& mask, const Tensor& weight,
                            const Tensor& bias, const Options& options) {
    const Look look(op, input);
    const OnDevice device(input);
    const Inputs inputs(look, input, offset, mask, weight, bias, options);
    const Problem& p = inputs.problem;
    check_cotangent(look, dout, p);
    const int64_t at_once = cuda::batches_at_once(p);
    look.require(at_once > 0, "offset", "of fewer samples and pixels of a batch entry",
                 p.offset_groups * p.taps() * p.places());
    const Tensor given = dout.contiguous();
    const Gradients gradients = gradients_like(inputs, empty_on_device);
    int64_t bytes = 0;
    check_cuda(op, cuda::backward_scratch(p, at_once, &bytes));
    const Tensor scratch = device_scratch(bytes, input);
    check_cuda(op, cuda::backward(p, backward_of(given, gradients), at_once,
                                  scratch.mutable_data_ptr(), device.stream()));
    return gradients;
  }
};

using OnCuda = Operators<Cuda>;

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("deform_conv2d", OnCuda::plain);
  m.impl("deform_conv2d_modulated", OnCuda::modulated);
  m.impl("deform_conv2d_backward", OnCuda::plain_backward);
  m.impl("deform_conv2d_modulated_backward", OnCuda::modulated_backward);
}

}  // namespace
}  // namespace fuseport::deform_conv2d
