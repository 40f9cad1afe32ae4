// The CUDA kernels of the selective scan as their bindings see them; no header of CUDA, none of torch.
//
// A block of threads does one batch entry, some channels that share a group of B and of C, and one
// segment of time: B and C are read once for all of its channels, and sums over its channels are
// made in it. Where blocks are too few for the device, time is cut into segments: a first pass finds
// what each adds to the state, a second what state each starts from. Which sums are made in which
// order depends on the problem and on the device's size alone.
#pragma once

#include <cstdint>

#include "selective_scan/kernel.hpp"

namespace fuseport::selective_scan::cuda {

// How a problem is cut.
struct Plan {
  int channels = 1;            // of a block, at most
  int64_t blocks_per_span = 0, blocks = 0;  // of a span of channels, and of a batch entry
  int64_t segments = 1, chunks_per_segment = 0;
};

// The plans of the passes for the current device.
Plan forward_plan(const Problem&);
Plan backward_plan(const Problem&);

struct Gradients {
  Sequence dout;
  const void* dlast_state = nullptr;   // as in Backward of kernel.hpp
  const void* chunk_states = nullptr;
  MutableSequence du, ddelta, dz;
  // Contiguous, in the shapes and dtypes of A, B, C, D and the bias.
  void *dA = nullptr, *dB = nullptr, *dC = nullptr, *dD = nullptr, *ddelta_bias = nullptr;
};

// Bytes of device memory that a pass needs besides, aligned to 16; they need not be initialised.
int64_t forward_scratch(const Problem&, const Plan&);
int64_t backward_scratch(const Problem&, const Plan&);

// Start the pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong. All of Forward is given.
const char* forward(const Problem&, const Plan&, const Forward&, void* scratch, void* stream);
const char* backward(const Problem&, const Plan&, const Gradients&, void* scratch, void* stream);

}  // namespace fuseport::selective_scan::cuda
