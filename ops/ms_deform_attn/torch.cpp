// Deformable attention as operators of torch: schemas, CPU kernels, gradients. No Python in here, so
// that a C++ program can open the library and run artifacts that use the operators.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "ms_deform_attn/checks.hpp"
#include "ms_deform_attn/kernel.hpp"
#include "ms_deform_attn/torch.hpp"
#include "native/empty.hpp"

namespace fuseport::ms_deform_attn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

// Gradients. Autograd sees operators only, by their names, so that traces hold them whole and fakes
// stand in for them.
struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& value, const Tensor& shapes,
                        const Tensor& starts, const Tensor& locations, const Tensor& weights) {
    static const auto op = operator_named<decltype(attention)>("fuseport::ms_deform_attn");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({value, shapes, starts, locations, weights});
    return op.call(value, shapes, starts, locations, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op =
        operator_named<decltype(attention_backward)>("fuseport::ms_deform_attn_backward");
    const variable_list s = ctx->get_saved_variables();
    auto [dvalue, dlocations, dweights] = op.call(cotangents[0], s[0], s[1], s[2], s[3], s[4]);
    return {dvalue, Tensor(), Tensor(), dlocations, dweights};
  }
};

Tensor attention_autograd(const Tensor& value, const Tensor& shapes, const Tensor& starts,
                          const Tensor& locations, const Tensor& weights) {
  return AttentionFunction::apply(value, shapes, starts, locations, weights);
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
  m.impl("ms_deform_attn", attention_autograd);
  // Gradients of gradients: it runs as it is, and refuses when it is differentiated.
  m.impl("ms_deform_attn_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::ms_deform_attn
