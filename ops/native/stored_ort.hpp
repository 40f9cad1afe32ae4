// Nodes of linear layers whose weight is stored, as custom ops of ONNX Runtime: what ops have alike, on
// the CPU and on CUDA. All tensors are contiguous.
//
// An op's `Inputs` is made of a call and a dtype, has the first tensor, `first`, its problem, and
// check(call, name, columns, out), which sets that; and it says which input the bias is, BIAS. A
// binding has Passes::forward(context, problem, forward) and Passes::backward(context, problem,
// backward), on a Passes::Context.
#pragma once

#include <string>

#include "native/ort.hpp"
#include "native/stored_weight.hpp"

namespace fuseport::stored {

// Sets the sizes of a problem whose first input is x or dout, of so many columns.
inline void set_sizes(const ort::Call& call, const ort::Tensor& first, const char* name,
                      int64_t columns, int64_t out, Sizes& p) {
  call.require(!first.shape.empty() && first.shape.back() == columns, name,
               "of " + std::to_string(columns) + " columns", ort::text(first.shape));
  p.rows = ort::elements(ort::Shape(first.shape.begin(), first.shape.end() - 1));
  p.out = out;
}

// So many numbers in rows of so many, or an error that names what is too large.
inline int64_t product_of(const ort::Call& call, const char* name, int64_t a, int64_t b,
                          int64_t spare) {
  int64_t values = 0;
  const bool over = __builtin_mul_overflow(a, b, &values) || values > INT64_MAX - spare;
  call.require(!over, name, "such that the weight can be in memory", b);
  return values;
}

inline ort::Shape with_columns(const ort::Tensor& first, int64_t columns) {
  ort::Shape shape = first.shape;
  shape.back() = columns;
  return shape;
}

template <class Inputs, class Passes, Dtype DTYPE>
void forward_node(const typename Passes::Context& context) {
  Inputs inputs(context, DTYPE);
  const ort::Tensor bias = context.input(Inputs::BIAS);
  context.require(bias.shape.size() == 1, "bias", "(out_features,)", ort::text(bias.shape));
  inputs.check(context, "x", inputs.problem.in, bias.shape[0]);
  void* out = context.output(0, with_columns(inputs.first, bias.shape[0]));
  const Rows rows{inputs.first.data, inputs.problem.in, 1};
  Passes::forward(context, inputs.problem, Forward{rows, bias.data, out});
}

template <class Inputs, class Passes, Dtype DTYPE>
void backward_node(const typename Passes::Context& context) {
  Inputs inputs(context, DTYPE);
  context.require(!inputs.first.shape.empty(), "dout", "(..., out_features)", "()");
  const int64_t columns = inputs.first.shape.back();
  inputs.check(context, "dout", columns, columns);
  void* dx = context.output(0, with_columns(inputs.first, inputs.problem.in));
  void* dbias = context.output(1, {columns});
  const Rows rows{inputs.first.data, columns, 1};
  Passes::backward(context, inputs.problem, Backward{rows, dx, dbias});
}

// The binding of an op's kernels for the CPU.
template <class Problem, const Kernels<Problem>& (*KERNELS)()>
struct OnCpu {
  using Context = ort::Context;

  static void forward(const Context& context, const Problem& p, const Forward& f) {
    run(context, KERNELS(), p, f);
  }

  static void backward(const Context& context, const Problem& p, const Backward& b) {
    run(context, KERNELS(), p, b);
  }
};

}  // namespace fuseport::stored
