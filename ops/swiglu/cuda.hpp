// The CUDA kernels of SwiGLU as their bindings see them; no header of CUDA, none of torch.
#pragma once

#include "swiglu/kernel.hpp"

namespace fuseport::swiglu::cuda {

// Start a pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong.
const char* forward(const Problem&, const MutableRows& out, void* stream);
const char* backward(const Problem&, const Backward&, void* stream);

}  // namespace fuseport::swiglu::cuda
