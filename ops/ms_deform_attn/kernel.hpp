// What the kernels of deformable attention take and give, over raw pointers: the interface between
// kernel.cpp, compiled once per instruction set, and its bindings.
//
// Work is cut into units that depend on nothing of each other: forward, some queries of one head of
// one batch entry; backward, all of them, so that one thread adds up the gradients of a pixel, in
// the order of queries. Hence bits do not depend on threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"
#include "native/schedule.hpp"

namespace fuseport::ms_deform_attn {

constexpr int64_t QUERIES = 64;  // of a unit, forward

// All tensors are contiguous; levels have been checked: their pixels are positions of value.
struct Problem {
  Dtype dtype = Dtype::float32;  // of value and out
  bool wide_points = false;      // whether locations and weights have the sums' type, or `dtype`
  int64_t batches = 0, positions = 0, heads = 0, channels = 0, queries = 0, levels = 0, points = 0;
  const void* value = nullptr;      // (b, s, h, c)
  const int64_t* shapes = nullptr;  // (L, 2)
  const int64_t* starts = nullptr;  // (L,)
  const void* locations = nullptr;  // (b, q, h, L, P, 2)
  const void* weights = nullptr;    // (b, q, h, L, P)

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t samples() const { return levels * points; }  // of a query and head
  FUSEPORT_INLINED int64_t blocks() const { return (queries + QUERIES - 1) / QUERIES; }
  FUSEPORT_INLINED int64_t pairs() const { return batches * heads; }
  FUSEPORT_INLINED int64_t steps() const {
    return pairs() * queries * samples() * 4 * (channels + 8);
  }
};

struct Forward {
  void* out = nullptr;  // (b, q, h, c)
};

struct Backward {
  const void* dout = nullptr;  // (b, q, h, c)
  void* dvalue = nullptr;      // like what it is the gradient of
  void* dlocations = nullptr;
  void* dweights = nullptr;
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*forward_scratch)(const Problem&);  // bytes, to be 64-aligned
  int64_t (*backward_scratch)(const Problem&);
  void (*forward)(const Problem&, const Forward&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);
};

FUSEPORT_CHOOSE_KERNELS()

// Runs all units on the threads of `host`, which is as for `for_each_unit`.
template <class Host>
void run(const Host& host, const Problem& p, const Forward& f) {
  const Kernels& k = kernels();
  for_each_unit(host, p.pairs() * p.blocks(), p.steps(), k.forward_scratch(p),
                [&](int64_t unit, void* scratch) { k.forward(p, f, unit, scratch); });
}

template <class Host>
void run(const Host& host, const Problem& p, const Backward& b) {
  const Kernels& k = kernels();
  for_each_unit(host, p.pairs(), p.steps(), k.backward_scratch(p),
                [&](int64_t unit, void* scratch) { k.backward(p, b, unit, scratch); });
}

}  // namespace fuseport::ms_deform_attn
