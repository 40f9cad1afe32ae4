// The selective scan as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings
// on the CPU and on CUDA have them. B and C are (b, G, N, l), of one G; all tensors are contiguous.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "native/ort.hpp"
#include "selective_scan/binding.hpp"
#include "selective_scan/kernel.hpp"

namespace fuseport::selective_scan {

using ort::Shape;
using ort::Tensor;
using ort::text;

template <Dtype DTYPE>
using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;

// The inputs of a scan, which begin at a node's input `first`; they fit each other. The problem can
// be run unless it is empty: then no size in it is bounded by memory.
struct Inputs {
  Tensor u, delta, A, B, C, D, z, delta_bias;
  bool empty;
  int64_t groups = 1;
  Problem problem;

  Inputs(const ort::Call& call, size_t first, bool gated, Dtype dtype) {
    for (Tensor* t : {&u, &delta, &A, &B, &C, &D}) *t = call.input(first++);
    if (gated) z = call.input(first++);
    delta_bias = call.input(first);
    check(call, gated);
    empty = ort::elements(u.shape) == 0;
    if (empty) return;

    Problem& p = problem;
    p.dtype = dtype;
    p.batches = u.shape[0];
    p.channels = u.shape[1];
    p.length = u.shape[2];
    p.states = A.shape[1];
    p.span = span_of(p.channels, groups, groups);
    p.softplus = call.attributes[0] != 0;
    p.u = sequence(u);
    p.delta = sequence(delta);
    if (gated) p.z = sequence(z);
    p.A = A.data;
    p.D = D.data;
    p.delta_bias = delta_bias.data;
    p.B = coefficient(B);
    p.C = coefficient(C);
  }

  Sequence sequence(const Tensor& t) const {
    return {t.data, problem.channels * problem.length, problem.length, 1};
  }

  MutableSequence mutable_sequence(void* data) const {
    return {data, problem.channels * problem.length, problem.length, 1};
  }

  Shape states() const { return {u.shape[0], u.shape[1], A.shape[1]}; }

  // Of the states at the borders of chunks, which no node takes or gives.
  Shape saved() const {
    return {problem.batches, problem.saved(), problem.states, problem.channels};
  }

 private:
  Coefficient coefficient(const Tensor& t) const {
    const int64_t group = problem.states * problem.length;
    return {t.data,         true,  problem.channels / groups,
            groups * group, group, problem.length, 1};
  }

  // The checks of shapes.py that are of shapes: ONNX Runtime itself checks dtypes.
  void check(const ort::Call& call, bool gated) {
    call.require(u.shape.size() == 3, "u", "(b, d, l)", text(u.shape));
    const int64_t b = u.shape[0], d = u.shape[1], l = u.shape[2];
    call.require_shape("delta", delta, "u's shape", u.shape);
    call.require(A.shape.size() == 2, "A", "(d, N)", text(A.shape));
    const int64_t states = A.shape[1];
    call.require_shape("A", A, "(d, N)", {d, states});
    call.require(B.shape.size() == 4, "B", "(b, G, N, l)", text(B.shape));
    groups = B.shape[1];
    call.require(groups >= 1 && d % groups == 0, "B",
                 "of groups that divide " + std::to_string(d) + " channels", groups);
    call.require_shape("B", B, "(b, G, N, l)", {b, groups, states, l});
    call.require_shape("C", C, "of B's shape (b, G, N, l)", B.shape);
    call.require_shape("D", D, "(d,)", {d});
    if (gated) call.require_shape("z", z, "u's shape", u.shape);
    call.require_shape("delta_bias", delta_bias, "(d,)", {d});
  }
};

// Where a node's cotangents are, and its gradients go, each like what it is the gradient of.
struct NodeGradients {
  Tensor dout, dlast_state;
  void *du = nullptr, *ddelta = nullptr, *dA = nullptr, *dB = nullptr, *dC = nullptr;
  void *dD = nullptr, *dz = nullptr, *ddelta_bias = nullptr;
};

// What a binding gives: Passes::forward(context, problem, forward) and
// Passes::backward<DTYPE>(context, inputs, gradients), of a problem that is not empty, on a
// Passes::Context.
template <class Passes, Dtype DTYPE, bool GATED>
void forward_node(const typename Passes::Context& context) {
  const Inputs inputs(context, 0, GATED, DTYPE);
  void* out = context.output(0, inputs.u.shape);
  void* last_state = context.output(1, inputs.states());
  if (inputs.empty) return context.clear(last_state, inputs.states(), sizeof(Real<DTYPE>));
  const auto saved = context.template allocate<Real<DTYPE>>(inputs.saved());
  Passes::forward(context, inputs.problem,
                  Forward{inputs.mutable_sequence(out), last_state, saved.data()});
}

template <class Passes, Dtype DTYPE, bool GATED>
void backward_node(const typename Passes::Context& context) {
  NodeGradients g;
  g.dout = context.input(0);
  g.dlast_state = context.input(1);
  const Inputs inputs(context, 2, GATED, DTYPE);
  context.require_shape("dout", g.dout, "u's shape", inputs.u.shape);
  context.require_shape("dlast_state", g.dlast_state, "(b, d, N)", inputs.states());

  // Gradients come in the order of the inputs that they belong to.
  constexpr size_t STORED = DTYPE == Dtype::float64 ? 8 : DTYPE == Dtype::float32 ? 4 : 2;
  constexpr size_t WIDE = sizeof(Real<DTYPE>);
  size_t index = 0;
  const auto gradient = [&](const Tensor& of, size_t bytes) {
    void* data = context.output(index++, of.shape);
    if (inputs.empty) context.clear(data, of.shape, bytes);
    return data;
  };
  g.du = gradient(inputs.u, STORED);
  g.ddelta = gradient(inputs.delta, STORED);
  g.dA = gradient(inputs.A, WIDE);
  g.dB = gradient(inputs.B, STORED);
  g.dC = gradient(inputs.C, STORED);
  g.dD = gradient(inputs.D, WIDE);
  if (GATED) g.dz = gradient(inputs.z, STORED);
  g.ddelta_bias = gradient(inputs.delta_bias, WIDE);
  if (!inputs.empty) Passes::template backward<DTYPE>(context, inputs, g);
}

template <class Passes, Dtype DTYPE, bool GATED>
void add(ort::Type stored, ort::Type state, const char* name, const char* backward_name) {
  std::vector<ort::Type> inputs{stored, stored, state, stored, stored, state};
  if (GATED) inputs.push_back(stored);
  inputs.push_back(state);
  std::vector<ort::Type> backward_inputs{stored, state};
  backward_inputs.insert(backward_inputs.end(), inputs.begin(), inputs.end());
  const std::vector<const char*> attributes{"delta_softplus"};
  auto& ops = ort::ops();
  ops.emplace_back(name, inputs, std::vector{stored, state}, attributes,
                   forward_node<Passes, DTYPE, GATED>);
  ops.emplace_back(backward_name, backward_inputs, inputs, attributes,
                   backward_node<Passes, DTYPE, GATED>);
}

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type state) {
    add<Passes, DTYPE, false>(stored, state, "selective_scan", "selective_scan_backward");
    add<Passes, DTYPE, true>(stored, state, "selective_scan_gated",
                             "selective_scan_gated_backward");
  });
}

}  // namespace fuseport::selective_scan
