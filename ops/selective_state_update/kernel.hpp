// What the kernel of the state update takes and gives, over raw pointers: the interface between
// kernel.cpp, compiled once per instruction set, and its bindings.
//
// Work is cut into units that depend on nothing of each other: channels of one head of one batch
// entry, BLOCK at most. Hence bits do not depend on threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"
#include "native/schedule.hpp"

namespace fuseport::selective_state_update {

constexpr int64_t BLOCK = 64;  // channels of a unit, at most

// (b, h, d), (b, h, d, N), (b, g, N) or the like; strides in elements, any value. A parameter has
// no batch, a coefficient no channel.
struct Strided {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, channel = 0, state = 0;
};

struct Problem {
  Dtype dtype = Dtype::float32;  // of x, dt, B, C and z; parameters are float, or double for float64
  bool wide_state = true;        // whether the state is of the parameters' type, or of x's
  int64_t batches = 0, heads = 0, channels = 0, states = 0;
  int64_t heads_per_group = 1;
  bool softplus = false;
  Strided state, x, dt, A, B, C, D, z, dt_bias;  // z.data is null where there is no gate
  void* out = nullptr;                           // (b, h, d), contiguous, in `dtype`
  void* new_state = nullptr;                     // (b, h, d, N), contiguous, in state's type

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t blocks() const { return (channels + BLOCK - 1) / BLOCK; }
  FUSEPORT_INLINED int64_t units() const { return batches * heads * blocks(); }
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*scratch)(const Problem&);  // bytes for one unit, to be 64-aligned
  void (*update)(const Problem&, int64_t unit, void* scratch);
};

FUSEPORT_CHOOSE_KERNELS()

// Runs all units on the threads of `host`, which is as for `for_each_unit`.
template <class Host>
void run(const Host& host, const Problem& p) {
  const Kernels& k = kernels();
  const int64_t steps = p.batches * p.heads * p.channels * p.states;
  for_each_unit(host, p.units(), steps, k.scratch(p),
                [&](int64_t unit, void* scratch) { k.update(p, unit, scratch); });
}

}  // namespace fuseport::selective_state_update
