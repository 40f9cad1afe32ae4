// SwiGLU for torch: schemas, CPU kernels, autograd.
#include "swiglu/torch.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace fuseport::swiglu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct OnCpu {
  static void forward(const char*, const Tensor&, const Problem& p, const MutableRows& out) {
    for_each_unit(Host{}, p, [&](int64_t unit) { kernels().forward(p, out, unit); });
  }
  static void backward(const char*, const Tensor&, const Problem& p, const Backward& b) {
    for_each_unit(Host{}, p, [&](int64_t unit) { kernels().backward(p, b, unit); });
  }
};

using Cpu = Operators<OnCpu>;

// Autograd sees operators only, by their names, so that traces hold them whole and fakes stand in
// for them.
struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    static const auto op = operator_named<decltype(Cpu::swiglu)>("fuseport::swiglu");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({gate, up});
    return op.call(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op = operator_named<decltype(Cpu::swiglu_backward)>("fuseport::swiglu_backward");
    const variable_list s = ctx->get_saved_variables();
    auto [dgate, dup] = op.call(cotangents[0], s[0], s[1]);
    return {dgate, dup};
  }
};

struct PackedFunction : torch::autograd::Function<PackedFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    static const auto op = operator_named<decltype(Cpu::packed)>("fuseport::swiglu_packed");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x});
    return op.call(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op =
        operator_named<decltype(Cpu::packed_backward)>("fuseport::swiglu_packed_backward");
    return {op.call(cotangents[0], ctx->get_saved_variables()[0])};
  }
};

Tensor swiglu_autograd(const Tensor& gate, const Tensor& up) {
  return SwigluFunction::apply(gate, up);
}

Tensor packed_autograd(const Tensor& x) { return PackedFunction::apply(x); }

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor out");
  m.def("swiglu_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)");
  m.def("swiglu_packed(Tensor x) -> Tensor out");
  m.def("swiglu_packed_backward(Tensor dout, Tensor x) -> Tensor dx");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("swiglu", Cpu::swiglu);
  m.impl("swiglu_backward", Cpu::swiglu_backward);
  m.impl("swiglu_packed", Cpu::packed);
  m.impl("swiglu_packed_backward", Cpu::packed_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  m.impl("swiglu", swiglu_autograd);
  m.impl("swiglu_packed", packed_autograd);
  // Gradients of gradients: they run as they are, and refuse when they are differentiated.
  m.impl("swiglu_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("swiglu_packed_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::swiglu
