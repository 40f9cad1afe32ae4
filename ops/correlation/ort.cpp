// Correlation as custom ops of ONNX Runtime, on the CPU.
#include "correlation/ort.hpp"

namespace fuseport::correlation {
namespace {

struct Passes {
  using Context = ort::Context;

  static void forward(const Context& context, const Problem& p, const Forward& f) {
    run(context, p, f);
  }
  static void backward(const Context& context, const Problem& p, const Backward& b) {
    run(context, p, b);
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::correlation
