// The rotary embedding for torch: schemas, CPU kernels, autograd.
#include "rotary_embedding/torch.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace fuseport::rotary_embedding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct OnCpu {
  static void forward(const char*, const Tensor&, const Problem& p, void* out) {
    for_each_unit(Host{}, p.batch * p.blocks(), 4 * numbers(p), 0,
                  [&](int64_t unit, void*) { kernels().forward(p, out, unit); });
  }
  static void backward(const char*, const Tensor&, const Problem& p, const Backward& g) {
    const int64_t tables = p.of_batch ? p.batch : 1;
    const int64_t scratch = 2 * p.pairs * p.positions_per_unit() * (int64_t)sizeof(double);
    for_each_unit(Host{}, tables * p.blocks(), 8 * numbers(p), scratch,
                  [&](int64_t unit, void* memory) { kernels().backward(p, g, unit, memory); });
  }

 private:
  static int64_t numbers(const Problem& p) { return p.batch * p.heads * p.length * p.channels; }
};

using Cpu = Operators<OnCpu>;

// Autograd sees operators only, by their names, so that traces hold them whole and fakes stand in
// for them.
struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin,
                        bool interleaved) {
    static const auto op = operator_named<decltype(Cpu::forward)>("fuseport::rotary_embedding");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, cos, sin});
    ctx->saved_data["interleaved"] = interleaved;
    return op.call(x, cos, sin, interleaved);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op =
        operator_named<decltype(Cpu::backward)>("fuseport::rotary_embedding_backward");
    const variable_list s = ctx->get_saved_variables();
    auto [dx, dcos, dsin] =
        op.call(cotangents[0], s[0], s[1], s[2], ctx->saved_data["interleaved"].toBool());
    return {dx, dcos, dsin, Tensor()};
  }
};

Tensor autograd(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  return RotaryFunction::apply(x, cos, sin, interleaved);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def("rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor out");
  m.def(
      "rotary_embedding_backward(Tensor dout, Tensor x, Tensor cos, Tensor sin, bool interleaved) "
      "-> (Tensor dx, Tensor dcos, Tensor dsin)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("rotary_embedding", Cpu::forward);
  m.impl("rotary_embedding_backward", Cpu::backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  m.impl("rotary_embedding", autograd);
  // Gradients of gradients: they run as they are, and refuse when they are differentiated.
  m.impl("rotary_embedding_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::rotary_embedding
