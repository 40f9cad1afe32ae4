// The CUDA kernels of the deformable convolution as their bindings see them; no header of CUDA, none of
// torch.
//
// The input is copied first, channels last, since a sample takes all channels of an offset group from
// the same pixels. Samples are made in shared memory, as tiles of the matrix that the weight is
// multiplied with; in half types they are rounded to these for tensor cores. The gradient of the
// input is gathered: samples are sorted by the pixels that they take, and each pixel adds up what
// they give it. No sum depends on the order in which threads run.
#pragma once

#include <cstdint>

#include "deform_conv2d/kernel.hpp"

namespace fuseport::deform_conv2d::cuda {

// How many batch entries are differentiated at once; 0 if the samples of one, or their cells, are too
// many to be counted in 31 bits.
int64_t batches_at_once(const Problem&);

// How many bytes the passes work in; null, or what CUDA says is wrong.
int64_t forward_scratch(const Problem&);
const char* backward_scratch(const Problem&, int64_t batches_at_once, int64_t* bytes);

// Start a pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong. `batches_at_once` is not 0, and `scratch` aligned to 16
// bytes.
const char* forward(const Problem&, const Forward&, void* scratch, void* stream);
const char* backward(const Problem&, const Backward&, int64_t batches_at_once, void* scratch,
                     void* stream);

}  // namespace fuseport::deform_conv2d::cuda
