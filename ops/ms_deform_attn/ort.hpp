// Deformable attention as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings
// on the CPU and on CUDA have them. Locations and weights are of the sums' type; all tensors are
// contiguous.
#pragma once

#include <vector>

#include "ms_deform_attn/kernel.hpp"
#include "native/ort.hpp"

namespace fuseport::ms_deform_attn {

using ort::Shape;
using ort::Tensor;
using ort::text;

// The inputs of a node, from its input `first` on; their shapes fit each other.
struct Inputs {
  Tensor value, shapes, starts, locations, weights;
  Shape out;
  Problem problem;

  Inputs(const ort::Call& call, size_t first, Dtype dtype) {
    for (Tensor* t : {&value, &shapes, &starts, &locations, &weights}) *t = call.input(first++);
    // The checks of shapes.py but for those of dtypes: ONNX Runtime itself checks these.
    call.require(value.shape.size() == 4, "value", "(b, s, h, c)", text(value.shape));
    call.require(locations.shape.size() == 6, "sampling_locations", "(b, q, h, L, P, 2)",
                 text(locations.shape));
    const int64_t b = value.shape[0], h = value.shape[2], c = value.shape[3];
    const int64_t q = locations.shape[1], L = locations.shape[3], P = locations.shape[4];
    call.require_shape("sampling_locations", locations, "(b, q, h, L, P, 2)",
                       {b, q, h, L, P, 2});
    call.require_shape("attention_weights", weights, "(b, q, h, L, P)", {b, q, h, L, P});
    call.require_shape("value_spatial_shapes", shapes, "(L, 2)", {L, 2});
    call.require_shape("value_level_start_index", starts, "(L,)", {L});
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
    out = {b, q, h * c};
  }
};

// The cotangent of a node of the backward, its input 0, and its outputs.
template <class Context>
Backward gradients(const Context& context, const Inputs& inputs) {
  const Tensor dout = context.input(0);
  context.require_shape("dout", dout, "(b, q, h*c)", inputs.out);
  return {dout.data, context.output(0, inputs.value.shape),
          context.output(1, inputs.locations.shape), context.output(2, inputs.weights.shape)};
}

// Adds the nodes of a dtype, for the provider of the context that both passes take.
template <class Context>
void add(ort::Type stored, ort::Type wide, void (*forward)(const Context&),
         void (*backward)(const Context&)) {
  constexpr ort::Type integer = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  const std::vector<const char*> no_attributes;
  ort::ops().emplace_back("ms_deform_attn", std::vector{stored, integer, integer, wide, wide},
                          std::vector{stored}, no_attributes, forward);
  ort::ops().emplace_back("ms_deform_attn_backward",
                          std::vector{stored, stored, integer, integer, wide, wide},
                          std::vector{stored, wide, wide}, no_attributes, backward);
}

}  // namespace fuseport::ms_deform_attn
