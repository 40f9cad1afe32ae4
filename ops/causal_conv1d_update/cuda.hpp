// The CUDA kernel of a decoding step of the causal convolution as its bindings see it; no header of
// CUDA, none of torch.
//
// A thread has one output, or one slot of the new state: all that a step takes is little, and what
// counts is that a thread waits for memory once.
#pragma once

#include "causal_conv1d_update/kernel.hpp"

namespace fuseport::causal_conv1d_update::cuda {

// Starts the step on a stream, a cudaStream_t, of the current device, and does not wait for it. It
// returns null, or what CUDA says is wrong.
const char* step(const Problem&, void* stream);

}  // namespace fuseport::causal_conv1d_update::cuda
