// The CUDA kernels of the gated delta rule as their bindings see them; no header of CUDA, none of torch.
//
// Step by step, a block of threads has some columns of the state of one head, a thread one row of these, in
// registers; rows beyond the threads are in memory. What is summed over rows is summed in the block,
// what is summed over columns in each thread, and over blocks and heads of a group by a kernel of its
// own. Which sums are made in which order depends on sizes alone.
//
// Many steps are taken in chunks, and on tensor cores, where there is one decay for a head, and where
// shared memory suffices; but in float64, and a backward of very few keys. Walks forth and back go from
// chunk to chunk; what a chunk has of its own is prepared before, and gradients are found after, of
// many chunks at once.
#pragma once

#include <cstdint>

#include "gated_delta_rule/kernel.hpp"

namespace fuseport::gated_delta_rule::cuda {

// Each starts its kernels on a stream, a cudaStream_t, of the current device, and does not wait for
// them. It returns null, or what CUDA says is wrong. The problem is not empty.
//
// `scratch` is device memory of so many bytes, of a forward perhaps none.
int64_t forward_scratch(const Problem&);
const char* forward(const Problem&, const Forward&, void* scratch, void* stream);
int64_t backward_scratch(const Problem&);
const char* backward(const Problem&, const Backward&, void* scratch, void* stream);

}  // namespace fuseport::gated_delta_rule::cuda
