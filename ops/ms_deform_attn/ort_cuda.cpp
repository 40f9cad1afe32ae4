// Deformable attention as custom ops of ONNX Runtime's CUDA provider.
//
// Levels are not checked: their data are on the device. cuda.hpp says what becomes of wrong ones.
#include "ms_deform_attn/cuda.hpp"
#include "ms_deform_attn/ort.hpp"
#include "native/ort_cuda.hpp"

namespace fuseport::ms_deform_attn {
namespace {

using ort::CudaContext;

template <Dtype DTYPE>
void forward(const CudaContext& context) {
  const Inputs inputs(context, 0, DTYPE);
  void* out = context.output(0, inputs.out);
  if (ort::elements(inputs.out) > 0)
    context.started(cuda::forward(inputs.problem, Forward{out}, context.stream()));
}

template <Dtype DTYPE>
void backward(const CudaContext& context) {
  const Inputs inputs(context, 1, DTYPE);
  const Backward b = gradients(context, inputs);
  const Problem& p = inputs.problem;
  const int64_t at_once = cuda::pairs_at_once(p);
  context.require(at_once > 0, "sampling_locations", "of fewer samples and levels for each head",
                  p.queries * p.samples());
  int64_t bytes = 0;
  context.started(cuda::backward_scratch(p, at_once, &bytes));
  const auto scratch = context.scratch(bytes);
  context.started(cuda::backward(p, b, at_once, scratch.data(), context.stream()));
}

[[maybe_unused]] const bool added =
    ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
      add(stored, wide, forward<DTYPE>, backward<DTYPE>);
    });

}  // namespace
}  // namespace fuseport::ms_deform_attn
