// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "deform_conv2d/geometry.hpp"
#include "native/checks.hpp"
#include "native/torch.hpp"

namespace fuseport::deform_conv2d {

using at::Tensor;
using PlainGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// As geometry.hpp asks for it.
struct Look : fuseport::Check {
  Look(const char* op, const Tensor& input) : fuseport::Check{op, "input", input} {}

  Sizes sizes(const Tensor& t) const { return t.sizes().vec(); }
  std::string text(const Sizes& sizes) const { return tuple(sizes); }
  void first(const Tensor& input) const {
    const at::ScalarType dtype = input.scalar_type();
    require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                dtype == at::kDouble,
            "input", "float16, bfloat16, float32 or float64", name_of(dtype));
  }
  void like(const char* name, const Tensor& t) const {
    fuseport::Check::like(name, t, fuseport::Check::first.scalar_type());
  }
};

// Inputs, once they passed the checks. It holds tensors, since some are made contiguous; `mask` is
// undefined where there is none.
struct Inputs {
  Tensor input, offset, mask, weight, bias;
  Problem problem;

  Inputs(const Look& look, const Tensor& input_, const Tensor& offset_, const Tensor& mask_,
         const Tensor& weight_, const Tensor& bias_, const Options& options)
      : problem(checked(look, input_, offset_, mask_.defined() ? &mask_ : nullptr, weight_, bias_,
                        options)) {
    input = input_.contiguous();
    offset = offset_.contiguous();
    if (mask_.defined()) mask = mask_.contiguous();
    weight = weight_.contiguous();
    bias = bias_.contiguous();
    Problem& p = problem;
    p.dtype = dtype_of(input);
    p.input = input.const_data_ptr();
    p.offset = offset.const_data_ptr();
    p.mask = mask.defined() ? mask.const_data_ptr() : nullptr;
    p.weight = weight.const_data_ptr();
    p.bias = bias.const_data_ptr();
  }

  at::DimVector out_sizes() const {
    const Problem& p = problem;
    return {p.batches, p.outputs, p.rows, p.columns};
  }
};

// Memory for gradients, as `empty(sizes, options)` gives it; that of the mask is undefined where
// there is none.
template <class Empty>
Gradients gradients_like(const Inputs& inputs, const Empty& empty) {
  const auto like = [&](const Tensor& t) {
    return t.defined() ? empty(t.sizes(), t.options()) : Tensor();
  };
  return {like(inputs.input), like(inputs.offset), like(inputs.mask), like(inputs.weight),
          like(inputs.bias)};
}

inline Backward backward_of(const Tensor& dout, const Gradients& gradients) {
  const auto& [dinput, doffset, dmask, dweight, dbias] = gradients;
  return {dout.const_data_ptr(),
          dinput.mutable_data_ptr(),
          doffset.mutable_data_ptr(),
          dmask.defined() ? dmask.mutable_data_ptr() : nullptr,
          dweight.mutable_data_ptr(),
          dbias.mutable_data_ptr()};
}

// The four operators of a device, as torch calls them, over Passes::forward(op, input, offset, mask,
// weight, bias, options) and Passes::backward(op, dout, …), whose mask may be undefined.
template <class Passes>
struct Operators {
  static Tensor plain(const Tensor& input, const Tensor& offset, const Tensor& weight,
                      const Tensor& bias, int64_t stride_h, int64_t stride_w, int64_t padding_h,
                      int64_t padding_w, int64_t dilation_h, int64_t dilation_w) {
    return Passes::forward("deform_conv2d", input, offset, Tensor(), weight, bias,
                           {stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w});
  }

  static Tensor modulated(const Tensor& input, const Tensor& offset, const Tensor& mask,
                          const Tensor& weight, const Tensor& bias, int64_t stride_h,
                          int64_t stride_w, int64_t padding_h, int64_t padding_w,
                          int64_t dilation_h, int64_t dilation_w) {
    return Passes::forward("deform_conv2d_modulated", input, offset, mask, weight, bias,
                           {stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w});
  }

  static PlainGradients plain_backward(const Tensor& dout, const Tensor& input,
                                       const Tensor& offset, const Tensor& weight,
                                       const Tensor& bias, int64_t stride_h, int64_t stride_w,
                                       int64_t padding_h, int64_t padding_w, int64_t dilation_h,
                                       int64_t dilation_w) {
    auto [dinput, doffset, none, dweight, dbias] = Passes::backward(
        "deform_conv2d_backward", dout, input, offset, Tensor(), weight, bias,
        {stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w});
    return {dinput, doffset, dweight, dbias};
  }

  static Gradients modulated_backward(const Tensor& dout, const Tensor& input,
                                      const Tensor& offset, const Tensor& mask,
                                      const Tensor& weight, const Tensor& bias, int64_t stride_h,
                                      int64_t stride_w, int64_t padding_h, int64_t padding_w,
                                      int64_t dilation_h, int64_t dilation_w) {
    return Passes::backward("deform_conv2d_modulated_backward", dout, input, offset, mask, weight,
                            bias,
                            {stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w});
  }
};

}  // namespace fuseport::deform_conv2d
