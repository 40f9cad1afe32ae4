// SwiGLU as custom ops of ONNX Runtime's CUDA provider.
#include "native/ort_cuda.hpp"
#include "swiglu/cuda.hpp"
#include "swiglu/ort.hpp"

namespace fuseport::swiglu {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const MutableRows& out) {
    context.started(cuda::forward(p, out, context.stream()));
  }

  static void backward(const Context& context, const Problem& p, const Backward& b) {
    context.started(cuda::backward(p, b, context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::swiglu
