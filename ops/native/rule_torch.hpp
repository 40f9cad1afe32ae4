// What the bindings of delta rules to torch share, on the CPU and on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/strided_torch.hpp"
#include "native/torch.hpp"

namespace fuseport {

inline Tensor flat(const Tensor& t) { return empty_tensor(t.sizes(), t.options()); }

// The checks of a rule's shapes.py, with their messages, against q: (b, l, heads, K).
struct RuleCheck : Check {
  const Tensor& q;

  RuleCheck(const char* op, const Tensor& q) : Check{op, "q", q}, q(q) {}

  void fits(const char* name, const Tensor& t, at::ScalarType dtype, const char* meaning,
            at::IntArrayRef expected) const {
    like(name, t, dtype);
    shape(name, t, meaning, expected);
  }

  at::ScalarType wide() const { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

  void floating() const {
    const at::ScalarType dtype = q.scalar_type();
    require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                dtype == at::kDouble,
            "q", "float16, bfloat16, float32 or float64", name_of(dtype));
  }

  // Of inputs that passed the checks; v is (b, l, H, V).
  void backward(const Tensor& dout, const Tensor& dfinal_state, const Tensor& v) const {
    fits("dout", dout, q.scalar_type(), "v's shape", v.sizes());
    fits("dfinal_state", dfinal_state, wide(), "the state's shape",
         {q.size(0), v.size(2), q.size(3), v.size(3)});
  }
};

}  // namespace fuseport
