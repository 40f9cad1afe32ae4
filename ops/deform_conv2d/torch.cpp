// Deformable convolution as operators of torch: schemas, CPU kernels, gradients. No Python in here, so
// that a C++ program can open the library and run artifacts that use the operators.
#include "deform_conv2d/torch.hpp"

#include <torch/library.h>

#include <optional>
#include <vector>

#include "native/autograd.hpp"
#include "native/empty.hpp"

namespace fuseport::deform_conv2d {
namespace {

struct Cpu {
  static Tensor forward(const char* op, const Tensor& input, const Tensor& offset,
                        const Tensor& mask, const Tensor& weight, const Tensor& bias,
                        const Options& options) {
    const Inputs inputs({op, input}, input, offset, mask, weight, bias, options);
    const Tensor out = empty_tensor(inputs.out_sizes(), input.options());
    run(Host{}, inputs.problem, Forward{out.mutable_data_ptr()});
    return out;
  }

  static Gradients backward(const char* op, const Tensor& dout, const Tensor& input,
                            const Tensor& offset, const Tensor& mask, const Tensor& weight,
                            const Tensor& bias, const Options& options) {
    const Look look(op, input);
    const Inputs inputs(look, input, offset, mask, weight, bias, options);
    check_cotangent(look, dout, inputs.problem);
    const Tensor given = dout.contiguous();
    const Gradients gradients = gradients_like(inputs, empty_tensor);
    run(Host{}, inputs.problem, backward_of(given, gradients));
    return gradients;
  }
};

using OnCpu = Operators<Cpu>;

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor bias, int stride_h, "
      "int stride_w, int padding_h, int padding_w, int dilation_h, int dilation_w) -> Tensor out");
  m.def(
      "deform_conv2d_modulated(Tensor input, Tensor offset, Tensor mask, Tensor weight, "
      "Tensor bias, int stride_h, int stride_w, int padding_h, int padding_w, int dilation_h, "
      "int dilation_w) -> Tensor out");
  m.def(
      "deform_conv2d_backward(Tensor dout, Tensor input, Tensor offset, Tensor weight, "
      "Tensor bias, int stride_h, int stride_w, int padding_h, int padding_w, int dilation_h, "
      "int dilation_w) -> (Tensor dinput, Tensor doffset, Tensor dweight, Tensor dbias)");
  m.def(
      "deform_conv2d_modulated_backward(Tensor dout, Tensor input, Tensor offset, Tensor mask, "
      "Tensor weight, Tensor bias, int stride_h, int stride_w, int padding_h, int padding_w, "
      "int dilation_h, int dilation_w) "
      "-> (Tensor dinput, Tensor doffset, Tensor dmask, Tensor dweight, Tensor dbias)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("deform_conv2d", OnCpu::plain);
  m.impl("deform_conv2d_modulated", OnCpu::modulated);
  m.impl("deform_conv2d_backward", OnCpu::plain_backward);
  m.impl("deform_conv2d_modulated_backward", OnCpu::modulated_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "deform_conv2d", "deform_conv2d_backward");
  differentiated_by(m, "deform_conv2d_modulated", "deform_conv2d_modulated_backward");
}

}  // namespace
}  // namespace fuseport::deform_conv2d
