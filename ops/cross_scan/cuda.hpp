// The CUDA kernels of walks over images as their bindings see them; no header of CUDA, none of torch.
// `cross_merge` has the same.
#pragma once

#include "cross_scan/problem.hpp"

// Start a pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong.
#define FUSEPORT_WALKS_ON_CUDA                                                              \
  const char* scan(const cross_scan::Problem&, const cross_scan::Scan&, void* stream);      \
  const char* merge(const cross_scan::Problem&, const cross_scan::Merge&, void* stream);

namespace fuseport::cross_scan::cuda {
FUSEPORT_WALKS_ON_CUDA
}
