// What the kernels of the causal convolution take and give, over raw pointers: the interface
// between kernel.cpp, compiled once per instruction set, and its bindings.
//
// Work is cut into units that depend on nothing of each other: one batch entry and a block of
// channels. A unit's arithmetic does not depend on which thread runs it, and what sums over units
// does so in their order; hence bits do not depend on threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport::causal_conv1d {

// Elements of (b, d, l) in the problem's dtype; strides in elements, any value.
struct Sequence {
  const void* data = nullptr;
  int64_t batch = 0, channel = 0, time = 0;
};

struct MutableSequence {
  void* data = nullptr;
  int64_t batch = 0, channel = 0, time = 0;
};

struct Problem {
  Dtype dtype = Dtype::float32;  // of sequences; sums are of double for float64, else of float
  bool wide_weight = false;      // whether weight and bias have the sums' type, or `dtype`
  bool silu = false;
  // Vectors go along time, or along channels: outputs have stride 1 there.
  bool time_last = true;
  int64_t batches = 0, channels = 0, length = 0, width = 1;
  Sequence x;
  Sequence initial;                  // (b, d, W-1), where sequences are not packed
  bool packed = false;
  const int32_t* seq_idx = nullptr;  // (b, l), contiguous, where they are
  const void* weight = nullptr;      // (d, W), contiguous
  const void* bias = nullptr;        // (d,), contiguous

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t block() const { return time_last ? 8 : 64; }   // channels of a unit
  FUSEPORT_INLINED int64_t chunk() const { return time_last ? 512 : 32; }  // steps at a time
  FUSEPORT_INLINED int64_t blocks() const { return (channels + block() - 1) / block(); }
  FUSEPORT_INLINED int64_t units() const { return batches * blocks(); }
};

struct Forward {
  MutableSequence out;
  void* final_states = nullptr;  // (b, d, W-1), contiguous, in the problem's dtype
};

struct Backward {
  Sequence dout;
  Sequence dfinal;  // (b, d, W-1)
  MutableSequence dx;
  void* dinitial = nullptr;        // (b, d, W-1), contiguous, where sequences are not packed
  double* weight_parts = nullptr;  // (b, d, W): sums over time, which `finish` adds up
  double* bias_parts = nullptr;    // (b, d)
  void* dweight = nullptr;         // (d, W), contiguous, in the type of weight
  void* dbias = nullptr;           // (d,), likewise
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*scratch_bytes)(const Problem&);  // for one unit, to be 64-aligned
  void (*forward)(const Problem&, const Forward&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);
  void (*finish)(const Problem&, const Backward&);  // after all units of backward
};

FUSEPORT_CHOOSE_KERNELS()

}  // namespace fuseport::causal_conv1d
