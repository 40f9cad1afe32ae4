// SwiGLU as custom ops of ONNX Runtime, on the CPU.
#include "swiglu/ort.hpp"

namespace fuseport::swiglu {
namespace {

struct Passes {
  using Context = ort::Context;

  static void forward(const Context& context, const Problem& p, const MutableRows& out) {
    for_each_unit(context, p, [&](int64_t unit) { kernels().forward(p, out, unit); });
  }

  static void backward(const Context& context, const Problem& p, const Backward& b) {
    for_each_unit(context, p, [&](int64_t unit) { kernels().backward(p, b, unit); });
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::swiglu
