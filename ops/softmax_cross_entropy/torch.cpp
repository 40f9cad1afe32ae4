// The loss for torch: schemas, CPU kernels, autograd.
#include "native/autograd.hpp"
#include "softmax_cross_entropy/checks.hpp"
#include "softmax_cross_entropy/torch.hpp"

#include <torch/library.h>

namespace fuseport::softmax_cross_entropy {
namespace {

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
  differentiated_by(m, "softmax_cross_entropy", "softmax_cross_entropy_backward");
}

}  // namespace
}  // namespace fuseport::softmax_cross_entropy
