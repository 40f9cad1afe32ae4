// The layer as custom ops of ONNX Runtime, on the CPU.
#include "nf4_linear/ort.hpp"

namespace fuseport::nf4_linear {
namespace {

struct Passes {
  using Context = ort::Context;

  static void forward(const Context& context, const Problem& p, const Forward& f) {
    run_forward(context, p, f);
  }

  static void backward(const Context& context, const Problem& p, const Backward& b) {
    run_backward(context, p, b);
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::nf4_linear
