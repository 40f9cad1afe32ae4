// What the inputs must be: the checks of shapes.py, in their order, with their messages.
#pragma once

#include <optional>
#include <string>

#include "native/checks.hpp"
#include "selective_scan/kernel.hpp"

namespace fuseport::selective_scan {

using at::Tensor;

struct Check : fuseport::Check {
  const Tensor& u;

  Check(const char* op, const Tensor& u) : fuseport::Check{op, "u", u}, u(u) {}

  void sequence(const char* name, const Tensor& t) const {
    like(name, t, u.scalar_type());
    shape(name, t, "u's shape", {u.size(0), u.size(1), u.size(2)});
  }

  void coefficient(const char* name, const Tensor& t, const Tensor& A) const {
    const int64_t b = u.size(0), d = u.size(1), states = A.size(1);
    const bool complex = A.is_complex();
    const int64_t row = complex ? 2 * u.size(2) : u.size(2);
    like(name, t, complex && t.dim() == 2 ? A.scalar_type() : u.scalar_type());
    if (t.dim() == 2) {
      shape(name, t, "(d, N)", {d, states});
    } else if (t.dim() == 3) {
      shape(name, t, complex ? "(b, N, 2l)" : "(b, N, l)", {b, states, row});
    } else if (t.dim() == 4) {
      const int64_t groups = t.size(1);
      require(groups >= 1 && d % groups == 0, name,
              "of groups that divide " + std::to_string(d) + " channels", groups);
      shape(name, t, complex ? "(b, G, N, 2l)" : "(b, G, N, l)", {b, groups, states, row});
    } else {
      require(false, name,
              complex ? "(d, N), (b, N, 2l) or (b, G, N, 2l)" : "(d, N), (b, N, l) or (b, G, N, l)",
              tuple(t.sizes()));
    }
  }

  void inputs(const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
              const Tensor& D, const std::optional<Tensor>& z, const Tensor& delta_bias) const {
    require(u.dim() == 3, "u", "(b, d, l)", tuple(u.sizes()));
    const at::ScalarType dtype = u.scalar_type();
    require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                dtype == at::kDouble,
            "u", "float16, bfloat16, float32 or float64", name_of(dtype));
    const int64_t d = u.size(1);
    const at::ScalarType state_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;

    sequence("delta", delta);
    like("A", A, A.is_complex() ? c10::toComplexType(state_dtype) : state_dtype);
    require(A.dim() == 2, "A", "(d, N)", tuple(A.sizes()));
    shape("A", A, "(d, N)", {d, A.size(1)});
    coefficient("B", B, A);
    coefficient("C", C, A);
    like("D", D, state_dtype);
    shape("D", D, "(d,)", {d});
    if (z) sequence("z", *z);
    like("delta_bias", delta_bias, state_dtype);
    shape("delta_bias", delta_bias, "(d,)", {d});
  }

  void backward(const Tensor& dout, const Tensor& dlast_state, const Tensor& A,
                const Tensor& chunk_states) const {
    const int64_t b = u.size(0), d = u.size(1), saved = (u.size(2) + CHUNK - 1) / CHUNK + 1;
    sequence("dout", dout);
    like("dlast_state", dlast_state, A.scalar_type());
    shape("dlast_state", dlast_state, "(b, d, N)", {b, d, A.size(1)});
    like("chunk_states", chunk_states, A.scalar_type());
    shape("chunk_states", chunk_states, "(b, ⌈l/64⌉ + 1, N, d)", {b, saved, A.size(1), d});
  }
};

}  // namespace fuseport::selective_scan
