// The causal convolution as custom ops of ONNX Runtime, on the CPU.
#include "causal_conv1d/ort.hpp"

#include "causal_conv1d/binding.hpp"

namespace fuseport::causal_conv1d {
namespace {

struct Passes {
  using Context = ort::Context;

  static void forward(const Context& context, const Problem& p, const Forward& forward) {
    const Kernels& k = kernels();
    for_each_unit(context, p,
                  [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
  }

  static void backward(const Context& context, const Problem& p, const NodeGradients& g) {
    const auto weight_parts = context.allocate<double>({p.batches, p.channels, p.width});
    const auto bias_parts = context.allocate<double>({p.batches, p.channels});
    Backward backward;
    backward.dout = g.dout;
    backward.dfinal = g.dfinal;
    backward.dx = g.dx;
    backward.dinitial = g.dinitial;
    backward.weight_parts = weight_parts.data();
    backward.bias_parts = bias_parts.data();
    backward.dweight = g.dweight;
    backward.dbias = g.dbias;
    const Kernels& k = kernels();
    for_each_unit(context, p,
                  [&](int64_t unit, void* scratch) { k.backward(p, backward, unit, scratch); });
    k.finish(p, backward);
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::causal_conv1d
