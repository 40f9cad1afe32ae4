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

// Pairs of a batch entry and a head, whose samples are sorted at once.
struct Slice {
  int64_t first = 0, pairs = 0;
};

// How many pairs a slice can have; 0 if those of one are too many to be counted in 31 bits.
int64_t pairs_at_once(const Problem&);

// Cells of a slice, and their end: how many numbers `starts` has.
int64_t most_starts(const Problem&, const Slice&);

// Start a pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong.
const char* forward(const Problem&, const Forward&, void* stream);
// Gradients of locations and weights.
const char* backward_of_samples(const Problem&, const Backward&, void* stream);
// The cell of each sample of a slice, pair by pair.
const char* find_cells(const Problem&, const Slice&, int32_t* cells, void* stream);
// The gradient of value, from the cells in ascending order and what samples they are of.
const char* gather(const Problem&, const Backward&, const Slice&, const int32_t* cells,
                   const int64_t* samples, int32_t* starts, void* stream);

}  // namespace fuseport::ms_deform_attn::cuda
