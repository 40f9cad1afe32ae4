// Rows of numbers of any dtype and strides as vectors: in place where channels are contiguous, else
// gathered into tiles. Compiled once per instruction set.
#pragma once

#include "native/blocks.hpp"
#include "native/parts.hpp"
#include "rms_norm/problem.hpp"

namespace fuseport::rms_norm::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

constexpr int TILE = 16;    // rows that are gathered at once: no fewer than lanes of a vector
constexpr int AT_ONCE = 4;  // rows that backward has in a cache at once

// A unit's own memory.
template <class Real>
struct Scratch {
  Real *weight, *row, *tiles[3];
  int64_t bytes;

  Scratch(const Problem& p, void* base) {
    char* at = (char*)base;
    const auto take = [&](int64_t count) {
      Real* here = (Real*)at;
      at += (count * (int64_t)sizeof(Real) + 63) / 64 * 64;
      return here;
    };
    weight = take(p.channels);
    row = take(p.group);
    for (Real*& tile : tiles) tile = take(p.gather ? TILE * p.channels : 0);
    bytes = at - (char*)base;
  }
};

template <class F>
static void load_weight(const Problem& p, typename F::Real* to) {
  const int columns = (int)p.channels, stride = columns;
  switch (p.weight_dtype) {
    case Dtype::float16:
      if constexpr (sizeof(typename F::Real) == 4)
        load_block<F>((const Half*)p.weight, 0, p.weight_stride, 1, columns, to, stride);
      return;
    case Dtype::bfloat16:
      if constexpr (sizeof(typename F::Real) == 4)
        load_block<F>((const BFloat16*)p.weight, 0, p.weight_stride, 1, columns, to, stride);
      return;
    default:
      load_block<F>((const typename F::Real*)p.weight, 0, p.weight_stride, 1, columns, to, stride);
  }
}

// Rows of COUNT tensors, each of contiguous numbers.
template <class Number, int COUNT>
struct Tile {
  using In = Number;
  const In* at[COUNT][TILE];
};

template <class Stored>
FUSEPORT_INLINE const Stored* row_of(const Problem& p, const Rows& rows, int64_t row) {
  return (const Stored*)rows.data + row / p.inner * rows.outer_stride +
         row % p.inner * rows.inner_stride;
}

// `count` rows of one tensor as rows of reals, d in each.
template <class F, class Stored>
static void gather(const Problem& p, const Rows& rows, int64_t row, int count,
                   typename F::Real* tile) {
  const int d = (int)p.channels;
  for (int done = 0; done < count;) {
    const int64_t left = p.inner - (row + done) % p.inner;
    const int some = count - done < left ? count - done : (int)left;
    load_block<F>(row_of<Stored>(p, rows, row + done), rows.inner_stride, rows.channel_stride,
                  some, d, tile + (int64_t)done * d, d);
    done += some;
  }
}

// Calls work(first row, count, tile) for all rows of a unit; `work` takes tiles of Stored, and of
// reals where they had to be gathered.
template <class F, class Stored, int COUNT, class Work>
static void each_tile(const Problem& p, const Rows* const* inputs, int64_t unit,
                      const Scratch<typename F::Real>& s, const Work& work) {
  const int64_t start = unit * p.rows_per_unit();
  const int64_t end = start + p.rows_per_unit() < p.rows ? start + p.rows_per_unit() : p.rows;
  for (int64_t row = start; row < end; row += TILE) {
    const int count = (int)(end - row < TILE ? end - row : TILE);
    if (p.gather) {
      Tile<typename F::Real, COUNT> tile;
      for (int j = 0; j < COUNT; ++j) {
        gather<F, Stored>(p, *inputs[j], row, count, s.tiles[j]);
        for (int i = 0; i < count; ++i) tile.at[j][i] = s.tiles[j] + i * p.channels;
      }
      work(row, count, tile);
    } else {
      Tile<Stored, COUNT> tile;
      for (int j = 0; j < COUNT; ++j)
        for (int i = 0; i < count; ++i) tile.at[j][i] = row_of<Stored>(p, *inputs[j], row + i);
      work(row, count, tile);
    }
  }
}

}  // namespace fuseport::rms_norm::FUSEPORT_ISA
