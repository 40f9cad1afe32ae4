// What the kernels of the rule take and give, over raw pointers: the interface between kernel.cpp,
// compiled once per instruction set, and its bindings.
//
// Columns of a state, (K, V), depend on nothing of each other: a unit of the forward is some columns of
// one head. The backward sums over columns; its unit is a head, which adds up in an order of its own.
// Hence bits do not depend on threads.
#pragma once

#include <cstdint>

#include "native/isa.hpp"
#include "native/schedule.hpp"
#include "native/strided.hpp"

namespace fuseport::dplr_delta_rule {

constexpr int64_t CHUNK = 32;  // steps between states that the backward keeps: as in cases.py

// The type that is computed in, float or double, is called real.
struct Problem {
  Dtype dtype = Dtype::float32;
  int64_t batches = 0, length = 0, heads = 0, keys = 0, values = 0;
  double scale = 1;
  Strided q, k, v, a, b;                // in `dtype`
  Strided log_decay;                    // real
  const void* initial_state = nullptr;  // (n, H, K, V), contiguous, real

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t chunks() const { return (length + CHUNK - 1) / CHUNK; }
};

struct Forward {
  void* out = nullptr;          // (n, l, H, V), contiguous, in `dtype`
  void* final_state = nullptr;  // (n, H, K, V), contiguous, real
};

struct Backward {
  Strided dout;
  const void* dfinal_state = nullptr;  // (n, H, K, V), contiguous, real
  // Contiguous, in the shapes and dtypes of what they belong to.
  void *dq = nullptr, *dk = nullptr, *dv = nullptr, *da = nullptr, *db = nullptr;
  void *dlog_decay = nullptr, *dinitial_state = nullptr;
};

// The functions for one instruction set. Scratch is each unit's own, 64-aligned.
struct Kernels {
  int64_t (*scratch_bytes)(const Problem&, bool backward);
  int64_t (*forward_units)(const Problem&);
  void (*forward)(const Problem&, const Forward&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);  // units: n · H
};

FUSEPORT_CHOOSE_KERNELS()

// The problem is not empty. `host` is as for `for_each_unit`.

template <class Host>
void run_forward(const Host& host, const Problem& p, const Forward& to) {
  const Kernels& k = kernels();
  const int64_t steps = p.batches * p.length * p.heads * p.keys * p.values;
  for_each_unit(host, k.forward_units(p), steps, k.scratch_bytes(p, false),
                [&](int64_t unit, void* scratch) { k.forward(p, to, unit, scratch); });
}

template <class Host>
void run_backward(const Host& host, const Problem& p, const Backward& to) {
  const Kernels& k = kernels();
  const int64_t steps = p.batches * p.length * p.heads * p.keys * p.values;
  for_each_unit(host, p.batches * p.heads, steps, k.scratch_bytes(p, true),
                [&](int64_t unit, void* scratch) { k.backward(p, to, unit, scratch); });
}

}  // namespace fuseport::dplr_delta_rule
