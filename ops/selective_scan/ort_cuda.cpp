// The selective scan as custom ops of ONNX Runtime's CUDA provider.
#include "native/ort_cuda.hpp"
#include "selective_scan/cuda.hpp"
#include "selective_scan/ort.hpp"

namespace fuseport::selective_scan {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const Forward& forward) {
    const cuda::Plan plan = cuda::forward_plan(p);
    const auto scratch = context.scratch(cuda::forward_scratch(p, plan));
    context.started(cuda::forward(p, plan, forward, scratch.data(), context.stream()));
  }

  template <Dtype DTYPE>
  static void backward(const Context& context, const Inputs& inputs, const NodeGradients& g) {
    const Problem& p = inputs.problem;
    const auto saved = context.allocate<Real<DTYPE>>(inputs.saved());
    const auto last_state = context.allocate<Real<DTYPE>>(inputs.states());
    // The node has no chunk states to start from: they are computed again, and the output with
    // them, which goes where du will be.
    forward(context, p, Forward{inputs.mutable_sequence(g.du), last_state.data(), saved.data()});

    cuda::Gradients k;
    k.dout = inputs.sequence(g.dout);
    k.dlast_state = g.dlast_state.data;
    k.chunk_states = saved.data();
    k.du = inputs.mutable_sequence(g.du);
    k.ddelta = inputs.mutable_sequence(g.ddelta);
    if (g.dz) k.dz = inputs.mutable_sequence(g.dz);
    k.dA = g.dA;
    k.dB = g.dB;
    k.dC = g.dC;
    k.dD = g.dD;
    k.ddelta_bias = g.ddelta_bias;
    const cuda::Plan plan = cuda::backward_plan(p);
    const auto scratch = context.scratch(cuda::backward_scratch(p, plan));
    context.started(cuda::backward(p, plan, k, scratch.data(), context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::selective_scan
