// The CUDA kernel of the state update as its bindings see it; no header of CUDA, none of torch.
//
// Some threads of a warp share the states of a channel, each with packs of 16 bytes of them, and go
// through a few channels of one head: B and C are read once for those. A state is read once and
// written once. Which sums are made in which order depends on the number of states alone.
#pragma once

#include <cstdint>

#include "selective_state_update/kernel.hpp"

namespace fuseport::selective_state_update::cuda {

// Starts the update on a stream, a cudaStream_t, of the current device, and does not wait for it. It
// returns null, or what CUDA says is wrong.
const char* update(const Problem&, void* stream);

}  // namespace fuseport::selective_state_update::cuda
