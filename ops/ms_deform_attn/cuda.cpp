// Deformable attention on CUDA: the same schemas as in torch.cpp, another dispatch key. Levels are
// not checked here: that would wait for the device. cuda.hpp says what becomes of wrong ones.
#include "ms_deform_attn/cuda.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ms_deform_attn/checks.hpp"
#include "ms_deform_attn/torch.hpp"
#include "native/cuda_torch.hpp"

namespace fuseport::ms_deform_attn {
namespace {

Tensor attention(const Tensor& value, const Tensor& shapes, const Tensor& starts,
                 const Tensor& locations, const Tensor& weights) {
  const char* op = "ms_deform_attn";
  Check(op, value).inputs(shapes, starts, locations, weights);
  const OnDevice device(value);
  const Inputs inputs(value, shapes, starts, locations, weights);
  const Problem& p = inputs.problem;
  const Tensor out = at::empty({p.batches, p.queries, p.heads * p.channels}, value.options());
  check_cuda(op, cuda::forward(p, {out.mutable_data_ptr()}, device.stream()));
  return out;
}

Gradients attention_backward(const Tensor& dout, const Tensor& value, const Tensor& shapes,
                             const Tensor& starts, const Tensor& locations,
                             const Tensor& weights) {
  const char* op = "ms_deform_attn_backward";
  const Check check(op, value);
  check.inputs(shapes, starts, locations, weights);
  check.cotangent(dout, locations);
  const OnDevice device(value);
  const Inputs inputs(value, shapes, starts, locations, weights);
  const Tensor given = dout.contiguous();
  const Tensor dvalue = at::empty(value.sizes(), value.options());
  const Tensor dlocations = at::empty(locations.sizes(), locations.options());
  const Tensor dweights = at::empty(weights.sizes(), weights.options());
  const Backward b{given.const_data_ptr(), dvalue.mutable_data_ptr(),
                   dlocations.mutable_data_ptr(), dweights.mutable_data_ptr()};
  const Problem& p = inputs.problem;
  const int64_t at_once = cuda::pairs_at_once(p);
  check.require(at_once > 0, "sampling_locations", "of fewer samples and levels for each head",
                p.queries * p.samples());
  int64_t bytes = 0;
  check_cuda(op, cuda::backward_scratch(p, at_once, &bytes));
  const Tensor scratch = device_scratch(bytes, value);
  check_cuda(op, cuda::backward(p, b, at_once, scratch.mutable_data_ptr(), device.stream()));
  return {dvalue, dlocations, dweights};
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("ms_deform_attn", attention);
  m.impl("ms_deform_attn_backward", attention_backward);
}

}  // namespace
}  // namespace fuseport::ms_deform_attn
