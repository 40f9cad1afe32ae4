// The kernels of SwiGLU over raw pointers: the interface between kernel.cpp, compiled once per
// instruction set, and its bindings.
//
// Work is cut into units, of rows or of pieces of a row, as shapes alone decide. Every number that is
// written depends on one place of each input.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport::swiglu {

constexpr int64_t PIECE = 1 << 13;  // numbers of a row that are worth a unit

// Rows of contiguous numbers; the stride, in elements, is that from row to row.
struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;
};

struct MutableRows {
  void* data = nullptr;
  int64_t stride = 0;
};

struct Problem {
  Dtype dtype = Dtype::float32;  // computed in double for float64, else in float
  int64_t rows = 0, channels = 0;
  Rows gate, up;

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t pieces() const { return (channels + PIECE - 1) / PIECE; }
  FUSEPORT_INLINED int64_t rows_per_unit() const {
    return channels < PIECE ? (PIECE + channels - 1) / channels : 1;
  }
  FUSEPORT_INLINED int64_t units() const {
    if (rows == 0 || channels == 0) return 0;
    return (rows + rows_per_unit() - 1) / rows_per_unit() * pieces();
  }
};

struct Backward {
  Rows dout;
  MutableRows dgate, dup;
};

// The kernels for one instruction set.
struct Kernels {
  void (*forward)(const Problem&, const MutableRows& out, int64_t unit);
  void (*backward)(const Problem&, const Backward&, int64_t unit);
};

FUSEPORT_CHOOSE_KERNELS()

// Calls run(unit) for all units on the host's threads.
template <class Host, class Run>
void for_each_unit(const Host& host, const Problem& p, const Run& run) {
  const int64_t units = p.units();
  if (units == 0) return;
  const int64_t threads = host.threads_for(units, 8 * p.rows * p.channels);
  host.parallel(units, threads, [&](int64_t unit, int64_t) { run(unit); });
}

}  // namespace fuseport::swiglu
