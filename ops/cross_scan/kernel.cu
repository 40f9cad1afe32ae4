// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "cross_scan/kernel.cuh"

namespace fuseport::cross_scan::cuda {

const char* scan(const Problem& p, const Scan& s, void* stream) { return run_scan(p, s, stream); }

const char* merge(const Problem& p, const Merge& m, void* stream) {
  return run_merge(p, m, stream);
}

}  // namespace fuseport::cross_scan::cuda
