// The causal convolution as custom ops of ONNX Runtime's CUDA provider.
#include "causal_conv1d/cuda.hpp"
#include "causal_conv1d/ort.hpp"
#include "native/ort_cuda.hpp"

namespace fuseport::causal_conv1d {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const Forward& forward) {
    const cuda::Plan plan = cuda::forward_plan(p, forward);
    context.started(cuda::forward(p, plan, forward, context.stream()));
  }

  static void backward(const Context& context, const Problem& p, const NodeGradients& g) {
    const cuda::Gradients k{g.dout, g.dfinal, g.dx, g.dinitial, g.dweight, g.dbias};
    const cuda::Plan plan = cuda::backward_plan(p, k);
    const auto scratch = context.scratch(cuda::backward_scratch(p, plan));
    context.started(cuda::backward(p, plan, k, scratch.data(), context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::causal_conv1d
