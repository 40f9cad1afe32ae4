// The gated delta rule as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on
// the CPU and on CUDA have them. All tensors are contiguous.
#pragma once

#include <string>
#include <vector>

#include "gated_delta_rule/kernel.hpp"
#include "native/rule_ort.hpp"

namespace fuseport::gated_delta_rule {

using ort::sequence;
using ort::stored_bytes;
using ort::Tensor;
using ort::text;

// The inputs of the rule, which begin at a node's input `first`; they fit each other. The problem can
// be run unless it is empty.
struct NodeInputs {
  Tensor q, k, v, g, beta, initial_state;
  bool empty;
  Problem problem;

  NodeInputs(const ort::Call& call, size_t first, Dtype dtype) {
    for (Tensor* t : {&q, &k, &v, &g, &beta, &initial_state}) *t = call.input(first++);
    check(call);
    problem.scale = ort::scale_of(call);
    empty = ort::elements(v.shape) == 0 || ort::elements(initial_state.shape) == 0;
    if (empty) return;

    Problem& p = problem;
    p.dtype = dtype;
    p.batches = q.shape[0];
    p.length = q.shape[1];
    p.groups = q.shape[2];
    p.keys = q.shape[3];
    p.heads = v.shape[2];
    p.values = v.shape[3];
    p.channels = g.shape[3] > 1;
    p.q = sequence(q);
    p.k = sequence(k);
    p.v = sequence(v);
    p.g = sequence(g);
    p.beta = {beta.data, p.length * p.heads, p.heads, 1, 0};
    p.initial_state = initial_state.data;
  }

 private:
  // The checks of shapes.py that are of shapes: ONNX Runtime itself checks dtypes.
  void check(const ort::Call& call) const {
    call.require(q.shape.size() == 4, "q", "(b, l, G, K)", text(q.shape));
    call.require(v.shape.size() == 4, "v", "(b, l, H, V)", text(v.shape));
    const int64_t b = q.shape[0], l = q.shape[1], groups = q.shape[2], keys = q.shape[3];
    const int64_t heads = v.shape[2], values = v.shape[3];
    call.require_shape("k", k, "q's shape", q.shape);
    call.require(groups >= 1 && heads % groups == 0, "q",
                 "of heads that divide " + std::to_string(heads) + " heads of v", groups);
    call.require_shape("v", v, "(b, l, H, V)", {b, l, heads, values});
    call.require(g.shape.size() == 4, "g", "(b, l, H, 1 or K)", text(g.shape));
    call.require_shape("g", g, "(b, l, H, 1 or K)", {b, l, heads, g.shape[3] == 1 ? 1 : keys});
    call.require_shape("beta", beta, "(b, l, H)", {b, l, heads});
    call.require_shape("initial_state", initial_state, "(b, H, K, V)", {b, heads, keys, values});
  }
};

// What a binding gives: Passes::forward(context, problem, forward) and Passes::backward(context, problem,
// backward), of a problem that is not empty, on a Passes::Context.
template <class Passes, Dtype DTYPE>
void forward_node(const typename Passes::Context& context) {
  const NodeInputs inputs(context, 0, DTYPE);
  void* out = context.output(0, inputs.v.shape);
  void* final_state = context.output(1, inputs.initial_state.shape);
  if (inputs.empty) {
    context.clear(out, inputs.v.shape, stored_bytes(DTYPE));
    return context.copy(inputs.initial_state, final_state, real_bytes(DTYPE));
  }
  Passes::forward(context, inputs.problem, Forward{out, final_state});
}

template <class Passes, Dtype DTYPE>
void backward_node(const typename Passes::Context& context) {
  const Tensor dout = context.input(0), dfinal_state = context.input(1);
  const NodeInputs inputs(context, 2, DTYPE);
  context.require_shape("dout", dout, "v's shape", inputs.v.shape);
  context.require_shape("dfinal_state", dfinal_state, "the state's shape", inputs.initial_state.shape);

  // Gradients come in the order of the inputs that they belong to.
  size_t index = 0;
  const auto gradient = [&](const Tensor& of, size_t bytes) {
    void* data = context.output(index++, of.shape);
    if (inputs.empty) context.clear(data, of.shape, bytes);
    return data;
  };
  constexpr size_t stored = stored_bytes(DTYPE), real = real_bytes(DTYPE);
  Backward to;
  to.dq = gradient(inputs.q, stored);
  to.dk = gradient(inputs.k, stored);
  to.dv = gradient(inputs.v, stored);
  to.dg = gradient(inputs.g, real);
  to.dbeta = gradient(inputs.beta, real);
  to.dinitial_state = gradient(inputs.initial_state, real);
  if (inputs.empty) return context.copy(dfinal_state, to.dinitial_state, real);
  to.dout = sequence(dout);
  to.dfinal_state = dfinal_state.data;
  Passes::backward(context, inputs.problem, to);
}

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type real) {
    const std::vector<ort::Type> inputs{stored, stored, stored, real, real, real};
    std::vector<ort::Type> backward_inputs{stored, real};
    backward_inputs.insert(backward_inputs.end(), inputs.begin(), inputs.end());
    const std::vector<const char*> attributes{"scale_mantissa", "scale_exponent"};
    auto& ops = ort::ops();
    ops.emplace_back("gated_delta_rule", inputs, std::vector{stored, real}, attributes,
                     forward_node<Passes, DTYPE>);
    ops.emplace_back("gated_delta_rule_backward", backward_inputs, inputs, attributes,
                     backward_node<Passes, DTYPE>);
  });
}

}  // namespace fuseport::gated_delta_rule
