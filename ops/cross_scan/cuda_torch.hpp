// Walks over images on CUDA for torch, and their sums: what the cuda.cpp of both ops is written with.
#pragma once

#include "cross_scan/cuda.hpp"
#include "cross_scan/torch.hpp"
#include "native/cuda_torch.hpp"

namespace fuseport::cross_scan {

// `run` is the op's own cuda::scan or cuda::merge.

template <class Run>
Tensor scan_cuda(const Run& run, const char* op, const char* name, const Tensor& x) {
  check(op, name, x, false);
  const OnDevice device(x);
  const Problem p = problem_of(x);
  const Tensor rows = x.stride(3) == 1 ? x : x.contiguous();
  Tensor out = at::empty({p.batches, 4, p.channels, p.height, p.width}, x.options());
  const Scan scan{rows.const_data_ptr(), rows.stride(0), rows.stride(1), rows.stride(2),
                  out.mutable_data_ptr()};
  check_cuda(op, run(p, scan, device.stream()));
  return out;
}

template <class Run>
Tensor merge_cuda(const Run& run, const char* op, const char* name, const Tensor& ys) {
  check(op, name, ys, true);
  const OnDevice device(ys);
  const Problem p = problem_of(ys);
  const bool whole = ys.stride(4) == 1 && ys.stride(3) == p.width;
  const Tensor walks = whole ? ys : ys.contiguous();
  Tensor out = at::empty({p.batches, p.channels, p.height, p.width}, ys.options());
  const Merge merge{walks.const_data_ptr(), walks.stride(0), walks.stride(1), walks.stride(2),
                    out.mutable_data_ptr()};
  check_cuda(op, run(p, merge, device.stream()));
  return out;
}

}  // namespace fuseport::cross_scan
