// The CUDA kernel of a decoding step of the causal convolution as its bindings see it; no header of
// CUDA, none of torch.
//
// A thread has a few steps of a channel and as many slots of its new state, which mostly is all of
// them: it asks for all that they take at once, and waits for memory once.
#pragma once

#include "causal_conv1d_update/kernel.hpp"

namespace fuseport::causal_conv1d_update::cuda {

// Starts the step on a stream, a cudaStream_t, of the current device, and does not wait for it. It
// returns null, or what CUDA says is wrong.
const char* step(const Problem&, void* stream);

}  // namespace fuseport::causal_conv1d_update::cuda
