// The rule as custom ops of ONNX Runtime's CUDA provider.
#include "dplr_delta_rule/cuda.hpp"
#include "dplr_delta_rule/ort.hpp"
#include "native/ort_cuda.hpp"

namespace fuseport::dplr_delta_rule {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const Forward& to) {
    context.started(cuda::forward(p, to, context.stream()));
  }

  static void backward(const Context& context, const Problem& p, const Backward& to) {
    const auto scratch = context.scratch(cuda::backward_scratch(p));
    context.started(cuda::backward(p, to, scratch.data(), context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::dplr_delta_rule
