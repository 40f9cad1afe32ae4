// Correlation as operators of torch: schemas, CPU kernels, gradients. No Python in here, so that a C++
// program can open the library and run artifacts that use the operators.
#include "correlation/torch.hpp"

#include <torch/library.h>

#include "native/autograd.hpp"
#include "native/empty.hpp"

namespace fuseport::correlation {
namespace {

struct Cpu {
  static Tensor forward(const Look&, const Inputs& inputs) {
    const Tensor out = empty_tensor(out_sizes(inputs.problem), inputs.input1.options());
    run(Host{}, inputs.problem, Forward{out.mutable_data_ptr()});
    return out;
  }

  static Gradients backward(const Look&, const Inputs& inputs, const Tensor& dout) {
    const Tensor& like = inputs.input1;
    const Tensor dinput1 = empty_tensor(like.sizes(), like.options());
    const Tensor dinput2 = empty_tensor(like.sizes(), like.options());
    run(Host{}, inputs.problem,
        Backward{dout.const_data_ptr(), dinput1.mutable_data_ptr(), dinput2.mutable_data_ptr()});
    return {dinput1, dinput2};
  }
};

using OnCpu = Operators<Cpu>;

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "correlation(Tensor input1, Tensor input2, int kernel_h, int kernel_w, int patch_h, "
      "int patch_w, int stride_h, int stride_w, int padding_h, int padding_w, int dilation_h, "
      "int dilation_w, int dilation_patch_h, int dilation_patch_w) -> Tensor out");
  m.def(
      "correlation_backward(Tensor dout, Tensor input1, Tensor input2, int kernel_h, "
      "int kernel_w, int patch_h, int patch_w, int stride_h, int stride_w, int padding_h, "
      "int padding_w, int dilation_h, int dilation_w, int dilation_patch_h, "
      "int dilation_patch_w) -> (Tensor dinput1, Tensor dinput2)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("correlation", OnCpu::forward);
  m.impl("correlation_backward", OnCpu::backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "correlation", "correlation_backward");
}

}  // namespace
}  // namespace fuseport::correlation
