// The CUDA kernels of the rule as their bindings see them; no header of CUDA, none of torch.
//
// Step by step, a block of threads has some columns of the state of one head, a thread one row of these, in
// registers; rows beyond the threads are in memory. What is summed over rows is summed in the block,
// what is summed over columns in each thread, and over blocks by a kernel of its own. Which sums are
// made in which order depends on sizes alone.
#pragma once

#include <cstdint>

#include "dplr_delta_rule/kernel.hpp"

namespace fuseport::dplr_delta_rule::cuda {

// Each starts its kernels on a stream, a cudaStream_t, of the current device, and does not wait for
// them. It returns null, or what CUDA says is wrong. The problem is not empty.
//
// `scratch` is device memory of so many bytes.
const char* forward(const Problem&, const Forward&, void* stream);
int64_t backward_scratch(const Problem&);
const char* backward(const Problem&, const Backward&, void* scratch, void* stream);

}  // namespace fuseport::dplr_delta_rule::cuda
