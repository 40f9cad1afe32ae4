// The CUDA kernels of the rotary embedding as their bindings see them; no header of CUDA or torch.
#pragma once

#include "rotary_embedding/kernel.hpp"

namespace fuseport::rotary_embedding::cuda {

// Start a pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong.
const char* forward(const Problem&, void* out, void* stream);

// With so many bytes of device memory, 16-aligned.
int64_t scratch_bytes(const Problem&, const Backward&);
const char* backward(const Problem&, const Backward&, void* scratch, void* stream);

}  // namespace fuseport::rotary_embedding::cuda
