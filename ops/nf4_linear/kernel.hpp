// What the kernels of the layer take and give, over raw pointers: the interface between kernel.cpp,
// compiled once per instruction set, and its bindings.
//
// Work is cut into units, as shapes alone decide: a strip of columns of the result, for a chunk of
// rows. A unit's arithmetic does not depend on which thread runs it; hence bits do not depend on
// threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"

namespace fuseport::nf4_linear {

constexpr int STRIP = 64;   // columns of a result that are a unit
constexpr int CHUNK = 256;  // rows that share a decoded tile of the weight
constexpr int FEW = 4;      // up to so many rows, a tile is a row of the weight
constexpr int DECODING = 16;  // up to so many, there is no tile, where a kernel does without

// Rows of numbers in the problem's dtype; strides in elements, any value.
struct Rows {
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 1;
};

struct Problem {
  Dtype dtype = Dtype::float32;  // computed in double for float64, else in float
  int64_t rows = 0, in = 0, out = 0;
  int block_shift = 6;              // a block is 2^block_shift values
  int quant_type = 1;               // which of the codes of code.hpp
  const uint8_t* packed = nullptr;  // contiguous, as absmax is
  const void* absmax = nullptr;     // of the type of computation

  FUSEPORT_INLINED int64_t chunks() const { return (rows + CHUNK - 1) / CHUNK; }
  FUSEPORT_INLINED int64_t forward_units() const { return (out + STRIP - 1) / STRIP * chunks(); }
  FUSEPORT_INLINED int64_t backward_units() const { return (in + STRIP - 1) / STRIP * chunks(); }
  FUSEPORT_INLINED int64_t bias_units() const { return (out + STRIP - 1) / STRIP; }
};

struct Forward {
  Rows x;
  const void* bias = nullptr;  // contiguous
  void* out = nullptr;         // (rows, out), contiguous
};

struct Backward {
  Rows dout;
  void* dx = nullptr;     // (rows, in), contiguous
  void* dbias = nullptr;  // (out,), contiguous
};

// The kernels for one instruction set.
struct Kernels {
  int64_t (*scratch_bytes)(const Problem&);  // for one unit, to be 64-aligned
  void (*forward)(const Problem&, const Forward&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);  // dx
  void (*sum_rows)(const Problem&, const Backward&, int64_t unit, void* scratch);  // dbias
};

FUSEPORT_CHOOSE_KERNELS()

}  // namespace fuseport::nf4_linear
