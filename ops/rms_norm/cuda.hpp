// The CUDA kernels of norms as their bindings see them; no header of CUDA, none of torch.
// `rms_norm_gated` has the same.
//
// A row, or a group of its channels, is read once: threads of a warp, or of a block, hold it in
// registers between its mean and its outputs. In the backward a thread has the same channels of many
// rows, and sums of weight's gradient in registers too; those of blocks are added up in their order.
// Groups that no registers hold, and rows that are not aligned, have kernels of their own, which are
// right and plain. Which sums are made in which order depends on the problem and on the device's size
// alone.
#pragma once

#include <cstdint>

#include "rms_norm/problem.hpp"

namespace fuseport::rms_norm::cuda {

// How a pass is cut.
struct Plan {
  bool plain = false;  // whether it is for the plain kernels
  int lanes = 1;       // threads that share a group of channels
  int lane_bits = 0;   // 2 to the power of which they are
  int64_t groups = 1;  // of a row
  int threads = 1;     // of a block
  int64_t parts = 0;   // sums of weight's gradient, one of each block that has a group
};

struct Gradients {
  Rows dout;
  const void* rstd = nullptr;  // as forward left it
  void *dx = nullptr, *dz = nullptr;  // (rows, d), contiguous
  void* dweight = nullptr;            // (d,), contiguous, in weight's dtype
};

// The kernels of one op. They start a pass on a stream, a cudaStream_t, of the current device, and do
// not wait for it; they return null, or what CUDA says is wrong.
struct Kernels {
  Plan (*forward_plan)(const Problem&);
  Plan (*backward_plan)(const Problem&, const Gradients&);
  // Bytes of device memory that the backward needs besides; they need not be initialised.
  int64_t (*backward_scratch)(const Problem&, const Plan&);
  const char* (*forward)(const Problem&, const Plan&, const Forward&, void* stream);
  const char* (*backward)(const Problem&, const Plan&, const Gradients&, void* scratch,
                          void* stream);
};

// Those of the plain norm.
const Kernels& kernels();

}  // namespace fuseport::rms_norm::cuda
