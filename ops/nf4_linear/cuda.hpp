// The CUDA kernels of the layer as their bindings see them; no header of CUDA, none of torch.
//
// For few rows the weight is decoded as it is multiplied, in float32 or float64, and never written
// anywhere. For more, a tile of it at a time is decoded into the dtype of x, and multiplied by the
// host's own product of matrices.
#pragma once

#include "nf4_linear/kernel.hpp"

namespace fuseport::nf4_linear::cuda {

constexpr int64_t FEW = 16;  // up to so many rows, a product by tiles reads and writes more

// A part of the weight, (out, in).
struct Tile {
  int64_t row = 0, rows = 0, column = 0, columns = 0;
};

// Start on a stream, a cudaStream_t, of the current device, and do not wait for it. They return
// null, or what CUDA says is wrong.
const char* forward(const Problem&, const Forward&, void* stream);
const char* decode(const Problem&, const Tile&, void* to, void* stream);  // contiguous, in `dtype`

}  // namespace fuseport::nf4_linear::cuda
