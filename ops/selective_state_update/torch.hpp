// Inputs of torch as the kernel's problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/torch.hpp"
#include "selective_state_update/kernel.hpp"

namespace fuseport::selective_state_update {

using at::Tensor;

// The checks of shapes.py, in their order, with their messages.
inline void check(const char* op, const Tensor& state, const Tensor& x, const Tensor& dt,
                  const Tensor& A, const Tensor& B, const Tensor& C, const Tensor& D,
                  const std::optional<Tensor>& z, const Tensor& dt_bias) {
  const Check check{op, "x", x};
  check.require(x.dim() == 3, "x", "(b, h, d)", tuple(x.sizes()));
  const at::ScalarType dtype = x.scalar_type();
  check.require(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
                    dtype == at::kDouble,
                "x", "float16, bfloat16, float32 or float64", name_of(dtype));
  const int64_t b = x.size(0), h = x.size(1), d = x.size(2);
  const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;

  const at::ScalarType state_dtype = state.scalar_type();
  check.require(state_dtype == dtype || state_dtype == wide, "state",
                name_of(dtype) + " or " + name_of(wide), name_of(state_dtype));
  check.like("state", state, state_dtype);
  check.require(state.dim() == 4, "state", "(b, h, d, N)", tuple(state.sizes()));
  const int64_t states = state.size(3);
  check.shape("state", state, "(b, h, d, N)", {b, h, d, states});
  check.like("dt", dt, dtype);
  check.shape("dt", dt, "x's shape", {b, h, d});
  check.like("A", A, wide);
  check.shape("A", A, "(h, d, N)", {h, d, states});
  const auto coefficient = [&](const char* name, const Tensor& t) {
    check.like(name, t, dtype);
    check.require(t.dim() == 3, name, "(b, g, N)", tuple(t.sizes()));
    const int64_t groups = t.size(1);
    check.require(groups >= 1 && h % groups == 0, name,
                  "of groups that divide " + std::to_string(h) + " heads", groups);
    check.shape(name, t, "(b, g, N)", {b, groups, states});
  };
  coefficient("B", B);
  coefficient("C", C);
  check.require(B.size(1) == C.size(1), "C",
                "of as many groups as B = " + std::to_string(B.size(1)), C.size(1));
  check.like("D", D, wide);
  check.shape("D", D, "(h, d)", {h, d});
  if (z) {
    check.like("z", *z, dtype);
    check.shape("z", *z, "x's shape", {b, h, d});
  }
  check.like("dt_bias", dt_bias, wide);
  check.shape("dt_bias", dt_bias, "(h, d)", {h, d});
}

inline Strided sequence(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), 0};
}

inline Strided coefficient(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), 0, t.stride(2)};
}

inline Strided parameter(const Tensor& t) {
  return {t.const_data_ptr(), 0, t.stride(0), t.stride(1), t.dim() == 3 ? t.stride(2) : 0};
}

using Outputs = std::tuple<Tensor, Tensor>;

// Checks inputs, and calls start(op, problem) unless there is nothing to compute.
template <class Start>
Outputs update_with(const Start& start, const char* op, const Tensor& state, const Tensor& x,
                    const Tensor& dt, const Tensor& A, const Tensor& B, const Tensor& C,
                    const Tensor& D, const std::optional<Tensor>& z, const Tensor& dt_bias,
                    bool softplus) {
  check(op, state, x, dt, A, B, C, D, z, dt_bias);
  Tensor out = empty_tensor(x.sizes(), x.options());
  Tensor new_state = empty_tensor(state.sizes(), state.options());
  Problem p;
  p.dtype = dtype_of(x);
  p.wide_state = state.scalar_type() == A.scalar_type();
  p.batches = x.size(0);
  p.heads = x.size(1);
  p.channels = x.size(2);
  p.states = state.size(3);
  p.heads_per_group = p.heads / B.size(1);
  p.softplus = softplus;
  p.state = {state.const_data_ptr(), state.stride(0), state.stride(1), state.stride(2),
             state.stride(3)};
  p.x = sequence(x);
  p.dt = sequence(dt);
  p.A = parameter(A);
  p.B = coefficient(B);
  p.C = coefficient(C);
  p.D = parameter(D);
  if (z) p.z = sequence(*z);
  p.dt_bias = parameter(dt_bias);
  p.out = out.mutable_data_ptr();
  p.new_state = new_state.mutable_data_ptr();
  if (out.numel() > 0) start(op, p);
  return {out, new_state};
}

}  // namespace fuseport::selective_state_update
