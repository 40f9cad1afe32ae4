// The CUDA kernels of the loss as their bindings see them; no header of CUDA, none of torch.
#pragma once

#include "softmax_cross_entropy/kernel.hpp"

namespace fuseport::softmax_cross_entropy::cuda {

// Start a pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong. A target that is neither a class nor ignored makes NaN.
const char* forward(const Problem&, const Forward&, void* stream);
const char* backward(const Problem&, const Backward&, void* stream);

}  // namespace fuseport::softmax_cross_entropy::cuda
