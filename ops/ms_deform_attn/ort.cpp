// Deformable attention as custom ops of ONNX Runtime: the nodes that onnx.py writes, on the CPU.
// Locations and weights are of the sums' type; all tensors are contiguous.
#include <string>

#include "ms_deform_attn/kernel.hpp"
#include "ms_deform_attn/levels.hpp"
#include "native/ort.hpp"

namespace fuseport::ms_deform_attn {
namespace {

using ort::Context;
using ort::Shape;
using ort::Tensor;
using ort::text;

// The inputs of a node, from its input `first` on; they fit each other.
struct Inputs {
  Tensor value, shapes, starts, locations, weights;
  Shape out;
  Problem problem;

  Inputs(const Context& context, size_t first, Dtype dtype) {
    for (Tensor* t : {&value, &shapes, &starts, &locations, &weights}) *t = context.input(first++);
    // The checks of shapes.py but for those of dtypes: ONNX Runtime itself checks these.
    context.require(value.shape.size() == 4, "value", "(b, s, h, c)", text(value.shape));
    context.require(locations.shape.size() == 6, "sampling_locations", "(b, q, h, L, P, 2)",
                    text(locations.shape));
    const int64_t b = value.shape[0], h = value.shape[2], c = value.shape[3];
    const int64_t q = locations.shape[1], L = locations.shape[3], P = locations.shape[4];
    context.require_shape("sampling_locations", locations, "(b, q, h, L, P, 2)",
                          {b, q, h, L, P, 2});
    context.require_shape("attention_weights", weights, "(b, q, h, L, P)", {b, q, h, L, P});
    context.require_shape("value_spatial_shapes", shapes, "(L, 2)", {L, 2});
    context.require_shape("value_level_start_index", starts, "(L,)", {L});
    Problem& p = problem;
    p.dtype = dtype;
    p.wide_points = true;
    p.batches = b;
    p.positions = value.shape[1];
    p.heads = h;
    p.channels = c;
    p.queries = q;
    p.levels = L;
    p.points = P;
    p.value = value.data;
    p.shapes = static_cast<const int64_t*>(shapes.data);
    p.starts = static_cast<const int64_t*>(starts.data);
    p.locations = locations.data;
    p.weights = weights.data;
    const Levels levels{p.shapes, p.starts, L, p.positions};
    levels.check([&](bool holds, const std::string& name, const std::string& expected,
                     const std::string& got) {
      context.require(holds, name.c_str(), expected, got);
    });
    out = {b, q, h * c};
  }
};

template <Dtype DTYPE>
void forward(const Context& context) {
  const Inputs inputs(context, 0, DTYPE);
  void* out = context.output(0, inputs.out);
  if (ort::elements(inputs.out) > 0) run(context, inputs.problem, Forward{out});
}

template <Dtype DTYPE>
void backward(const Context& context) {
  using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;
  constexpr size_t STORED = DTYPE == Dtype::float64 ? 8 : DTYPE == Dtype::float32 ? 4 : 2;
  const Tensor dout = context.input(0);
  const Inputs inputs(context, 1, DTYPE);
  context.require_shape("dout", dout, "(b, q, h*c)", inputs.out);
  const Backward gradients{dout.data, context.output(0, inputs.value.shape),
                           context.output(1, inputs.locations.shape),
                           context.output(2, inputs.weights.shape)};
  if (ort::elements(inputs.out) > 0) return run(context, inputs.problem, gradients);
  ort::clear(gradients.dvalue, inputs.value.shape, STORED);
  ort::clear(gradients.dlocations, inputs.locations.shape, sizeof(Real));
  ort::clear(gradients.dweights, inputs.weights.shape, sizeof(Real));
}

template <Dtype DTYPE>
void add(ort::Type stored, ort::Type wide) {
  constexpr ort::Type integer = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  const std::vector<const char*> attributes;
  auto& ops = ort::ops();
  ops.emplace_back("ms_deform_attn", std::vector{stored, integer, integer, wide, wide},
                   std::vector{stored}, attributes, forward<DTYPE>);
  ops.emplace_back("ms_deform_attn_backward",
                   std::vector{stored, stored, integer, integer, wide, wide},
                   std::vector{stored, wide, wide}, attributes, backward<DTYPE>);
}

[[maybe_unused]] const bool added = ort::for_each_dtype(
    []<Dtype DTYPE>(ort::Type stored, ort::Type wide) { add<DTYPE>(stored, wide); });

}  // namespace
}  // namespace fuseport::ms_deform_attn
