// The kernels for CUDA, for all dtypes; ops/cuda.py compiles this file with nvcc.
#include "rms_norm/kernel.cuh"
#include "rms_norm_gated/cuda.hpp"

namespace fuseport::rms_norm_gated::cuda {

const rms_norm::cuda::Kernels& kernels() { return rms_norm::cuda::KERNELS<true>; }

}  // namespace fuseport::rms_norm_gated::cuda
