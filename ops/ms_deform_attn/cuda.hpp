// The CUDA kernels of deformable attention as their bindings see them; no header of CUDA, none of torch.
//
// Sizes and places of levels are data on the device, and nobody waits to read them: a level that is
// not within value is not read, and makes NaN of what its samples have a part in.
//
// The gradient of value is gathered. The upper left pixel of each sample is its cell; samples are
// sorted by cells, those of a cell in their own order, and each pixel adds up what the samples of
// its four cells give it. No sum depends on the order in which threads run.
#pragma once

#include <cstdint>

#include "ms_deform_attn/kernel.hpp"

namespace fuseport::ms_deform_attn::cuda {

// Of how many pairs of a batch entry and a head the samples are sorted at once; 0 if those of one,
// or its cells, are too many to be counted in 31 bits.
int64_t pairs_at_once(const Problem&);

// How many bytes `backward` works in; null, or what CUDA says is wrong.
const char* backward_scratch(const Problem&, int64_t pairs_at_once, int64_t* bytes);

// Start a pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong. `pairs_at_once` is not 0, and `scratch` aligned to 16
// bytes.
const char* forward(const Problem&, const Forward&, void* stream);
const char* backward(const Problem&, const Backward&, int64_t pairs_at_once, void* scratch,
                     void* stream);

}  // namespace fuseport::ms_deform_attn::cuda
