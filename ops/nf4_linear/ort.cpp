// The layer as custom ops of ONNX Runtime: the nodes that onnx.py writes, on the CPU. All tensors
// are contiguous.
#include "native/ort.hpp"
#include "nf4_linear/binding.hpp"

namespace fuseport::nf4_linear {
namespace {

using ort::Context;
using ort::Shape;
using ort::Tensor;
using ort::text;

// The problem of a node whose first input is x or dout, of so many columns, and whose next two are
// the weight's; they fit each other. ONNX Runtime itself checks dtypes.
struct Inputs {
  Tensor first, packed, absmax;
  Problem problem;
  Rows rows;

  Inputs(const Context& context, Dtype dtype) {
    first = context.input(0);
    packed = context.input(1);
    absmax = context.input(2);
    problem.dtype = dtype;
    problem.in = context.attributes[0];
  }

  void check(const Context& context, const char* name, int64_t columns, int64_t out) {
    const int64_t block = context.attributes[1];
    Problem& p = problem;
    context.require(!first.shape.empty() && first.shape.back() == columns, name,
                    "of " + std::to_string(columns) + " columns", text(first.shape));
    const bool power = block >= 16 && (block & (block - 1)) == 0;
    context.require(power, "block_size", "a power of two from 16 up", block);
    context.require(p.in >= 0, "in_features", "not negative", p.in);
    int64_t values = 0;
    const bool over = __builtin_mul_overflow(out, p.in, &values) || values > INT64_MAX - block;
    context.require(!over, "in_features", "such that the weight can be in memory", p.in);
    context.require_shape("packed", packed, "(out_features*in_features/2,)", {(values + 1) / 2});
    context.require_shape("absmax", absmax, "(out_features*in_features/block_size,)",
                          {(values + block - 1) / block});
    const Shape leading(first.shape.begin(), first.shape.end() - 1);
    p.rows = ort::elements(leading);
    p.out = out;
    p.block_shift = shift_of(block);
    p.packed = static_cast<const uint8_t*>(packed.data);
    p.absmax = absmax.data;
    rows = {first.data, columns, 1};
  }

  Shape with_columns(int64_t columns) const {
    Shape shape = first.shape;
    shape.back() = columns;
    return shape;
  }
};

template <Dtype DTYPE>
void forward(const Context& context) {
  Inputs inputs(context, DTYPE);
  const Tensor bias = context.input(3);
  context.require(bias.shape.size() == 1, "bias", "(out_features,)", text(bias.shape));
  inputs.check(context, "x", inputs.problem.in, bias.shape[0]);
  void* out = context.output(0, inputs.with_columns(bias.shape[0]));
  run_forward(context, inputs.problem, {inputs.rows, bias.data, out});
}

template <Dtype DTYPE>
void backward(const Context& context) {
  Inputs inputs(context, DTYPE);
  context.require(!inputs.first.shape.empty(), "dout", "(..., out_features)", "()");
  const int64_t columns = inputs.first.shape.back();
  inputs.check(context, "dout", columns, columns);
  void* dx = context.output(0, inputs.with_columns(inputs.problem.in));
  void* dbias = context.output(1, {columns});
  run_backward(context, inputs.problem, {inputs.rows, dx, dbias});
}

struct Add {
  template <Dtype DTYPE>
  void operator()(ort::Type stored, ort::Type wide) const {
    constexpr ort::Type byte = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    const std::vector<const char*> attributes{"in_features", "block_size"};
    ort::ops().emplace_back("nf4_linear", std::vector{stored, byte, wide, stored},
                            std::vector{stored}, attributes, forward<DTYPE>);
    ort::ops().emplace_back("nf4_linear_backward", std::vector{stored, byte, wide},
                            std::vector{stored, stored}, attributes, backward<DTYPE>);
  }
};

[[maybe_unused]] const bool added = ort::for_each_dtype(Add{});

}  // namespace
}  // namespace fuseport::nf4_linear
