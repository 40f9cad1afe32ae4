// The CUDA kernels of the causal convolution as their bindings see them; no header of CUDA, none of
// torch.
//
// A filter of at most four taps, as all models have it, is held in registers. Where channels lie in a
// row, a thread has some of them and goes through some steps; where steps do, it has 16 bytes of
// those, at addresses that 16 divides whatever the length is, and its neighbours have the steps around
// them. So each input comes from memory once. Other widths and layouts, and packed sequences whose
// steps lie in a row, have kernels of their own, which are right and plain. Which sums are made in
// which order depends on the problem and on the device's size alone.
#pragma once

#include <cstdint>

#include "causal_conv1d/kernel.hpp"

namespace fuseport::causal_conv1d::cuda {

// How a pass is cut.
struct Plan {
  bool plain = false;   // whether it is for the plain kernels
  int lanes = 1;        // threads of a block in a row: along channels, or along time
  int rows = 1;         // of a block: as many as it has such threads
  int packs = 0;        // of a thread of a chunk, where steps lie in a row
  int64_t units = 0;    // blocks that are wanted; of the backward along channels, others are
  int64_t steps = 1;    // that a thread goes through, where channels lie in a row
  int64_t chunks = 1;   // of the time of a batch entry
  int64_t columns = 0;  // blocks next to each other along channels
  int64_t parts = 0;    // sums of the weights' gradients, of blocks or of rows
};

struct Gradients {
  Sequence dout;
  Sequence dfinal;  // (b, d, W-1)
  MutableSequence dx;
  void* dinitial = nullptr;  // (b, d, W-1), contiguous, where sequences are not packed
  void* dweight = nullptr;   // (d, W), contiguous, in the type of weight
  void* dbias = nullptr;     // (d,), likewise
};

// Plans for the current device.
Plan forward_plan(const Problem&, const Forward&);
Plan backward_plan(const Problem&, const Gradients&);

// Bytes of device memory that the backward needs besides, aligned to 16; they need not be initialised.
int64_t backward_scratch(const Problem&, const Plan&);

// Start the pass on a stream, a cudaStream_t, of the current device, and do not wait for it. They
// return null, or what CUDA says is wrong.
const char* forward(const Problem&, const Plan&, const Forward&, void* stream);
const char* backward(const Problem&, const Plan&, const Gradients&, void* scratch, void* stream);

}  // namespace fuseport::causal_conv1d::cuda
