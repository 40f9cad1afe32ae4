// The loss as custom ops of ONNX Runtime's CUDA provider.
#include "native/ort_cuda.hpp"
#include "softmax_cross_entropy/cuda.hpp"
#include "softmax_cross_entropy/ort.hpp"

namespace fuseport::softmax_cross_entropy {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void check(const Context&, const Problem&) {}  // that would have to wait for the device
  static void forward(const Context& context, const Problem& p, const Forward& f) {
    context.started(cuda::forward(p, f, context.stream()));
  }
  static void backward(const Context& context, const Problem& p, const Backward& b) {
    context.started(cuda::backward(p, b, context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::softmax_cross_entropy
