// The layer as custom ops of ONNX Runtime's CUDA provider.
#include "matmul_nbits/cuda.hpp"
#include "matmul_nbits/ort.hpp"
#include "native/ort_cuda.hpp"

namespace fuseport::matmul_nbits {
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
}  // namespace fuseport::matmul_nbits
