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
  const Inputs inputs(context, 1, DTYPE);
  check_levels(context, inputs.problem);
  const Backward b = gradients(context, inputs);
  if (ort::elements(inputs.out) > 0) return run(context, inputs.problem, b);
  context.clear(b.dvalue, inputs.value.shape, STORED);
  context.clear(b.dlocations, inputs.locations.shape, sizeof(Real));
  context.clear(b.dweights, inputs.weights.shape, sizeof(Real));
}

[[maybe_unused]] const bool added =
    ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
      add(stored, wide, forward<DTYPE>, backward<DTYPE>);
    });

}  // namespace
}  // namespace fuseport::ms_deform_attn
