// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "dplr_delta_rule/kernel.hpp"
#include "native/rule_torch.hpp"

namespace fuseport::dplr_delta_rule {

using at::Tensor;

#define FUSEPORT_INPUTS                                                                      \
  const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &a, const Tensor &b,       \
      const Tensor &log_decay, const Tensor &initial_state, double scale

using Outputs = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The checks of shapes.py, in their order, with their messages.
struct Check : RuleCheck {
  using RuleCheck::RuleCheck;

  void inputs(const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
              const Tensor& log_decay, const Tensor& initial_state) const {
    require(q.dim() == 4, "q", "(n, l, H, K)", tuple(q.sizes()));
    require(v.dim() == 4, "v", "(n, l, H, V)", tuple(v.sizes()));
    floating();
    const at::ScalarType dtype = q.scalar_type();
    const int64_t n = q.size(0), l = q.size(1), heads = q.size(2), keys = q.size(3);
    const int64_t values = v.size(3);
    fits("k", k, dtype, "q's shape", {n, l, heads, keys});
    fits("v", v, dtype, "(n, l, H, V)", {n, l, heads, values});
    fits("a", a, dtype, "q's shape", {n, l, heads, keys});
    fits("b", b, dtype, "q's shape", {n, l, heads, keys});
    fits("log_decay", log_decay, wide(), "q's shape", {n, l, heads, keys});
    fits("initial_state", initial_state, wide(), "(n, H, K, V)", {n, heads, keys, values});
  }
};

// Inputs that passed the checks. It holds the state, which is made contiguous.
struct Inputs {
  Tensor initial_state;
  Problem problem;

  Inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
         const Tensor& log_decay, const Tensor& state, double scale)
      : initial_state(state.contiguous()) {
    Problem& p = problem;
    p.dtype = dtype_of(q);
    p.batches = q.size(0);
    p.length = q.size(1);
    p.heads = q.size(2);
    p.keys = q.size(3);
    p.values = v.size(3);
    p.scale = scale;
    p.q = strided(q);
    p.k = strided(k);
    p.v = strided(v);
    p.a = strided(a);
    p.b = strided(b);
    p.log_decay = strided(log_decay);
    p.initial_state = initial_state.const_data_ptr();
  }
};

// Checks inputs, and calls start(op, problem, forward) unless there is nothing to compute.
template <class Start>
Outputs forward_with(const Start& start, FUSEPORT_INPUTS) {
  const char* op = "dplr_delta_rule";
  Check{op, q}.inputs(k, v, a, b, log_decay, initial_state);
  Tensor out = flat(v), final_state = flat(initial_state);
  if (out.numel() == 0 || initial_state.numel() == 0) {
    out.zero_();  // of states without rows
    final_state.copy_(initial_state);
    return {out, final_state};
  }
  const Inputs inputs(q, k, v, a, b, log_decay, initial_state, scale);
  start(op, inputs.problem, Forward{out.mutable_data_ptr(), final_state.mutable_data_ptr()});
  return {out, final_state};
}

// The same of start(op, problem, backward).
template <class Start>
Gradients backward_with(const Start& start, const Tensor& dout, const Tensor& dfinal_state,
                        FUSEPORT_INPUTS) {
  const char* op = "dplr_delta_rule_backward";
  const Check check{op, q};
  check.inputs(k, v, a, b, log_decay, initial_state);
  check.backward(dout, dfinal_state, v);
  Tensor dq = flat(q), dk = flat(k), dv = flat(v), da = flat(a), db = flat(b);
  Tensor ddecay = flat(log_decay), dinitial = flat(initial_state);
  if (v.numel() == 0 || initial_state.numel() == 0) {
    for (Tensor* t : {&dq, &dk, &dv, &da, &db, &ddecay}) t->zero_();
    dinitial.copy_(dfinal_state);
    return {dq, dk, dv, da, db, ddecay, dinitial};
  }
  const Inputs inputs(q, k, v, a, b, log_decay, initial_state, scale);
  const Tensor dfinal = dfinal_state.contiguous();
  Backward to;
  to.dout = strided(dout);
  to.dfinal_state = dfinal.const_data_ptr();
  to.dq = dq.mutable_data_ptr();
  to.dk = dk.mutable_data_ptr();
  to.dv = dv.mutable_data_ptr();
  to.da = da.mutable_data_ptr();
  to.db = db.mutable_data_ptr();
  to.dlog_decay = ddecay.mutable_data_ptr();
  to.dinitial_state = dinitial.mutable_data_ptr();
  start(op, inputs.problem, to);
  return {dq, dk, dv, da, db, ddecay, dinitial};
}

}  // namespace fuseport::dplr_delta_rule
