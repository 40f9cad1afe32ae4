// The causal convolution as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its
// bindings on the CPU and on CUDA have them. Weight and bias are of the sums' type; all tensors are
// contiguous.
#pragma once

#include <type_traits>
#include <vector>

#include "causal_conv1d/kernel.hpp"
#include "native/ort.hpp"

namespace fuseport::causal_conv1d {

using ort::Shape;
using ort::Tensor;
using ort::text;

// The inputs of a convolution, which begin at a node's input `first`; they fit each other. Where x
// is empty, strides and sizes mean nothing, and no kernel is run.
struct Inputs {
  Tensor x, weight, bias, last;  // `last` is initial_states or seq_idx
  Shape states;                  // (b, d, W-1)
  Problem problem;

  Inputs(const ort::Call& call, size_t first, bool packed, Dtype dtype) {
    for (Tensor* t : {&x, &weight, &bias, &last}) *t = call.input(first++);
    check(call, packed);
    Problem& p = problem;
    p.dtype = dtype;
    p.wide_weight = true;
    p.silu = call.attributes[0] != 0;
    p.batches = x.shape[0];
    p.channels = x.shape[1];
    p.length = x.shape[2];
    p.width = weight.shape[1];
    p.x = sequence(x);
    p.weight = weight.data;
    p.bias = bias.data;
    p.packed = packed;
    if (packed) {
      p.seq_idx = static_cast<const int32_t*>(last.data);
    } else {
      p.initial = sequence(last);
    }
  }

  // Without batch entries or channels there is nothing to compute but sums over nothing.
  bool empty() const { return problem.batches == 0 || problem.channels == 0; }

  static Sequence sequence(const Tensor& t) {
    int64_t batch = 0;
    if (__builtin_mul_overflow(t.shape[1], t.shape[2], &batch)) batch = 0;  // of what is empty
    return {t.data, batch, t.shape[2], 1};
  }

 private:
  // The checks of shapes.py that are of shapes: ONNX Runtime itself checks dtypes.
  void check(const ort::Call& call, bool packed) {
    call.require(x.shape.size() == 3, "x", "(b, d, l)", text(x.shape));
    const int64_t b = x.shape[0], d = x.shape[1], l = x.shape[2];
    call.require(weight.shape.size() == 2, "weight", "(d, W)", text(weight.shape));
    const int64_t width = weight.shape[1];
    call.require(width >= 1, "weight", "of width 1 or more", width);
    call.require_shape("weight", weight, "(d, W)", {d, width});
    call.require_shape("bias", bias, "(d,)", {d});
    states = {b, d, width - 1};
    if (packed) {
      call.require_shape("seq_idx", last, "(b, l)", {b, l});
    } else {
      call.require_shape("initial_states", last, "(b, d, W-1)", states);
    }
  }
};

// Where a node's cotangents are, and its gradients go.
struct NodeGradients {
  Sequence dout, dfinal;
  MutableSequence dx;
  void *dweight = nullptr, *dbias = nullptr, *dinitial = nullptr;
};

// What a binding gives: Passes::forward(context, problem, forward) and Passes::backward(context,
// problem, gradients), of a problem that is not empty, on a Passes::Context.
template <class Passes, Dtype DTYPE, bool PACKED>
void forward_node(const typename Passes::Context& context) {
  const Inputs inputs(context, 0, PACKED, DTYPE);
  const Problem& p = inputs.problem;
  void* out = context.output(0, inputs.x.shape);
  void* final_states = context.output(1, inputs.states);
  if (inputs.empty()) return;
  Passes::forward(context, p, Forward{{out, p.x.batch, p.x.channel, 1}, final_states});
}

template <class Passes, Dtype DTYPE, bool PACKED>
void backward_node(const typename Passes::Context& context) {
  using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;
  const Tensor dout = context.input(0), dfinal = context.input(1);
  const Inputs inputs(context, 2, PACKED, DTYPE);
  const Problem& p = inputs.problem;
  context.require_shape("dout", dout, "x's shape", inputs.x.shape);
  context.require_shape("dfinal_states", dfinal, "(b, d, W-1)", inputs.states);

  NodeGradients g;
  g.dout = Inputs::sequence(dout);
  g.dfinal = Inputs::sequence(dfinal);
  g.dx = {context.output(0, inputs.x.shape), p.x.batch, p.x.channel, 1};
  g.dweight = context.output(1, inputs.weight.shape);
  g.dbias = context.output(2, inputs.bias.shape);
  if (!PACKED) g.dinitial = context.output(3, inputs.states);
  if (!inputs.empty()) return Passes::backward(context, p, g);
  context.clear(g.dweight, inputs.weight.shape, sizeof(Real));
  context.clear(g.dbias, inputs.bias.shape, sizeof(Real));
}

template <class Passes, Dtype DTYPE, bool PACKED>
void add(ort::Type stored, ort::Type wide, const char* name, const char* backward_name) {
  const ort::Type last = PACKED ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 : stored;
  const std::vector<ort::Type> inputs{stored, wide, wide, last};
  std::vector<ort::Type> backward_inputs{stored, stored};
  backward_inputs.insert(backward_inputs.end(), inputs.begin(), inputs.end());
  std::vector<ort::Type> gradients = inputs;
  if (PACKED) gradients.pop_back();
  const std::vector<const char*> attributes{"silu"};
  auto& ops = ort::ops();
  ops.emplace_back(name, inputs, std::vector{stored, stored}, attributes,
                   forward_node<Passes, DTYPE, PACKED>);
  ops.emplace_back(backward_name, backward_inputs, gradients, attributes,
                   backward_node<Passes, DTYPE, PACKED>);
}

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
    add<Passes, DTYPE, false>(stored, wide, "causal_conv1d", "causal_conv1d_backward");
    add<Passes, DTYPE, true>(stored, wide, "causal_conv1d_packed",
                             "causal_conv1d_packed_backward");
  });
}

}  // namespace fuseport::causal_conv1d
