// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "correlation/geometry.hpp"
#include "native/checks.hpp"
#include "native/torch.hpp"

namespace fuseport::correlation {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor>;

// As geometry.hpp asks for it.
struct Look : fuseport::Check {
  Look(const char* op, const Tensor& input1) : fuseport::Check{op, "input1", input1} {}

  Sizes sizes(const Tensor& t) const { return t.sizes().vec(); }
  std::string text(const Sizes& sizes) const { return tuple(sizes); }
  void first(const Tensor& input1) const {
    const at::ScalarType dtype = input1.scalar_type();
    require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                dtype == at::kDouble,
            "input1", "float16, bfloat16, float32 or float64", name_of(dtype));
  }
  void like(const char* name, const Tensor& t) const {
    fuseport::Check::like(name, t, fuseport::Check::first.scalar_type());
  }
};

// Inputs, once they passed the checks. It holds tensors, since some are made contiguous.
struct Inputs {
  Tensor input1, input2;
  Problem problem;

  Inputs(const Look& look, const Tensor& first, const Tensor& second, const int64_t* options)
      : problem(checked(look, first, second, options)) {
    input1 = first.contiguous();
    input2 = second.contiguous();
    problem.dtype = dtype_of(input1);
    problem.input1 = input1.const_data_ptr();
    problem.input2 = input2.const_data_ptr();
  }
};

// The operators of a device, as torch calls them, over Passes::forward(look, inputs) and
// Passes::backward(look, inputs, dout), whose dout is contiguous.
template <class Passes>
struct Operators {
  static Tensor forward(const Tensor& input1, const Tensor& input2, int64_t kernel_h,
                        int64_t kernel_w, int64_t patch_h, int64_t patch_w, int64_t stride_h,
                        int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t dilation_h,
                        int64_t dilation_w, int64_t dilation_patch_h, int64_t dilation_patch_w) {
    const int64_t options[COUNT] = {kernel_h,   kernel_w,   patch_h,          patch_w,
                                    stride_h,   stride_w,   padding_h,        padding_w,
                                    dilation_h, dilation_w, dilation_patch_h, dilation_patch_w};
    const Look look("correlation", input1);
    return Passes::forward(look, Inputs(look, input1, input2, options));
  }

  static Gradients backward(const Tensor& dout, const Tensor& input1, const Tensor& input2,
                            int64_t kernel_h, int64_t kernel_w, int64_t patch_h, int64_t patch_w,
                            int64_t stride_h, int64_t stride_w, int64_t padding_h,
                            int64_t padding_w, int64_t dilation_h, int64_t dilation_w,
                            int64_t dilation_patch_h, int64_t dilation_patch_w) {
    const int64_t options[COUNT] = {kernel_h,   kernel_w,   patch_h,          patch_w,
                                    stride_h,   stride_w,   padding_h,        padding_w,
                                    dilation_h, dilation_w, dilation_patch_h, dilation_patch_w};
    const Look look("correlation_backward", input1);
    const Inputs inputs(look, input1, input2, options);
    check_cotangent(look, dout, inputs.problem);
    return Passes::backward(look, inputs, dout.contiguous());
  }
};

}  // namespace fuseport::correlation
