// The kernels of the loss over raw pointers: the interface between kernel.cpp, compiled once per
// instruction set, and its bindings.
//
// Work is cut into units of rows, as shapes alone decide, and a row is summed in an order that its
// length decides: hence bits do not depend on threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport::softmax_cross_entropy {

constexpr int64_t WORTH = 1 << 13;  // logits that are worth a unit

struct Problem {
  Dtype dtype = Dtype::float32;  // of logits; computed in double for float64, else in float
  int64_t rows = 0, classes = 1;
  const void* logits = nullptr;  // (n, V), with contiguous classes
  int64_t stride = 0;            // from row to row, in elements, any value
  const int64_t* targets = nullptr;
  int64_t ignore_index = 0;
  double label_smoothing = 0;

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t rows_per_unit() const { return (WORTH + classes - 1) / classes; }
  FUSEPORT_INLINED int64_t units() const { return (rows + rows_per_unit() - 1) / rows_per_unit(); }
};

// (n,), in the type of computation.
struct Forward {
  void *losses = nullptr, *largest = nullptr, *total = nullptr;
};

struct Backward {
  const void *dlosses = nullptr, *largest = nullptr, *total = nullptr;
  void* dlogits = nullptr;  // (n, V), contiguous
};

// The kernels for one instruction set.
struct Kernels {
  void (*forward)(const Problem&, const Forward&, int64_t unit);
  void (*backward)(const Problem&, const Backward&, int64_t unit);
};

FUSEPORT_CHOOSE_KERNELS()

// Calls run(unit) for all units on the host's threads.
template <class Host, class Run>
void for_each_unit(const Host& host, const Problem& p, const Run& run) {
  if (p.rows == 0) return;
  const int64_t threads = host.threads_for(p.units(), 8 * p.rows * p.classes);
  host.parallel(p.units(), threads, [&](int64_t unit, int64_t) { run(unit); });
}

}  // namespace fuseport::softmax_cross_entropy
