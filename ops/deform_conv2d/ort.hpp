// Deformable convolution as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings
// on the CPU and on CUDA have them. All tensors are contiguous, of the dtype of computation.
#pragma once

#include <string>
#include <vector>

#include "deform_conv2d/geometry.hpp"
#include "native/ort.hpp"

namespace fuseport::deform_conv2d {

// As geometry.hpp asks for it: ONNX Runtime itself checks dtypes.
struct Look {
  const ort::Call& call;

  Sizes sizes(const ort::Tensor& t) const { return t.shape; }
  std::string text(const Sizes& sizes) const { return ort::text(sizes); }
  void first(const ort::Tensor&) const {}
  void like(const char*, const ort::Tensor&) const {}
  template <class Got>
  void require(bool holds, const char* name, const std::string& expected, const Got& got) const {
    call.require(holds, name, expected, got);
  }
};

// The inputs of a node, from its input `first` on; they fit each other.
struct Inputs {
  ort::Tensor input, offset, mask, weight, bias;
  Problem problem;

  Inputs(const ort::Call& call, size_t first, bool modulated, Dtype dtype) {
    input = call.input(first++);
    offset = call.input(first++);
    if (modulated) mask = call.input(first++);
    weight = call.input(first++);
    bias = call.input(first++);
    const std::vector<int64_t>& a = call.attributes;
    Problem& p = problem;
    p = checked(Look{call}, input, offset, modulated ? &mask : nullptr, weight, bias,
                {a[0], a[1], a[2], a[3], a[4], a[5]});
    p.dtype = dtype;
    p.input = input.data;
    p.offset = offset.data;
    p.mask = mask.data;
    p.weight = weight.data;
    p.bias = bias.data;
  }

  ort::Shape out() const {
    return {problem.batches, problem.outputs, problem.rows, problem.columns};
  }
};

// What a binding gives: Passes::forward(context, problem, forward) and Passes::backward(context,
// problem, backward), on a Passes::Context.
template <class Passes, Dtype DTYPE, bool MODULATED>
void forward_node(const typename Passes::Context& context) {
  const Inputs inputs(context, 0, MODULATED, DTYPE);
  Passes::forward(context, inputs.problem, Forward{context.output(0, inputs.out())});
}

template <class Passes, Dtype DTYPE, bool MODULATED>
void backward_node(const typename Passes::Context& context) {
  const Inputs inputs(context, 1, MODULATED, DTYPE);
  const ort::Tensor dout = context.input(0);
  check_cotangent(Look{context}, dout, inputs.problem);
  size_t next = 0;
  Backward b;
  b.dout = dout.data;
  b.dinput = context.output(next++, inputs.input.shape);
  b.doffset = context.output(next++, inputs.offset.shape);
  if (MODULATED) b.dmask = context.output(next++, inputs.mask.shape);
  b.dweight = context.output(next++, inputs.weight.shape);
  b.dbias = context.output(next++, inputs.bias.shape);
  Passes::backward(context, inputs.problem, b);
}

template <class Passes, Dtype DTYPE, bool MODULATED>
void add(ort::Type type, const char* name, const char* backward_name) {
  const std::vector<const char*> attributes{"stride_h",  "stride_w",   "padding_h",
                                            "padding_w", "dilation_h", "dilation_w"};
  constexpr size_t INPUTS = MODULATED ? 5 : 4;
  const std::vector inputs(INPUTS, type), with_cotangent(INPUTS + 1, type);
  auto& ops = ort::ops();
  ops.emplace_back(name, inputs, std::vector{type}, attributes,
                   forward_node<Passes, DTYPE, MODULATED>);
  ops.emplace_back(backward_name, with_cotangent, inputs, attributes,
                   backward_node<Passes, DTYPE, MODULATED>);
}

// Adds the op's nodes, for the dtypes of computation.
template <class Passes>
bool add_nodes() {
  const auto both = []<Dtype DTYPE>(ort::Type type) {
    add<Passes, DTYPE, false>(type, "deform_conv2d", "deform_conv2d_backward");
    add<Passes, DTYPE, true>(type, "deform_conv2d_modulated", "deform_conv2d_modulated_backward");
  };
  both.template operator()<Dtype::float32>(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  both.template operator()<Dtype::float64>(ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE);
  return true;
}

}  // namespace fuseport::deform_conv2d
