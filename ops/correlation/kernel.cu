// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "correlation/kernel.cuh"

namespace fuseport::correlation::cuda {

int64_t scratch(const Problem& p) {
  return p.windows() ? volume_bytes(p) + p.down.size + p.across.size : 0;
}

const char* forward(const Problem& p, const Forward& f, void* scratch, void* stream) {
  return run_forward(p, f, scratch, stream);
}

const char* backward(const Problem& p, const Backward& b, void* scratch, void* stream) {
  return run_backward(p, b, scratch, stream);
}

}  // namespace fuseport::correlation::cuda
