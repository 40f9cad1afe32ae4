// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "rms_norm/kernel.cuh"

namespace fuseport::rms_norm::cuda {

const Kernels& kernels() { return KERNELS<false>; }

}  // namespace fuseport::rms_norm::cuda
