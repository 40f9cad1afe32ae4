// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "nf4_linear/kernel.cuh"

namespace fuseport::nf4_linear::cuda {

const char* forward(const Problem& p, const Forward& f, void* stream) {
  return run_forward(p, f, stream);
}

const char* decode(const Problem& p, const Tile& tile, void* to, void* stream) {
  return run_decode(p, tile, to, stream);
}

}  // namespace fuseport::nf4_linear::cuda
