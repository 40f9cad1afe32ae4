// The loss as custom ops of ONNX Runtime, on the CPU.
#include "softmax_cross_entropy/checks.hpp"
#include "softmax_cross_entropy/ort.hpp"

namespace fuseport::softmax_cross_entropy {
namespace {

struct Passes {
  using Context = ort::Context;

  static void check(const Context& context, const Problem& p) { check_targets(context, p); }
  static void forward(const Context& context, const Problem& p, const Forward& f) {
    for_each_unit(context, p, [&](int64_t unit) { kernels().forward(p, f, unit); });
  }
  static void backward(const Context& context, const Problem& p, const Backward& b) {
    for_each_unit(context, p, [&](int64_t unit) { kernels().backward(p, b, unit); });
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::softmax_cross_entropy
