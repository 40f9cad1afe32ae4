// The kernels of the rotary embedding over raw pointers: the interface between kernel.cpp, compiled
// once per instruction set, and its bindings.
//
// Work is cut into units of some positions, as shapes alone decide. Forward, a unit has all heads of a
// batch element; backward, all that share a table of angles, so that it has the whole sum of each of
// their gradients. Hence bits do not depend on threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport::rotary_embedding {

constexpr int64_t WORTH = 1 << 14;      // numbers of x that are worth a unit
constexpr int64_t MOST_POSITIONS = 64;  // in a unit

// (b, h, l, p), with contiguous channels; strides in elements, any value.
struct Heads {
  const void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, stride = 0;
};

// (b or 1, l, pairs) of cosines or sines, with contiguous pairs.
struct Table {
  const void* data = nullptr;
  int64_t batch_stride = 0, stride = 0;
};

struct Problem {
  Dtype dtype = Dtype::float32;  // computed in double for float64, else in float
  bool wide_angles = false;      // tables are float32 beside a half type
  bool interleaved = false;      // pairs are neighbours
  bool of_batch = false;         // each batch element has its own tables
  int64_t batch = 0, heads = 0, length = 0, channels = 0, pairs = 0;
  Heads x;
  Table cos, sin;

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t positions_per_unit() const {
    const int64_t numbers = heads * channels;
    if (numbers == 0) return MOST_POSITIONS;
    const int64_t worth = (WORTH + numbers - 1) / numbers;
    return worth < MOST_POSITIONS ? worth : MOST_POSITIONS;
  }
  FUSEPORT_INLINED int64_t blocks() const {
    return (length + positions_per_unit() - 1) / positions_per_unit();
  }
};

struct Backward {
  Heads dout;
  void* dx = nullptr;                    // (b, h, l, p), contiguous
  void *dcos = nullptr, *dsin = nullptr;  // (b or 1, l, pairs), contiguous, in the tables' dtype
};

// The kernels for one instruction set. Scratch is of 16 bytes for each pair of a unit's positions.
struct Kernels {
  void (*forward)(const Problem&, void* out, int64_t unit);
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);
};

FUSEPORT_CHOOSE_KERNELS()

}  // namespace fuseport::rotary_embedding
