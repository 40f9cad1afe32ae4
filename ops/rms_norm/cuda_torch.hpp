// Norms on CUDA for torch, with a gate or without: what the cuda.cpp of both ops is written with.
#pragma once

#include "native/cuda_torch.hpp"
#include "rms_norm/cuda.hpp"
#include "rms_norm/torch.hpp"

namespace fuseport::rms_norm {

inline std::tuple<Tensor, Tensor> forward_cuda(const cuda::Kernels& k, const char* op,
                                               const Tensor& x, const std::optional<Tensor>& z,
                                               const Tensor& weight, double eps,
                                               int64_t group_size, bool norm_first) {
  const Check check{op, x};
  check.inputs(z, weight, eps, group_size);
  const OnDevice device(x);
  const Inputs inputs(x, z, weight, eps, group_size, norm_first);
  const Problem& p = inputs.problem;
  Tensor out = at::empty(x.sizes(), x.options());
  Tensor rstd = at::empty(check.groups(group_size), x.options().dtype(check.wide()));
  const Forward forward{out.mutable_data_ptr(), rstd.mutable_data_ptr()};
  check_cuda(op, k.forward(p, k.forward_plan(p), forward, device.stream()));
  return {out, rstd};
}

// (dx, dz, dweight); dz is undefined where there is no z.
inline std::tuple<Tensor, Tensor, Tensor> backward_cuda(
    const cuda::Kernels& k, const char* op, const Tensor& dout, const Tensor& x,
    const std::optional<Tensor>& z, const Tensor& weight, const Tensor& rstd, double eps,
    int64_t group_size, bool norm_first) {
  const Check check{op, x};
  check.inputs(z, weight, eps, group_size);
  check.backward(dout, rstd, group_size);
  const OnDevice device(x);
  Inputs inputs(x, z, weight, eps, group_size, norm_first);
  const Tensor saved = rstd.contiguous();
  Tensor dx = at::empty(x.sizes(), x.options()), dz;
  if (z) dz = at::empty(x.sizes(), x.options());
  Tensor dweight = at::empty(weight.sizes(), weight.options());
  cuda::Gradients backward;
  backward.dout = inputs.rows(dout);
  backward.rstd = saved.const_data_ptr();
  backward.dx = dx.mutable_data_ptr();
  if (z) backward.dz = dz.mutable_data_ptr();
  backward.dweight = dweight.mutable_data_ptr();
  const Problem& p = inputs.problem;
  const cuda::Plan plan = k.backward_plan(p, backward);
  const Tensor scratch = device_scratch(k.backward_scratch(p, plan), x);
  check_cuda(op, k.backward(p, plan, backward, scratch.mutable_data_ptr(), device.stream()));
  return {dx, dz, dweight};
}

}  // namespace fuseport::rms_norm
