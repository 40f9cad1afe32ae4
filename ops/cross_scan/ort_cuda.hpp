// Walks over images as custom ops of ONNX Runtime's CUDA provider, and their sums: what the
// ort_cuda.cpp of both ops is written with.
#pragma once

#include "cross_scan/cuda.hpp"
#include "cross_scan/ort.hpp"
#include "native/ort_cuda.hpp"

namespace fuseport::cross_scan {

// SCAN and MERGE are the op's functions cuda::scan and cuda::merge.
template <auto SCAN, auto MERGE>
struct PassesOnCuda {
  using Context = ort::CudaContext;

  static void scan(const Context& context, const Problem& p, const Scan& scan) {
    context.started(SCAN(p, scan, context.stream()));
  }

  static void merge(const Context& context, const Problem& p, const Merge& merge) {
    context.started(MERGE(p, merge, context.stream()));
  }
};

}  // namespace fuseport::cross_scan
