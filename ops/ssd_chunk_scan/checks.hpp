// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include <optional>
#include <string>

#include "native/checks.hpp"

namespace fuseport::ssd_chunk_scan {

using at::Tensor;

struct Check : fuseport::Check {
  const Tensor& x;

  Check(const char* op, const Tensor& x) : fuseport::Check{op, "x", x}, x(x) {}

  void fits(const char* name, const Tensor& t, at::ScalarType dtype, const char* meaning,
            std::initializer_list<int64_t> expected) const {
    like(name, t, dtype);
    shape(name, t, meaning, expected);
  }

  at::ScalarType wide() const { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

  void inputs(const Tensor& dt, const Tensor& A, const Tensor& B, const Tensor& C, const Tensor& D,
              const std::optional<Tensor>& z, const Tensor& dt_bias, const Tensor& initial_states,
              const Tensor& seq_idx, const Tensor& dt_limit) const {
    ranks(B);
    const int64_t b = x.size(0), l = x.size(1), h = x.size(2), p = x.size(3);
    fits("dt", dt, x.scalar_type(), "(b, l, H)", {b, l, h});
    fits("A", A, wide(), "(H,)", {h});
    coefficients(B, C, D);
    if (z) fits("z", *z, x.scalar_type(), "x's shape", {b, l, h, p});
    fits("dt_bias", dt_bias, wide(), "(H,)", {h});
    sequences(initial_states, seq_idx, B);
    fits("dt_limit", dt_limit, wide(), "(2,)", {2});
  }

  void discrete(const Tensor& log_decay, const Tensor& B, const Tensor& C, const Tensor& D,
                const Tensor& initial_states, const Tensor& seq_idx) const {
    ranks(B);
    fits("log_decay", log_decay, wide(), "(b, l, H)", {x.size(0), x.size(1), x.size(2)});
    coefficients(B, C, D);
    sequences(initial_states, seq_idx, B);
  }

  void backward(const Tensor& dout, const Tensor& dfinal_states, const Tensor& B) const {
    fits("dout", dout, x.scalar_type(), "x's shape",
         {x.size(0), x.size(1), x.size(2), x.size(3)});
    fits("dfinal_states", dfinal_states, wide(), "(b, H, P, N)",
         {x.size(0), x.size(2), x.size(3), B.size(3)});
  }

 private:
  void ranks(const Tensor& B) const {
    require(x.dim() == 4, "x", "(b, l, H, P)", tuple(x.sizes()));
    require(B.dim() == 4, "B", "(b, l, G, N)", tuple(B.sizes()));
    const at::ScalarType dtype = x.scalar_type();
    require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                dtype == at::kDouble,
            "x", "float16, bfloat16, float32 or float64", name_of(dtype));
  }

  void coefficients(const Tensor& B, const Tensor& C, const Tensor& D) const {
    const int64_t b = x.size(0), l = x.size(1), h = x.size(2), p = x.size(3);
    const int64_t groups = B.size(2), states = B.size(3);
    require(groups >= 1 && h % groups == 0, "B",
            "of groups that divide " + std::to_string(h) + " heads", groups);
    fits("B", B, x.scalar_type(), "(b, l, G, N)", {b, l, groups, states});
    fits("C", C, x.scalar_type(), "B's shape", {b, l, groups, states});
    fits("D", D, wide(), "(H, P)", {h, p});
  }

  void sequences(const Tensor& initial_states, const Tensor& seq_idx, const Tensor& B) const {
    const int64_t b = x.size(0), l = x.size(1), h = x.size(2), p = x.size(3);
    fits("initial_states", initial_states, wide(), "(b, H, P, N)", {b, h, p, B.size(3)});
    fits("seq_idx", seq_idx, at::kInt, "(b, l)", {b, l});
  }
};

}  // namespace fuseport::ssd_chunk_scan
