// The causal convolution as custom ops of ONNX Runtime: the nodes that onnx.py writes, on the CPU.
// Weight and bias are of the sums' type; all tensors are contiguous.
#include "causal_conv1d/binding.hpp"
#include "causal_conv1d/kernel.hpp"
#include "native/ort.hpp"

namespace fuseport::causal_conv1d {
namespace {

using ort::Context;
using ort::Shape;
using ort::Tensor;
using ort::text;

// The inputs of a convolution, which begin at a node's input `first`; they fit each other. Where x
// is empty, strides and sizes mean nothing, and no kernel is run.
struct Inputs {
  Tensor x, weight, bias, last;  // `last` is initial_states or seq_idx
  Shape states;                  // (b, d, W-1)
  Problem problem;

  Inputs(const Context& context, size_t first, bool packed, Dtype dtype) {
    for (Tensor* t : {&x, &weight, &bias, &last}) *t = context.input(first++);
    check(context, packed);
    Problem& p = problem;
    p.dtype = dtype;
    p.wide_weight = true;
    p.silu = context.attributes[0] != 0;
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
  void check(const Context& context, bool packed) {
    context.require(x.shape.size() == 3, "x", "(b, d, l)", text(x.shape));
    const int64_t b = x.shape[0], d = x.shape[1], l = x.shape[2];
    context.require(weight.shape.size() == 2, "weight", "(d, W)", text(weight.shape));
    const int64_t width = weight.shape[1];
    context.require(width >= 1, "weight", "of width 1 or more", width);
    context.require_shape("weight", weight, "(d, W)", {d, width});
    context.require_shape("bias", bias, "(d,)", {d});
    states = {b, d, width - 1};
    if (packed) {
      context.require_shape("seq_idx", last, "(b, l)", {b, l});
    } else {
      context.require_shape("initial_states", last, "(b, d, W-1)", states);
    }
  }
};

template <Dtype DTYPE, bool PACKED>
void forward(const Context& context) {
  const Inputs inputs(context, 0, PACKED, DTYPE);
  const Problem& p = inputs.problem;
  void* out = context.output(0, inputs.x.shape);
  void* final_states = context.output(1, inputs.states);
  if (inputs.empty()) return;
  const Forward forward{{out, p.x.batch, p.x.channel, 1}, final_states};
  const Kernels& k = kernels();
  for_each_unit(context, p,
                [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
}

template <Dtype DTYPE, bool PACKED>
void backward(const Context& context) {
  using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;
  const Tensor dout = context.input(0), dfinal = context.input(1);
  const Inputs inputs(context, 2, PACKED, DTYPE);
  const Problem& p = inputs.problem;
  context.require_shape("dout", dout, "x's shape", inputs.x.shape);
  context.require_shape("dfinal_states", dfinal, "(b, d, W-1)", inputs.states);

  Backward backward;
  backward.dout = Inputs::sequence(dout);
  backward.dfinal = Inputs::sequence(dfinal);
  backward.dx = {context.output(0, inputs.x.shape), p.x.batch, p.x.channel, 1};
  backward.dweight = context.output(1, inputs.weight.shape);
  backward.dbias = context.output(2, inputs.bias.shape);
  if (!PACKED) backward.dinitial = context.output(3, inputs.states);
  if (inputs.empty()) {
    ort::clear(backward.dweight, inputs.weight.shape, sizeof(Real));
    ort::clear(backward.dbias, inputs.bias.shape, sizeof(Real));
    return;
  }
  const auto weight_parts = context.allocate<double>({p.batches, p.channels, p.width});
  const auto bias_parts = context.allocate<double>({p.batches, p.channels});
  backward.weight_parts = weight_parts.data();
  backward.bias_parts = bias_parts.data();
  const Kernels& k = kernels();
  for_each_unit(context, p,
                [&](int64_t unit, void* scratch) { k.backward(p, backward, unit, scratch); });
  k.finish(p, backward);
}

template <Dtype DTYPE, bool PACKED>
void add(ort::Type stored, ort::Type wide, const char* name, const char* backward_name) {
  const ort::Type last = PACKED ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 : stored;
  const std::vector<ort::Type> inputs{stored, wide, wide, last};
  std::vector<ort::Type> backward_inputs{stored, stored};
  backward_inputs.insert(backward_inputs.end(), inputs.begin(), inputs.end());
  std::vector<ort::Type> gradients = inputs;
  if (PACKED) gradients.pop_back();
  const std::vector<const char*> attributes{"silu"};
  auto& ops = ort::ops();
  ops.emplace_back(name, inputs, std::vector{stored, stored}, attributes, forward<DTYPE, PACKED>);
  ops.emplace_back(backward_name, backward_inputs, gradients, attributes,
                   backward<DTYPE, PACKED>);
}

template <Dtype DTYPE>
void add(ort::Type stored, ort::Type wide) {
  add<DTYPE, false>(stored, wide, "causal_conv1d", "causal_conv1d_backward");
  add<DTYPE, true>(stored, wide, "causal_conv1d_packed", "causal_conv1d_packed_backward");
}

[[maybe_unused]] const bool added = ort::for_each_dtype(
    []<Dtype DTYPE>(ort::Type stored, ort::Type wide) { add<DTYPE>(stored, wide); });

}  // namespace
}  // namespace fuseport::causal_conv1d
