// The loss for torch: schemas, CPU kernels, autograd.
#include "softmax_cross_entropy/checks.hpp"
#include "softmax_cross_entropy/torch.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace fuseport::softmax_cross_entropy {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct OnCpu {
  static void check(const Check& check, const Problem& p) { check_targets(check, p); }
  static void forward(const char*, const Tensor&, const Problem& p, const Forward& f) {
    for_each_unit(Host{}, p, [&](int64_t unit) { kernels().forward(p, f, unit); });
  }
  static void backward(const char*, const Tensor&, const Problem& p, const Backward& b) {
    for_each_unit(Host{}, p, [&](int64_t unit) { kernels().backward(p, b, unit); });
  }
};

using Cpu = Operators<OnCpu>;

// Autograd sees operators only, by their names, so that traces hold them whole and fakes stand in
// for them.
struct LossFunction : torch::autograd::Function<LossFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& targets,
                               int64_t ignore_index, double label_smoothing) {
    static const auto op =
        operator_named<decltype(Cpu::forward)>("fuseport::softmax_cross_entropy");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [losses, largest, total] = op.call(logits, targets, ignore_index, label_smoothing);
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->save_for_backward({logits, targets, largest, total});
    ctx->mark_non_differentiable({largest, total});
    return {losses, largest, total};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& cotangents) {
    static const auto op =
        operator_named<decltype(Cpu::backward)>("fuseport::softmax_cross_entropy_backward");
    const variable_list s = ctx->get_saved_variables();
    return {op.call(cotangents[0], s[0], s[1], s[2], s[3], ctx->saved_data["ignore_index"].toInt(),
                    ctx->saved_data["label_smoothing"].toDouble()),
            Tensor(), Tensor(), Tensor()};
  }
};

Losses autograd(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                double label_smoothing) {
  auto y = LossFunction::apply(logits, targets, ignore_index, label_smoothing);
  return {y[0], y[1], y[2]};
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "softmax_cross_entropy(Tensor logits, Tensor targets, int ignore_index, "
      "float label_smoothing) -> (Tensor losses, Tensor largest, Tensor total)");
  m.def(
      "softmax_cross_entropy_backward(Tensor dlosses, Tensor logits, Tensor targets, "
      "Tensor largest, Tensor total, int ignore_index, float label_smoothing) -> Tensor dlogits");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("softmax_cross_entropy", Cpu::forward);
  m.impl("softmax_cross_entropy_backward", Cpu::backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  m.impl("softmax_cross_entropy", autograd);
  // Gradients of gradients: they run as they are, and refuse when they are differentiated.
  m.impl("softmax_cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace fuseport::softmax_cross_entropy
