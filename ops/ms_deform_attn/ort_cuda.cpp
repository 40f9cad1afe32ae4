// Deformable attention as a custom op of ONNX Runtime's CUDA provider: the forward. The backward's
// binding to torch sorts by torch between its kernels, so that its nodes run their bodies here.
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

[[maybe_unused]] const bool added =
    ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
      add_forward(stored, wide, forward<DTYPE>);
    });

}  // namespace
}  // namespace fuseport::ms_deform_attn
