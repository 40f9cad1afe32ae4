// The chunked scan as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on the
// CPU and on CUDA have them. All tensors are contiguous.
#pragma once

#include <string>
#include <vector>

#include "native/ort.hpp"
#include "ssd_chunk_scan/kernel.hpp"

namespace fuseport::ssd_chunk_scan {

using ort::Tensor;
using ort::text;

// By steps, with a gate or without, or with decays that are given.
enum class Kind { steps, gated, discrete };

// The inputs of a scan, which begin at a node's input `first`; they fit each other. The problem can
// be run unless it is empty.
struct Inputs {
  Tensor x, dt, A, log_decay, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit;
  bool empty;
  Problem problem;

  Inputs(const ort::Call& call, size_t first, Kind kind, Dtype dtype) {
    for (Tensor* t : tensors(kind)) *t = call.input(first++);
    check(call, kind);
    empty = ort::elements(x.shape) == 0;
    if (empty) return;

    Problem& p = problem;
    p.dtype = dtype;
    p.batches = x.shape[0];
    p.length = x.shape[1];
    p.heads = x.shape[2];
    p.width = x.shape[3];
    p.groups = B.shape[2];
    p.states = B.shape[3];
    p.x = sequence(x);
    p.B = sequence(B);
    p.C = sequence(C);
    p.D = D.data;
    p.initial_states = initial_states.data;
    p.seq_idx = static_cast<const int32_t*>(seq_idx.data);
    const auto of_steps = [&](const Tensor& t) {
      return Strided{t.data, p.length * p.heads, p.heads, 1, 0};
    };
    if (kind == Kind::discrete) {
      p.log_decay = of_steps(log_decay);
      return;
    }
    p.softplus = call.attributes[0] != 0;
    p.dt = of_steps(dt);
    if (kind == Kind::gated) p.z = sequence(z);
    p.A = A.data;
    p.dt_bias = dt_bias.data;
    p.dt_limit = dt_limit.data;
  }

  static Strided sequence(const Tensor& t) {
    const int64_t l = t.shape[1], heads = t.shape[2], columns = t.shape[3];
    return {t.data, l * heads * columns, heads * columns, columns, 1};
  }

 private:
  std::vector<Tensor*> tensors(Kind kind) {
    if (kind == Kind::discrete) return {&x, &log_decay, &B, &C, &D, &initial_states, &seq_idx};
    std::vector<Tensor*> all{&x, &dt, &A, &B, &C, &D};
    if (kind == Kind::gated) all.push_back(&z);
    all.insert(all.end(), {&dt_bias, &initial_states, &seq_idx, &dt_limit});
    return all;
  }

