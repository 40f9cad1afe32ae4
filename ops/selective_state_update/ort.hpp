// The state update as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on
// the CPU and on CUDA have them. All tensors are contiguous.
#pragma once

#include <string>
#include <vector>

#include "native/ort.hpp"
#include "selective_state_update/kernel.hpp"

namespace fuseport::selective_state_update {

using ort::Tensor;
using ort::text;

// What a binding gives: Passes::update(context, problem), of a problem that is not empty, on a
// Passes::Context.
template <class Passes, Dtype DTYPE, bool WIDE_STATE, bool GATED>
void update_node(const typename Passes::Context& context) {
  size_t index = 0;
  Tensor state, x, dt, A, B, C, D, z;
  for (Tensor* t : {&state, &x, &dt, &A, &B, &C, &D}) *t = context.input(index++);
  if (GATED) z = context.input(index++);
  const Tensor dt_bias = context.input(index);

  // The checks of shapes.py that are of shapes: ONNX Runtime itself checks dtypes.
  context.require(x.shape.size() == 3, "x", "(b, h, d)", text(x.shape));
  const int64_t b = x.shape[0], h = x.shape[1], d = x.shape[2];
  context.require(state.shape.size() == 4, "state", "(b, h, d, N)", text(state.shape));
  const int64_t states = state.shape[3];
  context.require_shape("state", state, "(b, h, d, N)", {b, h, d, states});
  context.require_shape("dt", dt, "x's shape", x.shape);
  context.require_shape("A", A, "(h, d, N)", {h, d, states});
  context.require(B.shape.size() == 3, "B", "(b, g, N)", text(B.shape));
  const int64_t groups = B.shape[1];
  context.require(groups >= 1 && h % groups == 0, "B",
                  "of groups that divide " + std::to_string(h) + " heads", groups);
  context.require_shape("B", B, "(b, g, N)", {b, groups, states});
  context.require_shape("C", C, "of B's shape (b, g, N)", B.shape);
  context.require_shape("D", D, "(h, d)", {h, d});
  if (GATED) context.require_shape("z", z, "x's shape", x.shape);
  context.require_shape("dt_bias", dt_bias, "(h, d)", {h, d});

  Problem p;
  p.out = context.output(0, x.shape);
  p.new_state = context.output(1, state.shape);
  if (ort::elements(x.shape) == 0) return;
  p.dtype = DTYPE;
  p.wide_state = WIDE_STATE;
  p.batches = b;
  p.heads = h;
  p.channels = d;
  p.states = states;
  p.heads_per_group = h / groups;
  p.softplus = context.attributes[0] != 0;
  p.state = {state.data, h * d * states, d * states, states, 1};
  const auto sequence = [&](const Tensor& t) { return Strided{t.data, h * d, d, 1, 0}; };
  const auto coefficient = [&](const Tensor& t) {
    return Strided{t.data, groups * states, states, 0, 1};
  };
  p.x = sequence(x);
  p.dt = sequence(dt);
  p.A = {A.data, 0, d * states, states, 1};
  p.B = coefficient(B);
  p.C = coefficient(C);
  p.D = {D.data, 0, d, 1, 0};
  if (GATED) p.z = sequence(z);
  p.dt_bias = {dt_bias.data, 0, d, 1, 0};
  Passes::update(context, p);
}

template <class Passes, Dtype DTYPE, bool WIDE_STATE, bool GATED>
void add(const char* name, ort::Type stored, ort::Type wide) {
  const ort::Type state = WIDE_STATE ? wide : stored;
  std::vector<ort::Type> inputs{state, stored, stored, wide, stored, stored, wide};
  if (GATED) inputs.push_back(stored);
  inputs.push_back(wide);
  ort::ops().emplace_back(name, inputs, std::vector{stored, state},
                          std::vector<const char*>{"dt_softplus"},
                          update_node<Passes, DTYPE, WIDE_STATE, GATED>);
}

template <class Passes, Dtype DTYPE, bool WIDE_STATE = true>
void add(ort::Type stored, ort::Type wide) {
  add<Passes, DTYPE, WIDE_STATE, false>("selective_state_update", stored, wide);
  add<Passes, DTYPE, WIDE_STATE, true>("selective_state_update_gated", stored, wide);
}

// Adds the op's nodes, for all dtypes, and for a state of either.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
    add<Passes, DTYPE>(stored, wide);
    if (stored != wide) add<Passes, DTYPE, false>(stored, wide);
  });
}

}  // namespace fuseport::selective_state_update
