// Walks over images on the CPU for torch, and their sums: what the torch.cpp of both ops is written
// with.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "cross_scan/binding.hpp"
#include "native/checks.hpp"
#include "native/empty.hpp"
#include "native/torch.hpp"

namespace fuseport::cross_scan {

// The checks of shapes.py, with their messages.
inline void check(const char* op, const char* name, const Tensor& t, bool walks) {
  const Check check{op, name, t};
  if (walks) {
    check.require(t.dim() == 5 && t.size(1) == 4, name, "(b, 4, C, H, W)", tuple(t.sizes()));
  } else {
    check.require(t.dim() == 4, name, "(b, C, H, W)", tuple(t.sizes()));
  }
  const at::ScalarType dtype = t.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  check.require(half || dtype == at::kFloat || dtype == at::kDouble, name,
                "float16, bfloat16, float32 or float64", name_of(dtype));
}

// Of an image, or of walks.
inline Problem problem_of(const Tensor& t) {
  return {dtype_of(t), t.size(0), t.size(-3), t.size(-2), t.size(-1)};
}

inline Tensor scan_cpu(const Kernels& k, const char* op, const char* name, const Tensor& x) {
  check(op, name, x, false);
  const Problem p = problem_of(x);
  const Tensor rows = x.stride(3) == 1 ? x : x.contiguous();
  Tensor out = empty_tensor({p.batches, 4, p.channels, p.height, p.width}, x.options());
  const Scan scan{rows.const_data_ptr(), rows.stride(0), rows.stride(1), rows.stride(2),
                  out.mutable_data_ptr()};
  for_each_unit(Host{}, p, [&](int64_t unit) { k.scan(p, scan, unit); });
  return out;
}

inline Tensor merge_cpu(const Kernels& k, const char* op, const char* name, const Tensor& ys) {
  check(op, name, ys, true);
  const Problem p = problem_of(ys);
  const bool whole = ys.stride(4) == 1 && ys.stride(3) == p.width;
  const Tensor walks = whole ? ys : ys.contiguous();
  Tensor out = empty_tensor({p.batches, p.channels, p.height, p.width}, ys.options());
  const Merge merge{walks.const_data_ptr(), walks.stride(0), walks.stride(1), walks.stride(2),
                    out.mutable_data_ptr()};
  for_each_unit(Host{}, p, [&](int64_t unit) { k.merge(p, merge, unit); });
  return out;
}

}  // namespace fuseport::cross_scan
