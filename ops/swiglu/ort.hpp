// SwiGLU as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on the CPU and
// on CUDA have them. All tensors are contiguous.
#pragma once

#include <type_traits>
#include <vector>

#include "native/ort.hpp"
#include "swiglu/kernel.hpp"

namespace fuseport::swiglu {

using ort::Shape;
using ort::text;

// The inputs of a node, which begin at its input `first`; they fit each other.
struct NodeInputs {
  ort::Tensor gate;
  Shape half;  // of one of the two
  Problem problem;

  NodeInputs(const ort::Call& call, size_t first, bool packed, Dtype dtype) {
    gate = call.input(first);
    half = gate.shape;
    const char* name = packed ? "x" : "gate";
    call.require(!half.empty(), name, "(..., d)", text(half));
    if (packed) {
      call.require(half.back() % 2 == 0, name, "of an even last size", half.back());
      half.back() /= 2;
    }
    Problem& p = problem;
    p.dtype = dtype;
    p.channels = half.back();
    if (const int64_t count = ort::elements(half)) p.rows = count / p.channels;
    const int64_t stride = packed ? 2 * p.channels : p.channels;
    p.gate = {gate.data, stride};
    if (packed) {
      p.up = {second_half<const void>(gate.data), stride};
    } else {
      const ort::Tensor up = call.input(first + 1);
      call.require_shape("up", up, "gate's shape", half);
      p.up = {up.data, stride};
    }
  }

  // Of the first row of rows that hold both.
  template <class Void>
  Void* second_half(Void* data) const {
    const int64_t size = problem.dtype == Dtype::float64   ? 8
                         : problem.dtype == Dtype::float32 ? 4
                                                           : 2;
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return data ? static_cast<Byte*>(data) + size * problem.channels : nullptr;
  }
};

// What a binding gives: Passes::forward(context, problem, out) and Passes::backward(context, problem,
// backward), of what may be empty, on a Passes::Context.
template <class Passes, Dtype DTYPE, bool PACKED>
void forward_node(const typename Passes::Context& context) {
  const NodeInputs inputs(context, 0, PACKED, DTYPE);
  const Problem& p = inputs.problem;
  const MutableRows out{context.output(0, inputs.half), p.channels};
  Passes::forward(context, p, out);
}

template <class Passes, Dtype DTYPE, bool PACKED>
void backward_node(const typename Passes::Context& context) {
  const NodeInputs inputs(context, 1, PACKED, DTYPE);
  const Problem& p = inputs.problem;
  const ort::Tensor dout = context.input(0);
  context.require_shape("dout", dout, "the output's shape", inputs.half);
  void* dgate = context.output(0, inputs.gate.shape);
  void* dup = PACKED ? inputs.second_half(dgate) : context.output(1, inputs.half);
  const int64_t stride = p.gate.stride;
  const Backward b{{dout.data, p.channels}, {dgate, stride}, {dup, stride}};
  Passes::backward(context, p, b);
}

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type) {
    const std::vector one{stored}, two{stored, stored}, three{stored, stored, stored};
    const std::vector<const char*> attributes{"compute_type"};
    auto& ops = ort::ops();
    ops.emplace_back("swiglu", two, one, attributes, forward_node<Passes, DTYPE, false>);
    ops.emplace_back("swiglu_backward", three, two, attributes,
                     backward_node<Passes, DTYPE, false>);
    ops.emplace_back("swiglu_packed", one, one, attributes, forward_node<Passes, DTYPE, true>);
    ops.emplace_back("swiglu_packed_backward", two, one, attributes,
                     backward_node<Passes, DTYPE, true>);
  });
}

}  // namespace fuseport::swiglu
