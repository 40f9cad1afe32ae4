// The loss as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on the CPU and
// on CUDA have them. All tensors are contiguous.
#pragma once

#include <cmath>
#include <vector>

#include "native/ort.hpp"
#include "softmax_cross_entropy/kernel.hpp"

namespace fuseport::softmax_cross_entropy {

using ort::Shape;
using ort::text;

// The inputs of a node, which begin at its input `first`; they fit each other. Of targets the shape is
// known here, and what a binding looks at.
inline Problem problem_of(const ort::Call& call, size_t first, Dtype dtype) {
  const ort::Tensor logits = call.input(first), targets = call.input(first + 1);
  call.require(logits.shape.size() == 2, "logits", "(n, V)", text(logits.shape));
  const int64_t rows = logits.shape[0], classes = logits.shape[1];
  call.require(classes >= 1, "logits", "of one class or more", text(logits.shape));
  call.require_shape("targets", targets, "(n,)", {rows});
  const double smoothing =
      std::ldexp(static_cast<double>(call.attributes[2]), static_cast<int>(call.attributes[3]));
  call.require(smoothing >= 0 && smoothing <= 1, "label_smoothing", "in 0 to 1", smoothing);
  return {dtype,   rows,
          classes, logits.data,
          classes, static_cast<const int64_t*>(targets.data),
          call.attributes[1], smoothing};
}

// What a binding gives: Passes::check(context, problem) of targets, and Passes::forward(context,
// problem, forward) and Passes::backward(context, problem, backward), on a Passes::Context.
template <class Passes, Dtype DTYPE, class Real>
void forward_node(const typename Passes::Context& context) {
  const Problem p = problem_of(context, 0, DTYPE);
  Passes::check(context, p);
  const auto saved = context.template allocate<Real>({2, p.rows});
  Passes::forward(context, p,
                  {context.output(0, {p.rows}), saved.data(), saved.data() + p.rows});
}

// Largest and total of each row are computed again: the node of the forward pass does not give them.
template <class Passes, Dtype DTYPE, class Real>
void backward_node(const typename Passes::Context& context) {
  const Problem p = problem_of(context, 1, DTYPE);
  const ort::Tensor dlosses = context.input(0);
  context.require_shape("dlosses", dlosses, "(n,)", {p.rows});
  Passes::check(context, p);
  const auto saved = context.template allocate<Real>({3, p.rows});
  Real *const losses = saved.data(), *const largest = losses + p.rows;
  Real* const total = largest + p.rows;
  Passes::forward(context, p, {losses, largest, total});
  Passes::backward(context, p,
                   {dlosses.data, largest, total, context.output(0, {p.rows, p.classes})});
}

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
    using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;
    const ort::Type targets = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    const std::vector<const char*> attributes{"compute_type", "ignore_index", "smoothing_mantissa",
                                              "smoothing_exponent"};
    auto& ops = ort::ops();
    ops.emplace_back("softmax_cross_entropy", std::vector{stored, targets}, std::vector{wide},
                     attributes, forward_node<Passes, DTYPE, Real>);
    ops.emplace_back("softmax_cross_entropy_backward", std::vector{wide, stored, targets},
                     std::vector{stored}, attributes, backward_node<Passes, DTYPE, Real>);
  });
}

}  // namespace fuseport::softmax_cross_entropy
