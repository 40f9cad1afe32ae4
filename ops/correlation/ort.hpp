// Correlation as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on the CPU
// and on CUDA have them. All tensors are contiguous, of the dtype of computation.
#pragma once

#include <string>
#include <vector>

#include "correlation/geometry.hpp"
#include "native/ort.hpp"

namespace fuseport::correlation {

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

// Of a node whose inputs from `first` on are the images.
inline Problem problem_of(const ort::Call& call, size_t first, Dtype dtype) {
  const ort::Tensor input1 = call.input(first), input2 = call.input(first + 1);
  Problem p = checked(Look{call}, input1, input2, call.attributes.data());
  p.dtype = dtype;
  p.input1 = input1.data;
  p.input2 = input2.data;
  return p;
}

// What a binding gives: Passes::forward(context, problem, forward) and Passes::backward(context,
// problem, backward), on a Passes::Context.
template <class Passes, Dtype DTYPE>
void forward_node(const typename Passes::Context& context) {
  const Problem p = problem_of(context, 0, DTYPE);
  Passes::forward(context, p, Forward{context.output(0, out_sizes(p))});
}

template <class Passes, Dtype DTYPE>
void backward_node(const typename Passes::Context& context) {
  const Problem p = problem_of(context, 1, DTYPE);
  const ort::Tensor dout = context.input(0);
  check_cotangent(Look{context}, dout, p);
  const ort::Shape image{p.batches, p.channels, p.down.size, p.across.size};
  Backward b;
  b.dout = dout.data;
  b.dinput1 = context.output(0, image);
  b.dinput2 = context.output(1, image);
  Passes::backward(context, p, b);
}

// Adds the op's nodes, for the dtypes of computation.
template <class Passes>
bool add_nodes() {
  const auto both = []<Dtype DTYPE>(ort::Type type) {
    const std::vector<const char*> attributes(OPTIONS, OPTIONS + COUNT);
    auto& ops = ort::ops();
    ops.emplace_back("correlation", std::vector(2, type), std::vector{type}, attributes,
                     forward_node<Passes, DTYPE>);
    ops.emplace_back("correlation_backward", std::vector(3, type), std::vector(2, type),
                     attributes, backward_node<Passes, DTYPE>);
  };
  both.template operator()<Dtype::float32>(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  both.template operator()<Dtype::float64>(ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE);
  return true;
}

}  // namespace fuseport::correlation
