// The CUDA kernel of the state update as its bindings see it; no header of CUDA, none of torch.
//
// A few threads share the states of a channel, each with packs of 16 bytes of them, and ask for all
// of those before they use the first: so few that what states share, of which each thread makes its
// own, is little beside them. A state is read once and written once. Which sums are made in which
// order depends on the number of states, their layout and whether they share an A.
#pragma once

#include <cstdint>

#include "selective_state_update/kernel.hpp"

namespace fuseport::selective_state_update::cuda {

// Starts the update on a stream, a cudaStream_t, of the current device, and does not wait for it. It
// returns null, or what CUDA says is wrong.
const char* update(const Problem&, void* stream);

}  // namespace fuseport::selective_state_update::cuda
