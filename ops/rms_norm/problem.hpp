// What the kernels of norms take and give, over raw pointers: the interface between kernel.cpp,
// compiled once per instruction set, and its bindings. `rms_norm_gated` has the same.
//
// Work is cut into units of rows, as shapes alone decide. A unit's arithmetic does not depend on
// which thread runs it, and what sums over units does so in their order; hence bits do not depend on
// threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport::rms_norm {

constexpr int64_t MOST_UNITS = 128;   // each has a partial sum of weight's gradient
constexpr int64_t WORTH = 1 << 14;    // numbers that are worth a unit

enum class Mode { plain, norm_first, gate_first };

// Rows of d numbers in the problem's dtype: row r is at (r / inner)·outer_stride + (r % inner)·
// inner_stride, with the problem's `inner`. Strides in elements, any value.
struct Rows {
  const void* data = nullptr;
  int64_t outer_stride = 0, inner_stride = 0, channel_stride = 1;
};

struct Problem {
  Dtype dtype = Dtype::float32;         // computed in double for float64, else in float
  Dtype weight_dtype = Dtype::float32;  // dtype, or that of computation
  Mode mode = Mode::plain;
  int64_t rows = 0, inner = 1, channels = 0;
  int64_t group = 1;  // channels that share a mean; divides `channels`
  double eps = 0;
  bool gather = false;  // whether a channel_stride is not 1
  Rows x, z;  // z only where there is a gate
  const void* weight = nullptr;
  int64_t weight_stride = 1;

  // Inlined always: a copy that is compiled for one instruction set must not serve another.
  FUSEPORT_INLINED int64_t groups() const { return channels / group; }
  FUSEPORT_INLINED int64_t rows_per_unit() const {
    const int64_t worth = (WORTH + channels - 1) / (channels > 0 ? channels : 1);
    const int64_t share = (rows + MOST_UNITS - 1) / MOST_UNITS;
    return worth > share ? worth : share;
  }
  FUSEPORT_INLINED int64_t units() const {
    return rows > 0 && channels > 0 ? (rows + rows_per_unit() - 1) / rows_per_unit() : 0;
  }
};

struct Forward {
  void* out = nullptr;   // (rows, d), contiguous; null where only rstd is wanted
  void* rstd = nullptr;  // (rows, groups), contiguous, in the type of computation
};

struct Backward {
  Rows dout;
  const void* rstd = nullptr;  // as forward left it
  void* dx = nullptr;          // (rows, d), contiguous
  void* dz = nullptr;
  double* dweight = nullptr;   // (units, d): sums over one unit
};

// Adds up the parts of weight's gradient, SUM_COLUMNS of them for each unit of this sum.
constexpr int64_t SUM_COLUMNS = 256;
struct SumUnits {
  const double* parts = nullptr;
  void* total = nullptr;  // (d,), contiguous, in weight's dtype
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*scratch_bytes)(const Problem&);  // for one unit, to be 64-aligned
  void (*forward)(const Problem&, const Forward&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);
  void (*sum_units)(const Problem&, const SumUnits&, int64_t unit);
};

}  // namespace fuseport::rms_norm
