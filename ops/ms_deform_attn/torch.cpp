// Deformable attention as operators of torch: schemas, CPU kernels, gradients. No Python in here, so
// that a C++ program can open the library and run artifacts that use the operators.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "ms_deform_attn/checks.hpp"
#include "ms_deform_attn/kernel.hpp"
#include "ms_deform_attn/torch.hpp"
#include "native/autograd.hpp"
#include "native/empty.hpp"

namespace fuseport::ms_deform_attn {
namespace {

Tensor attention(const Tensor& value, const Tensor& shapes, const Tensor& starts,
                 const Tensor& locations, const Tensor& weights) {
  const Check check("ms_deform_attn", value);
  check.inputs(shapes, starts, locations, weights);
  const Inputs inputs(value, shapes, starts, locations, weights);
  check.levels(inputs.shapes, inputs.starts);
  const Problem& p = inputs.problem;
  const Tensor out = empty_tensor({p.batches, p.queries, p.heads * p.channels}, value.options());
  run(Host{}, p, Forward{out.mutable_data_ptr()});
  return out;
}

Gradients attention_backward(const Tensor& dout, const Tensor& value, const Tensor& shapes,
                             const Tensor& starts, const Tensor& locations,
                             const Tensor& weights) {
  const Check check("ms_deform_attn_backward", value);
  check.inputs(shapes, starts, locations, weights);
  check.cotangent(dout, locations);
  const Inputs inputs(value, shapes, starts, locations, weights);
  check.levels(inputs.shapes, inputs.starts);
  const Tensor given = dout.contiguous();
  const Tensor dvalue = empty_tensor(value.sizes(), value.options());
  const Tensor dlocations = empty_tensor(locations.sizes(), locations.options());
  const Tensor dweights = empty_tensor(weights.sizes(), weights.options());
  run(Host{}, inputs.problem,
      Backward{given.const_data_ptr(), dvalue.mutable_data_ptr(), dlocations.mutable_data_ptr(),
               dweights.mutable_data_ptr()});
  return {dvalue, dlocations, dweights};
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "ms_deform_attn(Tensor value, Tensor value_spatial_shapes, Tensor value_level_start_index, "
      "Tensor sampling_locations, Tensor attention_weights) -> Tensor out");
  m.def(
      "ms_deform_attn_backward(Tensor dout, Tensor value, Tensor value_spatial_shapes, "
      "Tensor value_level_start_index, Tensor sampling_locations, Tensor attention_weights) "
      "-> (Tensor dvalue, Tensor dsampling_locations, Tensor dattention_weights)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("ms_deform_attn", attention);
  m.impl("ms_deform_attn_backward", attention_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "ms_deform_attn", "ms_deform_attn_backward");
}

}  // namespace
}  // namespace fuseport::ms_deform_attn
