// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "native/checks.hpp"

namespace fuseport::rms_norm {

using at::Tensor;

struct Check : fuseport::Check {
  const Tensor& x;

  Check(const char* op, const Tensor& x) : fuseport::Check{op, "x", x}, x(x) {}

  at::ScalarType wide() const {
    return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }

  void like_x(const char* name, const Tensor& t) const {
    like(name, t, x.scalar_type());
    require(t.sizes() == x.sizes(), name, "x's shape = " + tuple(x.sizes()), tuple(t.sizes()));
  }

  void inputs(const std::optional<Tensor>& z, const Tensor& weight, double eps,
              int64_t group_size) const {
    require(x.dim() >= 1, "x", "(..., d)", tuple(x.sizes()));
    const at::ScalarType dtype = x.scalar_type(), weight_dtype = weight.scalar_type();
    const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
    require(half || dtype == at::kFloat || dtype == at::kDouble, "x",
            "float16, bfloat16, float32 or float64", name_of(dtype));
    const int64_t d = x.size(-1);
    if (z) like_x("z", *z);
    if (weight_dtype != dtype && half) {
      require(weight_dtype == at::kFloat, "weight", name_of(dtype) + " or float32",
              name_of(weight_dtype));
    } else {
      like("weight", weight, dtype);
    }
    like("weight", weight, weight_dtype);
    shape("weight", weight, "(d,)", {d});
    require(std::isfinite(eps) && eps >= 0, "eps", "finite and not negative", eps);
    require(group_size >= 1 && d % group_size == 0, "group_size",
            "a divisor of " + std::to_string(d) + " channels", group_size);
  }

  std::vector<int64_t> groups(int64_t group_size) const {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() /= group_size;
    return sizes;
  }

  void backward(const Tensor& dout, const Tensor& rstd, int64_t group_size) const {
    like_x("dout", dout);
    like("rstd", rstd, wide());
    const std::vector<int64_t> sizes = groups(group_size);
    require(rstd.sizes() == at::IntArrayRef(sizes), "rstd",
            "(..., d/group_size) = " + tuple(sizes), tuple(rstd.sizes()));
  }
};

}  // namespace fuseport::rms_norm
