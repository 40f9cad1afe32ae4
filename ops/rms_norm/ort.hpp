// Norms as custom ops of ONNX Runtime, with a gate or without: the nodes that onnx.py of both ops
// writes, as their bindings on the CPU and on CUDA have them. All tensors are contiguous.
#pragma once

#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "native/ort.hpp"
#include "rms_norm/problem.hpp"

namespace fuseport::rms_norm {

using ort::Shape;
using ort::text;

template <Dtype DTYPE>
using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;

// The inputs of a norm, which begin at a node's input `first`; they fit each other. The problem can
// be run unless it is empty: then no size in it is bounded by memory.
struct NodeInputs {
  ort::Tensor x, z, weight;
  bool empty;
  Problem problem;

  NodeInputs(const ort::Call& call, size_t first, bool gated, Dtype dtype) {
    x = call.input(first++);
    if (gated) z = call.input(first++);
    weight = call.input(first);
    const int64_t mantissa = call.attributes[0], exponent = call.attributes[1];
    const int64_t group = call.attributes[2];
    call.require(!x.shape.empty(), "x", "(..., d)", text(x.shape));
    const int64_t d = x.shape.back();
    if (gated) call.require_shape("z", z, "x's shape", x.shape);
    call.require_shape("weight", weight, "(d,)", {d});
    call.require(mantissa >= 0, "eps_mantissa", "not negative", mantissa);
    call.require(exponent >= -1200 && exponent <= 960, "eps_exponent", "in -1200 to 960",
                    exponent);
    call.require(group >= 1 && d % group == 0, "group_size",
                    "a divisor of " + std::to_string(d) + " channels", group);
    empty = ort::elements(x.shape) == 0;
    if (empty) return;

    Problem& p = problem;
    p.dtype = dtype;
    p.weight_dtype = dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
    p.mode = !gated                     ? Mode::plain
             : call.attributes[3] != 0 ? Mode::norm_first
                                          : Mode::gate_first;
    p.channels = d;
    p.rows = p.inner = ort::elements(x.shape) / d;
    p.group = group;
    p.eps = std::ldexp(static_cast<double>(mantissa), static_cast<int>(exponent));
    p.x = rows(x);
    if (gated) p.z = rows(z);
    p.weight = weight.data;
  }

  Rows rows(const ort::Tensor& t) const { return {t.data, 0, problem.channels, 1}; }
};

// Where a node's cotangent is, and its gradients go.
struct NodeGradients {
  ort::Tensor dout;
  void *dx = nullptr, *dz = nullptr, *dweight = nullptr;  // like x, z and weight
};

// What a binding gives: Passes::forward<DTYPE>(context, problem, out) and
// Passes::backward<DTYPE>(context, inputs, gradients), of a problem that is not empty, on a
// Passes::Context.
template <class Passes, Dtype DTYPE, bool GATED>
void forward_node(const typename Passes::Context& context) {
  const NodeInputs inputs(context, 0, GATED, DTYPE);
  void* out = context.output(0, inputs.x.shape);
  if (!inputs.empty) Passes::template forward<DTYPE>(context, inputs.problem, out);
}

template <class Passes, Dtype DTYPE, bool GATED>
void backward_node(const typename Passes::Context& context) {
  NodeGradients g;
  g.dout = context.input(0);
  const NodeInputs inputs(context, 1, GATED, DTYPE);
  context.require_shape("dout", g.dout, "x's shape", inputs.x.shape);
  g.dx = context.output(0, inputs.x.shape);
  if (GATED) g.dz = context.output(1, inputs.x.shape);
  g.dweight = context.output(GATED ? 2 : 1, inputs.weight.shape);
  if (inputs.empty) return context.clear(g.dweight, inputs.weight.shape, sizeof(Real<DTYPE>));
  Passes::template backward<DTYPE>(context, inputs, g);
}

// Adds an op's two nodes, for all dtypes.
template <class Passes, bool GATED>
bool add_nodes(const char* name, const char* backward_name) {
  return ort::for_each_dtype([&]<Dtype DTYPE>(ort::Type stored, ort::Type real) {
    std::vector<ort::Type> inputs(GATED ? 2 : 1, stored);
    inputs.push_back(real);
    std::vector<ort::Type> backward_inputs{stored};
    backward_inputs.insert(backward_inputs.end(), inputs.begin(), inputs.end());
    std::vector<const char*> attributes{"eps_mantissa", "eps_exponent", "group_size"};
    if (GATED) attributes.push_back("norm_before_gate");
    auto& ops = ort::ops();
    ops.emplace_back(name, inputs, std::vector{stored}, attributes,
                     forward_node<Passes, DTYPE, GATED>);
    ops.emplace_back(backward_name, backward_inputs, inputs, attributes,
                     backward_node<Passes, DTYPE, GATED>);
  });
}

}  // namespace fuseport::rms_norm
