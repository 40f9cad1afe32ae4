// Deformable convolution as operators of torch: schemas, CPU kernels, gradients. No Python in here, so
// that a C++ program can open the library and run artifacts that use the operators.
#include "deform_conv2d/torch.hpp"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "native/empty.hpp"

namespace fuseport::deform_conv2d {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

// Gradients. Autograd sees operators only, by their names, so that traces hold them whole and fakes
// stand in for them.
struct ConvolutionFunction : torch::autograd::Function<ConvolutionFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& offset,
                        const std::optional<Tensor>& mask, const Tensor& weight,
                        const Tensor& bias, const Options& o) {
    static const auto plain = operator_named<decltype(OnCpu::plain)>("fuseport::deform_conv2d");
    static const auto modulated =
        operator_named<decltype(OnCpu::modulated)>("fuseport::deform_conv2d_modulated");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({input, offset, mask.value_or(Tensor()), weight, bias});
    ctx->saved_data["options"] = std::vector<int64_t>{o.stride_h,  o.stride_w,   o.padding_h,
                                                      o.padding_w, o.dilation_h, o.dilation_w};
    return mask.has_value()
               ? modulated.call(input, offset, *mask, weight, bias, o.stride_h, o.stride_w,
                                o.padding_h, o.padding_w, o.dilation_h, o.dilation_w)
               : plain.call(input, offset, weight, bias, o.stride_h, o.stride_w, o.padding_h,
                            o.padding_w, o.dilation_h, o.dilation_w);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto plain =
        operator_named<decltype(OnCpu::plain_backward)>("fuseport::deform_conv2d_backward");
    static const auto modulated = operator_named<decltype(OnCpu::modulated_backward)>(
        "fuseport::deform_conv2d_modulated_backward");
    const variable_list s = ctx->get_saved_variables();
    const std::vector<int64_t> o = ctx->saved_data["options"].toIntVector();
    const Tensor &dout = cotangents[0], &mask = s[2];
    if (mask.defined()) {
      auto [dinput, doffset, dmask, dweight, dbias] = modulated.call(
          dout, s[0], s[1], mask, s[3], s[4], o[0], o[1], o[2], o[3], o[4], o[5]);
      return {dinput, doffset, dmask, dweight, dbias, Tensor()};
    }
    auto [dinput, doffset, dweight, dbias] =
        plain.call(dout, s[0], s[1], s[3], s[4], o[0], o[1], o[2], o[3], o[4], o[5]);
    return {dinput, doffset, Tensor(), dweight, dbias, Tensor()};
  }
};

struct Autograd {
  static Tensor forward(const char*, const Tensor& input, const Tensor& offset, const Tensor& mask,
                        const Tensor& weight, const Tensor& bias, const Options& options) {
    const auto given = mask.defined() ? std::optional(mask) : std::nullopt;
    return ConvolutionFunction::apply(input, offset, given, weight, bias, options);
  }
};

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
  m.impl("deform_conv2d", Operators<Autograd>::plain);
  m.impl("deform_conv2d_modulated", Operators<Autograd>::modulated);
  // Gradients of gradients: these run as they are, and refuse when they are differentiated.
  m.impl("deform_conv2d_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("deform_conv2d_modulated_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::deform_conv2d
