// The CUDA kernels of the correlation as their bindings see them; no header of CUDA, none of torch.
//
// Forward, a thread has a pixel of the second image and some displacements, and reads each channel of
// what it multiplies once; backward, it has two pixels of an image and some channels, and reads the
// cotangents of all displacements. Nothing is added to from two threads. Windows of several pixels are
// taken from a volume, as on the CPU.
#pragma once

#include <cstdint>

#include "correlation/kernel.hpp"

namespace fuseport::correlation::cuda {

// How many bytes the passes work in.
int64_t scratch(const Problem&);

// Start a pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong. `scratch` is aligned to 16 bytes.
const char* forward(const Problem&, const Forward&, void* scratch, void* stream);
const char* backward(const Problem&, const Backward&, void* scratch, void* stream);

}  // namespace fuseport::correlation::cuda
