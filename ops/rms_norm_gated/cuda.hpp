// The CUDA kernels of the gated norm, whose interface is that of the plain one.
#pragma once

#include "rms_norm/cuda.hpp"

namespace fuseport::rms_norm_gated::cuda {

const rms_norm::cuda::Kernels& kernels();

}  // namespace fuseport::rms_norm_gated::cuda
