// What the kernel of a decoding step of the causal convolution takes and gives, over raw pointers:
// the interface between kernel.cpp, compiled once per instruction set, and its bindings.
//
// A unit is one batch entry and a block of channels; units depend on nothing of each other.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"
#include "native/schedule.hpp"

namespace fuseport::causal_conv1d_update {

constexpr int64_t BLOCK = 128;  // channels of a unit, at most

// Elements of (b, d, l) in the problem's dtype; strides in elements, any value.
struct Sequence {
  const void* data = nullptr;
  int64_t batch = 0, channel = 0, time = 0;
};

struct Problem {
  Dtype dtype = Dtype::float32;  // of sequences; sums are of double for float64, else of float
  bool wide_weight = false;      // whether weight and bias have the sums' type, or `dtype`
  bool silu = false;
  bool circular = false;
  int64_t batches = 0, channels = 0, length = 0, slots = 0, width = 1;
  Sequence x, state;              // (b, d, l) and (b, d, slots)
  const int32_t* seqlens = nullptr;  // (b,), contiguous, where the state is circular
  const void* weight = nullptr;   // (d, W), contiguous
  const void* bias = nullptr;     // (d,), contiguous
  void* out = nullptr;            // (b, d, l), contiguous, like the next one
  void* new_state = nullptr;      // (b, d, slots)

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t blocks() const { return (channels + BLOCK - 1) / BLOCK; }
  FUSEPORT_INLINED int64_t units() const { return batches * blocks(); }
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*scratch_bytes)(const Problem&);  // for one unit, to be 64-aligned
  void (*step)(const Problem&, int64_t unit, void* scratch);
};

FUSEPORT_CHOOSE_KERNELS()

// Runs all units on the threads of `host`, which is as for `for_each_unit`.
template <class Host>
void run(const Host& host, const Problem& p) {
  const Kernels& k = kernels();
  const int64_t steps = p.batches * p.channels * (p.length * p.width + p.slots);
  for_each_unit(host, p.units(), steps, k.scratch_bytes(p),
                [&](int64_t unit, void* scratch) { k.step(p, unit, scratch); });
}

}  // namespace fuseport::causal_conv1d_update
