// The layer as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on the
// CPU and on CUDA have them. All tensors are contiguous.
#pragma once

#include <string>
#include <vector>

#include "native/ort.hpp"
#include "nf4_linear/binding.hpp"

namespace fuseport::nf4_linear {

// The problem of a node whose first input is x or dout, of so many columns, and whose next two are
// the weight's; they fit each other. ONNX Runtime itself checks dtypes.
struct Inputs {
  ort::Tensor first, packed, absmax;
  Problem problem;
  Rows rows;

  Inputs(const ort::Call& call, Dtype dtype) {
    first = call.input(0);
    packed = call.input(1);
    absmax = call.input(2);
    problem.dtype = dtype;
    problem.in = call.attributes[0];
  }

  void check(const ort::Call& call, const char* name, int64_t columns, int64_t out) {
    const int64_t block = call.attributes[1], quant_type = call.attributes[2];
    Problem& p = problem;
    call.require(!first.shape.empty() && first.shape.back() == columns, name,
                 "of " + std::to_string(columns) + " columns", ort::text(first.shape));
    const bool power = block >= 16 && (block & (block - 1)) == 0;
    call.require(power, "block_size", "a power of two from 16 up", block);
    const bool known = quant_type == 0 || quant_type == 1;
    call.require(known, "quant_type", "0 (FP4) or 1 (NF4)", quant_type);
    call.require(p.in >= 0, "in_features", "not negative", p.in);
    int64_t values = 0;
    const bool over = __builtin_mul_overflow(out, p.in, &values) || values > INT64_MAX - block;
    call.require(!over, "in_features", "such that the weight can be in memory", p.in);
    call.require_shape("packed", packed, "(out_features*in_features/2,)", {(values + 1) / 2});
    call.require_shape("absmax", absmax, "(out_features*in_features/block_size,)",
                       {(values + block - 1) / block});
    const ort::Shape leading(first.shape.begin(), first.shape.end() - 1);
    p.rows = ort::elements(leading);
    p.out = out;
    p.block_shift = shift_of(block);
    p.quant_type = static_cast<int>(quant_type);
    p.packed = static_cast<const uint8_t*>(packed.data);
    p.absmax = absmax.data;
    rows = {first.data, columns, 1};
  }

  ort::Shape with_columns(int64_t columns) const {
    ort::Shape shape = first.shape;
    shape.back() = columns;
    return shape;
  }
};

// What a binding gives: Passes::forward(context, problem, forward) and Passes::backward(context,
// problem, backward), on a Passes::Context.
template <class Passes, Dtype DTYPE>
void forward_node(const typename Passes::Context& context) {
  Inputs inputs(context, DTYPE);
  const ort::Tensor bias = context.input(3);
  context.require(bias.shape.size() == 1, "bias", "(out_features,)", ort::text(bias.shape));
  inputs.check(context, "x", inputs.problem.in, bias.shape[0]);
  void* out = context.output(0, inputs.with_columns(bias.shape[0]));
  Passes::forward(context, inputs.problem, Forward{inputs.rows, bias.data, out});
}

template <class Passes, Dtype DTYPE>
void backward_node(const typename Passes::Context& context) {
  Inputs inputs(context, DTYPE);
  context.require(!inputs.first.shape.empty(), "dout", "(..., out_features)", "()");
  const int64_t columns = inputs.first.shape.back();
  inputs.check(context, "dout", columns, columns);
  void* dx = context.output(0, inputs.with_columns(inputs.problem.in));
  void* dbias = context.output(1, {columns});
  Passes::backward(context, inputs.problem, Backward{inputs.rows, dx, dbias});
}

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
    constexpr ort::Type byte = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    const std::vector<const char*> attributes{"in_features", "block_size", "quant_type"};
    const std::vector<int64_t> defaults{1};
    ort::ops().emplace_back("nf4_linear", std::vector{stored, byte, wide, stored},
                            std::vector{stored}, attributes, forward_node<Passes, DTYPE>, defaults);
    ort::ops().emplace_back("nf4_linear_backward", std::vector{stored, byte, wide},
                            std::vector{stored, stored}, attributes,
                            backward_node<Passes, DTYPE>, defaults);
  });
}

}  // namespace fuseport::nf4_linear
