// Norms on the CPU for torch, with a gate or without: what the torch.cpp of both ops is written with.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "native/empty.hpp"
#include "native/torch.hpp"
#include "rms_norm/binding.hpp"
#include "rms_norm/checks.hpp"
#include "rms_norm/problem.hpp"

namespace fuseport::rms_norm {

// Whether the dimensions before the last two are one, of one stride; those of size 1 do not count.
inline bool outer_is_one(const Tensor& t) {
  int64_t expected = -1;
  for (int64_t i = t.dim() - 3; i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (expected >= 0 && t.stride(i) != expected) return false;
    expected = t.stride(i) * t.size(i);
  }
  return true;
}

// Inputs that passed the checks. It holds tensors, since some are copied.
struct Inputs {
  std::vector<Tensor> held;
  Problem problem;

  Inputs(const Tensor& x, const std::optional<Tensor>& z, const Tensor& weight, double eps,
         int64_t group_size, bool norm_first) {
    Problem& p = problem;
    p.dtype = dtype_of(x);
    p.weight_dtype = dtype_of(weight);
    p.mode = !z ? Mode::plain : norm_first ? Mode::norm_first : Mode::gate_first;
    p.channels = x.size(-1);
    p.rows = 1;
    for (int64_t i = 0; i < x.dim() - 1; ++i) p.rows *= x.size(i);
    p.inner = x.dim() > 1 && x.size(-2) > 0 ? x.size(-2) : 1;
    p.group = group_size;
    p.eps = eps;
    p.x = rows(x);
    if (z) p.z = rows(*z);
    p.weight = weight.const_data_ptr();
    p.weight_stride = weight.stride(0);
  }

  // Rows of a tensor of x's shape, which is copied where no two strides say where they are.
  Rows rows(const Tensor& t) {
    held.push_back(t.numel() == 0 || outer_is_one(t) ? t : t.contiguous());
    const Tensor& kept = held.back();
    Rows rows{kept.const_data_ptr(), 0, 0, kept.size(-1) > 1 ? kept.stride(-1) : 1};
    if (kept.dim() > 1) rows.inner_stride = kept.stride(-2);
    for (int64_t i = kept.dim() - 3; i >= 0; --i)
      if (kept.size(i) != 1) {
        rows.outer_stride = kept.stride(i);
        break;
      }
    problem.gather |= rows.channel_stride != 1;
    return rows;
  }
};

inline std::tuple<Tensor, Tensor> forward_cpu(const Kernels& k, const char* op, const Tensor& x,
                                              const std::optional<Tensor>& z,
                                              const Tensor& weight, double eps,
                                              int64_t group_size, bool norm_first) {
  const Check check{op, x};
  check.inputs(z, weight, eps, group_size);
  const Inputs inputs(x, z, weight, eps, group_size, norm_first);
  const Problem& p = inputs.problem;
  Tensor out = empty_tensor(x.sizes(), x.options());
  Tensor rstd = empty_tensor(check.groups(group_size), x.options().dtype(check.wide()));
  const Forward forward{out.mutable_data_ptr(), rstd.mutable_data_ptr()};
  for_each_unit(Host{}, k, p,
                [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
  return {out, rstd};
}

// (dx, dz, dweight); dz is undefined where there is no z.
inline std::tuple<Tensor, Tensor, Tensor> backward_cpu(
    const Kernels& k, const char* op, const Tensor& dout, const Tensor& x,
    const std::optional<Tensor>& z, const Tensor& weight, const Tensor& rstd, double eps,
    int64_t group_size, bool norm_first) {
  const Check check{op, x};
  check.inputs(z, weight, eps, group_size);
  check.backward(dout, rstd, group_size);
  Inputs inputs(x, z, weight, eps, group_size, norm_first);
  const Rows cotangent = inputs.rows(dout);
  const Problem& p = inputs.problem;
  const Tensor saved = rstd.contiguous();
  Tensor dx = empty_tensor(x.sizes(), x.options()), dz;
  if (z) dz = empty_tensor(x.sizes(), x.options());
  Tensor dweight = empty_tensor(weight.sizes(), weight.options());
  const Tensor parts = empty_tensor({p.units(), p.channels}, x.options().dtype(at::kDouble));
  const Backward backward{cotangent, saved.const_data_ptr(), dx.mutable_data_ptr(),
                          z ? dz.mutable_data_ptr() : nullptr,
                          parts.mutable_data_ptr<double>()};
  for_each_unit(Host{}, k, p,
                [&](int64_t unit, void* scratch) { k.backward(p, backward, unit, scratch); });
  sum_weight_gradient(Host{}, k, p,
                      {parts.const_data_ptr<double>(), dweight.mutable_data_ptr()});
  return {dx, dz, dweight};
}

}  // namespace fuseport::rms_norm
