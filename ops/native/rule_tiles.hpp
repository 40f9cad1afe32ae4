// What the kernels of delta rules share on the CPU: steps of one head as rows of reals, and states as
// blocks of values; columns that fill a row up to whole vectors are zero. Compiled once per instruction
// set.
#pragma once

#include "native/blocks.hpp"
#include "native/scratch.hpp"
#include "native/strided.hpp"

namespace fuseport::FUSEPORT_ISA {

// Numbers in a row of so many that are in use.
template <class F>
FUSEPORT_INLINE int64_t padded(int64_t count) {
  return (count + F::LANES - 1) / F::LANES * F::LANES;
}

template <class Real>
FUSEPORT_INLINE void fill(Real* row, int64_t count, Real with) {
  for (int64_t i = 0; i < count; ++i) row[i] = with;
}

template <class F>
FUSEPORT_INLINE void scale_tile(typename F::Real* tile, int64_t count, typename F::Real by) {
  for (int64_t i = 0; i < count; i += F::LANES) store<F>(tile + i, load<F>(tile + i) * by);
}

// `count` rows from step `start` on, of columns from `first` on.
template <class F, class Stored>
static void load_steps(const Strided& s, int64_t batch, int64_t head, int64_t start, int count,
                       int64_t first, int columns, int64_t row, typename F::Real* tile) {
  const Stored* from = (const Stored*)s.data + batch * s.batch + start * s.step + head * s.head +
                       first * s.column;
  if (columns < row) memset(tile, 0, sizeof *tile * count * row);
  load_block<F>(from, s.step, s.column, count, columns, tile, (int)row);
}

// exp of `count` rows of `keys` logarithms, a row of key channels for each step; zero beyond the last.
template <class F>
static void load_channel_decays(const Strided& s, int64_t batch, int64_t head, int64_t start,
                                int count, int64_t keys, int64_t row, typename F::Real* tile) {
  load_steps<F, typename F::Real>(s, batch, head, start, count, 0, (int)keys, row, tile);
  for (int64_t i = 0; i < count * row; i += F::LANES) store<F>(tile + i, exp<F>(load<F>(tile + i)));
  for (int t = 0; t < count; ++t)
    for (int64_t i = keys; i < row; ++i) tile[t * row + i] = 0;
}

// (K, V), contiguous, as blocks of as many values as a vector has lanes, and back. A block is (padded K
// / lanes) squares of lanes × lanes, a row of a square being that of a value.
template <class F>
static void load_blocks(int64_t keys, int64_t values, const typename F::Real* from,
                        typename F::Real* blocks) {
  const int64_t row = padded<F>(keys), wide = padded<F>(values);
  memset(blocks, 0, sizeof *blocks * row * wide);
  for (int64_t v = 0; v < values; v += F::LANES)
    for (int64_t i = 0; i < keys; i += F::LANES) {
      const int rows = (int)(values - v < F::LANES ? values - v : F::LANES);
      const int columns = (int)(keys - i < F::LANES ? keys - i : F::LANES);
      load_block<F>(from + i * values + v, 1, values, rows, columns, blocks + v * row + i * F::LANES,
                    F::LANES);
    }
}

template <class F>
static void store_blocks(int64_t keys, int64_t values, const typename F::Real* blocks,
                         typename F::Real* to) {
  const int64_t row = padded<F>(keys);
  for (int64_t v = 0; v < values; v += F::LANES)
    for (int64_t i = 0; i < keys; i += F::LANES) {
      const int rows = (int)(values - v < F::LANES ? values - v : F::LANES);
      const int columns = (int)(keys - i < F::LANES ? keys - i : F::LANES);
      store_block<F>(blocks + v * row + i * F::LANES, F::LANES, rows, columns, to + i * values + v, 1,
                     values);
    }
}

}  // namespace fuseport::FUSEPORT_ISA