  // The checks of shapes.py that are of shapes: ONNX Runtime itself checks dtypes.
  void check(const ort::Call& call, Kind kind) const {
    call.require(x.shape.size() == 4, "x", "(b, l, H, P)", text(x.shape));
    call.require(B.shape.size() == 4, "B", "(b, l, G, N)", text(B.shape));
    const int64_t b = x.shape[0], l = x.shape[1], h = x.shape[2], p = x.shape[3];
    const int64_t groups = B.shape[2], states = B.shape[3];
    if (kind == Kind::discrete) {
      call.require_shape("log_decay", log_decay, "(b, l, H)", {b, l, h});
    } else {
      call.require_shape("dt", dt, "(b, l, H)", {b, l, h});
      call.require_shape("A", A, "(H,)", {h});
    }
    call.require(groups >= 1 && h % groups == 0, "B",
                 "of groups that divide " + std::to_string(h) + " heads", groups);
    call.require_shape("B", B, "(b, l, G, N)", {b, l, groups, states});
    call.require_shape("C", C, "B's shape", B.shape);
    call.require_shape("D", D, "(H, P)", {h, p});
    if (kind == Kind::gated) call.require_shape("z", z, "x's shape", x.shape);
    if (kind != Kind::discrete) call.require_shape("dt_bias", dt_bias, "(H,)", {h});
    call.require_shape("initial_states", initial_states, "(b, H, P, N)", {b, h, p, states});
    call.require_shape("seq_idx", seq_idx, "(b, l)", {b, l});
    if (kind != Kind::discrete) call.require_shape("dt_limit", dt_limit, "(2,)", {2});
  }
};

// What a binding gives: Passes::forward(context, problem, forward) and Passes::backward(context, problem,
// backward, totals), of a problem that is not empty, on a Passes::Context. Where there are no steps, or
// nothing at all, states stay as they are.
template <class Passes, Dtype DTYPE, Kind KIND>
void forward_node(const typename Passes::Context& context) {
  const Inputs inputs(context, 0, KIND, DTYPE);
  void* out = context.output(0, inputs.x.shape);
  void* final_states = context.output(1, inputs.initial_states.shape);
  if (inputs.empty)
    return context.copy(inputs.initial_states, final_states, real_bytes(DTYPE));
  Passes::forward(context, inputs.problem, Forward{out, final_states});
}

template <class Passes, Dtype DTYPE, Kind KIND>
void backward_node(const typename Passes::Context& context) {
  const Tensor dout = context.input(0), dfinal_states = context.input(1);
  const Inputs inputs(context, 2, KIND, DTYPE);
  context.require_shape("dout", dout, "x's shape", inputs.x.shape);
  context.require_shape("dfinal_states", dfinal_states, "(b, H, P, N)",
                        inputs.initial_states.shape);

  // Gradients come in the order of the inputs that they belong to.
  size_t index = 0;
  const auto gradient = [&](const Tensor& of, size_t bytes) {
    void* data = context.output(index++, of.shape);
    if (inputs.empty) context.clear(data, of.shape, bytes);
    return data;
  };
  constexpr size_t stored = DTYPE == Dtype::float64 ? 8 : DTYPE == Dtype::float32 ? 4 : 2;
  constexpr size_t real = real_bytes(DTYPE);
  Backward backward;
  Totals totals;
  backward.dx = gradient(inputs.x, stored);
  if (KIND == Kind::discrete) {
    backward.dlog_decay = gradient(inputs.log_decay, real);
  } else {
    backward.ddt = gradient(inputs.dt, stored);
    totals.dA = gradient(inputs.A, real);
  }
  totals.dB = gradient(inputs.B, stored);
  totals.dC = gradient(inputs.C, stored);
  totals.dD = gradient(inputs.D, real);
  if (KIND == Kind::gated) backward.dz = gradient(inputs.z, stored);
  if (KIND != Kind::discrete) totals.ddt_bias = gradient(inputs.dt_bias, real);
  backward.dinitial_states = gradient(inputs.initial_states, real);
  if (inputs.empty)
    return context.copy(dfinal_states, backward.dinitial_states, real_bytes(DTYPE));
  backward.dout = Inputs::sequence(dout);
  backward.dfinal_states = dfinal_states.data;
  Passes::backward(context, inputs.problem, backward, totals);
}

template <class Passes, Dtype DTYPE, Kind KIND>
void add(ort::Type stored, ort::Type real, const char* name, const char* backward_name) {
  constexpr ort::Type numbers = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;  // seq_idx
  std::vector<ort::Type> gradients{stored, stored, real, stored, stored, real}, inputs;
  if (KIND == Kind::discrete) {
    gradients = {stored, real, stored, stored, real, real};
    inputs = gradients;
    inputs.push_back(numbers);
  } else {
    if (KIND == Kind::gated) gradients.push_back(stored);
    gradients.insert(gradients.end(), {real, real});
    inputs = gradients;
    inputs.insert(inputs.end(), {numbers, real});  // and dt_limit
  }
  std::vector<ort::Type> backward_inputs{stored, real};
  backward_inputs.insert(backward_inputs.end(), inputs.begin(), inputs.end());
  std::vector<const char*> attributes;
  if (KIND != Kind::discrete) attributes.push_back("dt_softplus");
  auto& ops = ort::ops();
  ops.emplace_back(name, inputs, std::vector{stored, real}, attributes,
                   forward_node<Passes, DTYPE, KIND>);
  ops.emplace_back(backward_name, backward_inputs, gradients, attributes,
                   backward_node<Passes, DTYPE, KIND>);
}

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type real) {
    add<Passes, DTYPE, Kind::steps>(stored, real, "ssd_chunk_scan", "ssd_chunk_scan_backward");
    add<Passes, DTYPE, Kind::gated>(stored, real, "ssd_chunk_scan_gated",
                                    "ssd_chunk_scan_gated_backward");
    add<Passes, DTYPE, Kind::discrete>(stored, real, "ssd_chunk_scan_discrete",
                                       "ssd_chunk_scan_discrete_backward");
  });
}

}  // namespace fuseport::ssd_chunk_scan
