// Deformable convolution as custom ops of ONNX Runtime's CUDA provider.
#include "deform_conv2d/cuda.hpp"
#include "deform_conv2d/ort.hpp"
#include "native/ort_cuda.hpp"

namespace fuseport::deform_conv2d {
namespace {

struct Passes {
  using Context = ort::CudaContext;

  static void forward(const Context& context, const Problem& p, const Forward& f) {
    const auto scratch = context.scratch(cuda::forward_scratch(p));
    context.started(cuda::forward(p, f, scratch.data(), context.stream()));
  }

  static void backward(const Context& context, const Problem& p, const Backward& b) {
    const int64_t at_once = cuda::batches_at_once(p);
    context.require(at_once > 0, "offset", "of fewer samples and pixels of a batch entry",
                    p.offset_groups * p.taps() * p.places());
    int64_t bytes = 0;
    context.started(cuda::backward_scratch(p, at_once, &bytes));
    const auto scratch = context.scratch(bytes);
    context.started(cuda::backward(p, b, at_once, scratch.data(), context.stream()));
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::deform_conv2d
