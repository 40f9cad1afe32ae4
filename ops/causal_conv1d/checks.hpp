// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include <optional>
#include <string>

#include "native/checks.hpp"

namespace fuseport::causal_conv1d {

using at::Tensor;

struct Check : fuseport::Check {
  const Tensor& x;

  Check(const char* op, const Tensor& x) : fuseport::Check{op, "x", x}, x(x) {}

  void inputs(const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& initial_states,
              const std::optional<Tensor>& seq_idx) const {
    require(x.dim() == 3, "x", "(b, d, l)", tuple(x.sizes()));
    const at::ScalarType dtype = x.scalar_type();
    require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                dtype == at::kDouble,
            "x", "float16, bfloat16, float32 or float64", name_of(dtype));
    const int64_t b = x.size(0), d = x.size(1), l = x.size(2);
    const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    like("weight", weight, weight.scalar_type() == wide ? wide : dtype);
    require(weight.dim() == 2, "weight", "(d, W)", tuple(weight.sizes()));
    const int64_t width = weight.size(1);
    require(width >= 1, "weight", "of width 1 or more", width);
    shape("weight", weight, "(d, W)", {d, width});
    like("bias", bias, weight.scalar_type());
    shape("bias", bias, "(d,)", {d});
    if (initial_states) {
      like("initial_states", *initial_states, dtype);
      shape("initial_states", *initial_states, "(b, d, W-1)", {b, d, width - 1});
    }
    if (seq_idx) {
      like("seq_idx", *seq_idx, at::kInt);
      shape("seq_idx", *seq_idx, "(b, l)", {b, l});
    }
  }

  void cotangents(const Tensor& dout, const Tensor& dfinal_states, const Tensor& weight) const {
    like("dout", dout, x.scalar_type());
    shape("dout", dout, "x's shape", {x.size(0), x.size(1), x.size(2)});
    like("dfinal_states", dfinal_states, x.scalar_type());
    shape("dfinal_states", dfinal_states, "(b, d, W-1)",
          {x.size(0), x.size(1), weight.size(1) - 1});
  }
};

}  // namespace fuseport::causal_conv1d
