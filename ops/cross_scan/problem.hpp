// What the kernels of walks over images take and give, over raw pointers: the interface between
// kernel.cpp, compiled once per instruction set, and its bindings. `cross_merge` has the same.
//
// Work is cut into units, of whole planes or of strips of rows of one plane, as shapes alone decide.
// Every number that is written depends on one place in memory, or on four in a fixed order.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport::cross_scan {

constexpr int64_t STRIP = 64;       // rows, of a plane that is worth several units
constexpr int64_t WORTH = 1 << 14;  // numbers that are worth a unit

// An image (b, C, H, W) and four walks over it, (b, 4, C, H·W). Strides in elements.
struct Problem {
  Dtype dtype = Dtype::float32;
  int64_t batches = 0, channels = 0, height = 0, width = 0;

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t pixels() const { return height * width; }
  FUSEPORT_INLINED int64_t planes() const { return batches * channels; }
  FUSEPORT_INLINED bool empty() const { return planes() == 0 || pixels() == 0; }
  FUSEPORT_INLINED int64_t rows_per_unit() const { return pixels() < 2 * WORTH ? height : STRIP; }
  FUSEPORT_INLINED int64_t strips() const {
    return (height + rows_per_unit() - 1) / rows_per_unit();
  }
  FUSEPORT_INLINED int64_t planes_per_unit() const {
    return strips() > 1 ? 1 : (WORTH + pixels() - 1) / pixels();
  }
  FUSEPORT_INLINED int64_t units() const {
    return (planes() + planes_per_unit() - 1) / planes_per_unit() * strips();
  }
};

struct Scan {
  const void* x = nullptr;  // numbers of a row are contiguous
  int64_t batch_stride = 0, channel_stride = 0, row_stride = 0;
  void* out = nullptr;  // contiguous
};

struct Merge {
  const void* ys = nullptr;  // numbers of a walk are contiguous
  int64_t batch_stride = 0, walk_stride = 0, channel_stride = 0;
  void* out = nullptr;  // contiguous
};

// The kernels for one instruction set.
struct Kernels {
  void (*scan)(const Problem&, const Scan&, int64_t unit);
  void (*merge)(const Problem&, const Merge&, int64_t unit);
};

}  // namespace fuseport::cross_scan
