// The rule as custom ops of ONNX Runtime, on the CPU.
#include "dplr_delta_rule/ort.hpp"

namespace fuseport::dplr_delta_rule {
namespace {

struct Passes {
  using Context = ort::Context;

  static void forward(const Context& context, const Problem& p, const Forward& to) {
    run_forward(context, p, to);
  }

  static void backward(const Context& context, const Problem& p, const Backward& to) {
    run_backward(context, p, to);
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::dplr_delta_rule
