// The gated delta rule as custom ops of ONNX Runtime's CUDA provider.
#include "gated_delta_rule/cuda.hpp"
#include "gated_delta_rule/ort.hpp"
#include "native/ort_cuda.hpp"

namespace fuseport::gated_delta_rule {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const Forward& to) {
    const int64_t bytes = cuda::forward_scratch(p);
    const auto scratch = context.scratch(bytes > 0 ? bytes : 1);
    context.started(cuda::forward(p, to, scratch.data(), context.stream()));
  }

  static void backward(const Context& context, const Problem& p, const Backward& to) {
    const auto scratch = context.scratch(cuda::backward_scratch(p));
    context.started(cuda::backward(p, to, scratch.data(), context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::gated_delta_rule
