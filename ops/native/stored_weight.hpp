// Linear layers whose frozen weight is stored in few bits: what the kernels of such ops take and give,
// over raw pointers, and how work on them is handed out. stored_units.hpp has the work itself.
//
// Work is cut into units, as shapes alone decide: a strip of columns of the result, for a chunk of
// rows. A unit's arithmetic does not depend on which thread runs it; hence bits do not depend on
// threads.
#pragma once

#include <cstdint>

#include "native/dtype.hpp"
#include "native/isa.hpp"
#include "native/schedule.hpp"

namespace fuseport::stored {

constexpr int STRIP = 64;   // columns of a result that are a unit
constexpr int CHUNK = 256;  // rows that share a decoded tile of the weight
constexpr int FEW = 4;      // up to so many rows, a tile is a row of the weight
constexpr int DECODING = 16;  // up to so many, there is no tile, where a kernel does without

// Rows of numbers in the problem's dtype; strides in elements, any value.
struct Rows {
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 1;
};

// Of an op's problem, which says beside it where its weight is.
struct Sizes {
  Dtype dtype = Dtype::float32;  // computed in double for float64, else in float
  int64_t rows = 0, in = 0, out = 0;

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

// A part of the weight, (out, in).
struct Tile {
  int64_t row = 0, rows = 0, column = 0, columns = 0;
};

// The kernels of an op for one instruction set.
template <class Problem>
struct Kernels {
  int64_t (*scratch_bytes)(const Problem&);  // for one unit, to be 64-aligned
  void (*forward)(const Problem&, const Forward&, int64_t unit, void* scratch);
  void (*backward)(const Problem&, const Backward&, int64_t unit, void* scratch);  // dx
  void (*sum_rows)(const Problem&, const Backward&, int64_t unit, void* scratch);  // dbias
};

constexpr int64_t A_STEP = 16;  // products that take as long as a step of `threads_for`

template <class Host, class Problem>
void run(const Host& host, const Kernels<Problem>& k, const Problem& p, const Forward& f) {
  if (p.rows == 0 || p.out == 0) return;
  for_each_unit(host, p.forward_units(), p.rows * p.out * p.in / A_STEP, k.scratch_bytes(p),
                [&](int64_t unit, void* scratch) { k.forward(p, f, unit, scratch); });
}

template <class Host, class Problem>
void run(const Host& host, const Kernels<Problem>& k, const Problem& p, const Backward& b) {
  if (p.rows > 0 && p.in > 0)
    for_each_unit(host, p.backward_units(), p.rows * p.out * p.in / A_STEP, k.scratch_bytes(p),
                  [&](int64_t unit, void* scratch) { k.backward(p, b, unit, scratch); });
  if (p.out > 0)
    for_each_unit(host, p.bias_units(), p.rows * p.out / A_STEP, k.scratch_bytes(p),
                  [&](int64_t unit, void* scratch) { k.sum_rows(p, b, unit, scratch); });
}

}  // namespace fuseport::stored
