// Inputs of torch as the kernels' problem: what the bindings for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "gated_delta_rule/kernel.hpp"
#include "native/rule_torch.hpp"

namespace fuseport::gated_delta_rule {

using at::Tensor;

#define FUSEPORT_INPUTS                                                                \
  const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &g, const Tensor &beta, \
      const Tensor &initial_state, double scale

using Outputs = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The checks of shapes.py, in their order, with their messages.
struct Check : RuleCheck {
  using RuleCheck::RuleCheck;

  void inputs(const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
              const Tensor& initial_state) const {
    require(q.dim() == 4, "q", "(b, l, G, K)", tuple(q.sizes()));
    require(v.dim() == 4, "v", "(b, l, H, V)", tuple(v.sizes()));
    floating();
    const at::ScalarType dtype = q.scalar_type();
    const int64_t b = q.size(0), l = q.size(1), groups = q.size(2), keys = q.size(3);
    const int64_t heads = v.size(2), values = v.size(3);

    fits("k", k, dtype, "q's shape", {b, l, groups, keys});
    require(groups >= 1 && heads % groups == 0, "q",
            "of heads that divide " + std::to_string(heads) + " heads of v", groups);
    fits("v", v, dtype, "(b, l, H, V)", {b, l, heads, values});
    require(g.dim() == 4, "g", "(b, l, H, 1 or K)", tuple(g.sizes()));
    fits("g", g, wide(), "(b, l, H, 1 or K)", {b, l, heads, g.size(3) == 1 ? 1 : keys});
    fits("beta", beta, wide(), "(b, l, H)", {b, l, heads});
    fits("initial_state", initial_state, wide(), "(b, H, K, V)", {b, heads, keys, values});
  }
};

// Inputs that passed the checks. It holds the state, which is made contiguous.
struct Inputs {
  Tensor initial_state;
  Problem problem;

  Inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
         const Tensor& state, double scale)
      : initial_state(state.contiguous()) {
    Problem& p = problem;
    p.dtype = dtype_of(q);
    p.batches = q.size(0);
    p.length = q.size(1);
    p.groups = q.size(2);
    p.heads = v.size(2);
    p.keys = q.size(3);
    p.values = v.size(3);
    p.channels = g.size(3) > 1;
    p.scale = scale;
    p.q = strided(q);
    p.k = strided(k);
    p.v = strided(v);
    p.g = strided(g);
    p.beta = strided(beta);
    p.initial_state = initial_state.const_data_ptr();
  }
};

// Checks inputs, and calls start(op, problem, forward) unless there is nothing to compute.
template <class Start>
Outputs forward_with(const Start& start, FUSEPORT_INPUTS) {
  const char* op = "gated_delta_rule";
  Check{op, q}.inputs(k, v, g, beta, initial_state);
  Tensor out = flat(v), final_state = flat(initial_state);
  if (out.numel() == 0 || initial_state.numel() == 0) {
    out.zero_();  // of states without rows
    final_state.copy_(initial_state);
    return {out, final_state};
  }
  const Inputs inputs(q, k, v, g, beta, initial_state, scale);
  start(op, inputs.problem, Forward{out.mutable_data_ptr(), final_state.mutable_data_ptr()});
  return {out, final_state};
}

// The same of start(op, problem, backward).
template <class Start>
Gradients backward_with(const Start& start, const Tensor& dout, const Tensor& dfinal_state,
                        FUSEPORT_INPUTS) {
  const char* op = "gated_delta_rule_backward";
  const Check check{op, q};
  check.inputs(k, v, g, beta, initial_state);
  check.backward(dout, dfinal_state, v);
  Tensor dq = flat(q), dk = flat(k), dv = flat(v), dg = flat(g), dbeta = flat(beta);
  Tensor dinitial = flat(initial_state);
  if (v.numel() == 0 || initial_state.numel() == 0) {
    for (Tensor* t : {&dq, &dk, &dv, &dg, &dbeta}) t->zero_();
    dinitial.copy_(dfinal_state);
    return {dq, dk, dv, dg, dbeta, dinitial};
  }
  const Inputs inputs(q, k, v, g, beta, initial_state, scale);
  const Tensor dfinal = dfinal_state.contiguous();
  Backward to;
  to.dout = strided(dout);
  to.dfinal_state = dfinal.const_data_ptr();
  to.dq = dq.mutable_data_ptr();
  to.dk = dk.mutable_data_ptr();
  to.dv = dv.mutable_data_ptr();
  to.dg = dg.mutable_data_ptr();
  to.dbeta = dbeta.mutable_data_ptr();
  to.dinitial_state = dinitial.mutable_data_ptr();
  start(op, inputs.problem, to);
  return {dq, dk, dv, dg, dbeta, dinitial};
}

}  // namespace fuseport::gated_delta_rule
