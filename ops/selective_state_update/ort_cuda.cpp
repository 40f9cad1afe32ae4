// The state update as custom ops of ONNX Runtime's CUDA provider.
#include "native/ort_cuda.hpp"
#include "selective_state_update/cuda.hpp"
#include "selective_state_update/ort.hpp"

namespace fuseport::selective_state_update {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void update(const Context& context, const Problem& p) {
    context.started(cuda::update(p, context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::selective_state_update
