// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "cross_merge/cuda.hpp"

#include "cross_scan/kernel.cuh"

namespace fuseport::cross_merge::cuda {

const char* scan(const cross_scan::Problem& p, const cross_scan::Scan& s, void* stream) {
  return cross_scan::cuda::run_scan(p, s, stream);
}

const char* merge(const cross_scan::Problem& p, const cross_scan::Merge& m, void* stream) {
  return cross_scan::cuda::run_merge(p, m, stream);
}

}  // namespace fuseport::cross_merge::cuda
