// The layer as custom ops of ONNX Runtime's CUDA provider.
#include "native/ort_cuda.hpp"
#include "nf4_linear/cuda.hpp"
#include "nf4_linear/ort.hpp"

namespace fuseport::nf4_linear {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const Forward& f) {
    const auto scratch = context.scratch(cuda::forward_scratch(p));
    context.started(cuda::forward(p, f, scratch.data(), context.stream()));
  }

  static void backward(const Context& context, const Problem& p, const Backward& b) {
    const auto scratch = context.scratch(cuda::backward_scratch(p));
    context.started(cuda::backward(p, b, scratch.data(), context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::nf4_linear
