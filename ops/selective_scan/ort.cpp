// The selective scan as custom ops of ONNX Runtime, on the CPU.
#include "selective_scan/ort.hpp"

#include <algorithm>

namespace fuseport::selective_scan {
namespace {

struct Passes {
  using Context = ort::Context;

  static void forward(const Context& context, const Problem& p, const Forward& forward) {
    const Kernels& k = kernels();
    for_each_unit(context, p, k.forward_scratch(p),
                  [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
  }

  template <Dtype DTYPE>
  static void backward(const Context& context, const Inputs& inputs, const NodeGradients& g) {
    const Problem& p = inputs.problem;
    const int64_t b = p.batches, d = p.channels, N = p.states;
    const auto saved = context.allocate<Real<DTYPE>>(inputs.saved());
    const auto dA_parts = context.allocate<double>({b, d, N});
    const auto dD_parts = context.allocate<double>({b, d});
    const auto dbias_parts = context.allocate<double>({b, d});
    const auto dB_parts = context.allocate<Real<DTYPE>>({b, p.blocks(), N, p.length});
    const auto dC_parts = context.allocate<Real<DTYPE>>({b, p.blocks(), N, p.length});

    // The node has no chunk states to start from: each unit computes its own again.
    const Forward again{{}, nullptr, saved.data()};
    Backward backward;
    backward.dout = inputs.sequence(g.dout);
    backward.dlast_state = g.dlast_state.data;
    backward.chunk_states = saved.data();
    backward.du = inputs.mutable_sequence(g.du);
    backward.ddelta = inputs.mutable_sequence(g.ddelta);
    if (g.dz) backward.dz = inputs.mutable_sequence(g.dz);
    backward.dA = dA_parts.data();
    backward.dD = dD_parts.data();
    backward.ddelta_bias = dbias_parts.data();
    backward.dB = dB_parts.data();
    backward.dC = dC_parts.data();
    const Kernels& k = kernels();
    for_each_unit(context, p, std::max(k.forward_scratch(p), k.backward_scratch(p)),
                  [&](int64_t unit, void* scratch) {
                    k.forward(p, again, unit, scratch);
                    k.backward(p, backward, unit, scratch);
                  });

    sum_batches(dA_parts.data(), b, d * N, static_cast<Real<DTYPE>*>(g.dA));
    sum_batches(dD_parts.data(), b, d, static_cast<Real<DTYPE>*>(g.dD));
    sum_batches(dbias_parts.data(), b, d, static_cast<Real<DTYPE>*>(g.ddelta_bias));
    sum_coefficient(context, inputs, dB_parts.data(), g.dB);
    sum_coefficient(context, inputs, dC_parts.data(), g.dC);
  }

 private:
  // Adds up the units' parts of dB or dC.
  static void sum_coefficient(const Context& context, const Inputs& inputs, const void* parts,
                              void* total) {
    const Problem& p = inputs.problem;
    const SumUnits sum{parts, total, inputs.groups};
    const int64_t units = sum.units(p);
    const int64_t threads =
        context.threads_for(units, p.batches * p.blocks() * p.states * p.length);
    context.parallel(units, threads,
                     [&](int64_t unit, int64_t) { kernels().sum_units(p, sum, unit); });
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::selective_scan
