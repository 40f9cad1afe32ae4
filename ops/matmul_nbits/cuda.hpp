// The CUDA kernels of the layer as their bindings see them; no header of CUDA, none of torch.
//
// For few rows the weight is decoded as it is multiplied, and neither rounded nor written anywhere.
// For more, and in the backward, its values are rounded to the dtype of x: in shared memory, by
// products that need no library; or, by `decode`, in memory of a host that has a product of its own.
#pragma once

#include "matmul_nbits/kernel.hpp"

namespace fuseport::matmul_nbits::cuda {

using stored::Tile;

constexpr int64_t FEW = 16;  // up to so many rows, a product by tiles reads and writes more

// Start on a stream, a cudaStream_t, of the current device, and do not wait for it. They return
// null, or what CUDA says is wrong. Scratch memory is of the device, of so many bytes, aligned to
// 16, and there until they are done. So are outputs aligned, but those of FEW rows.
int64_t forward_scratch(const Problem&);
const char* forward(const Problem&, const Forward&, void* scratch, void* stream);
int64_t backward_scratch(const Problem&);
const char* backward(const Problem&, const Backward&, void* scratch, void* stream);
const char* decode(const Problem&, const Tile&, void* to, void* stream);  // contiguous, in `dtype`

}  // namespace fuseport::matmul_nbits::cuda
