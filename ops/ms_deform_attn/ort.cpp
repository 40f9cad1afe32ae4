// Deformable attention as custom ops of ONNX Runtime, on the CPU.
#include "ms_deform_attn/ort.hpp"

#include <string>
#include <type_traits>

#include "ms_deform_attn/levels.hpp"

namespace fuseport::ms_deform_attn {
namespace {

using ort::Context;

void check_levels(const Context& context, const Problem& p) {
  const Levels levels{p.shapes, p.starts, p.levels, p.positions};
  levels.check([&](bool holds, const std::string& name, const std::string& expected,
                   const std::string& got) {
    context.require(holds, name.c_str(), expected, got);
  });
}

template <Dtype DTYPE>
void forward(const Context& context) {
  const Inputs inputs(context, 0, DTYPE);
  check_levels(context, inputs.problem);
  void* out = context.output(0, inputs.out);
  if (ort::elements(inputs.out) > 0) run(context, inputs.problem, Forward{out});
}

template <Dtype DTYPE>
void backward(const Context& context) {
  using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;
  constexpr size_t STORED = DTYPE == Dtype::float64 ? 8 : DTYPE == Dtype::float32 ? 4 : 2;
  const Tensor dout = context.input(0);
  const Inputs inputs(context, 1, DTYPE);
  check_levels(context, inputs.problem);
  context.require_shape("dout", dout, "(b, q, h*c)", inputs.out);
  const Backward gradients{dout.data, context.output(0, inputs.value.shape),
                           context.output(1, inputs.locations.shape),
                           context.output(2, inputs.weights.shape)};
  if (ort::elements(inputs.out) > 0) return run(context, inputs.problem, gradients);
  context.clear(gradients.dvalue, inputs.value.shape, STORED);
  context.clear(gradients.dlocations, inputs.locations.shape, sizeof(Real));
  context.clear(gradients.dweights, inputs.weights.shape, sizeof(Real));
}

template <Dtype DTYPE>
void add(ort::Type stored, ort::Type wide) {
  constexpr ort::Type integer = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  add_forward(stored, wide, forward<DTYPE>);
  ort::ops().emplace_back("ms_deform_attn_backward",
                          std::vector{stored, stored, integer, integer, wide, wide},
                          std::vector{stored, wide, wide}, std::vector<const char*>{},
                          backward<DTYPE>);
}

[[maybe_unused]] const bool added = ort::for_each_dtype(
    []<Dtype DTYPE>(ort::Type stored, ort::Type wide) { add<DTYPE>(stored, wide); });

}  // namespace
}  // namespace fuseport::ms_deform_attn
