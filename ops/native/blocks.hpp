// Blocks of numbers of any dtype and strides, read as rows of reals and written back, with vectors
// wherever one of the strides is 1. Compiled once per instruction set, as vector.hpp is.
#pragma once

#include "native/lanes.hpp"
#include "native/storage.hpp"

namespace fuseport::FUSEPORT_ISA {

// `rows` × `columns` numbers, of any strides in elements, as rows of a tile; the tile's other
// columns are left as they are.
template <class F, class Stored>
static void load_block(const Stored* from, int64_t row_stride, int64_t column_stride, int rows,
                       int columns, typename F::Real* tile, int tile_stride) {
  constexpr int LANES = F::LANES;
  if (column_stride == 1) {
    for (int r = 0; r < rows; ++r) {
      int c = 0;
      for (; c + LANES <= columns; c += LANES)
        store<F>(tile + r * tile_stride + c, load_reals<F>(from + r * row_stride + c));
      for (; c < columns; ++c) tile[r * tile_stride + c] = to_real(from[r * row_stride + c]);
    }
    return;
  }
  int r = 0;
  if (row_stride == 1) {
    for (; r + LANES <= rows; r += LANES) {
      int c = 0;
      for (; c + LANES <= columns; c += LANES) {
        typename F::Vector block[LANES];
        if constexpr (sizeof(Stored) == sizeof(typename F::Real)) {
          const auto* first = (const typename F::Real*)from + c * column_stride + r;
          load_columns<F>(first, column_stride, block);
        } else {
#pragma GCC unroll 16
          for (int i = 0; i < LANES; ++i)
            block[i] = load_reals<F>(from + (c + i) * column_stride + r);
          transpose<F>(block);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) store<F>(tile + (r + i) * tile_stride + c, block[i]);
      }
      for (; c < columns; ++c)
        for (int i = 0; i < LANES; ++i)
          tile[(r + i) * tile_stride + c] = to_real(from[c * column_stride + r + i]);
    }
  }
  for (int c = 0; c < columns; ++c)
    for (int i = r; i < rows; ++i)
      tile[i * tile_stride + c] = to_real(from[i * row_stride + c * column_stride]);
}

// And back.
template <class F, class Stored>
static void store_block(const typename F::Real* tile, int tile_stride, int rows, int columns,
                        Stored* to, int64_t row_stride, int64_t column_stride) {
  constexpr int LANES = F::LANES;
  if (column_stride == 1) {
    for (int r = 0; r < rows; ++r) {
      int c = 0;
      for (; c + LANES <= columns; c += LANES)
        store_reals<F>(load<F>(tile + r * tile_stride + c), to + r * row_stride + c);
      for (; c < columns; ++c) from_real(tile[r * tile_stride + c], to + r * row_stride + c);
    }
    return;
  }
  int r = 0;
  if (row_stride == 1) {
    for (; r + LANES <= rows; r += LANES) {
      int c = 0;
      for (; c + LANES <= columns; c += LANES) {
        typename F::Vector block[LANES];
        load_columns<F>(tile + r * tile_stride + c, tile_stride, block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
          store_reals<F>(block[i], to + (c + i) * column_stride + r);
      }
      for (; c < columns; ++c)
        for (int i = 0; i < LANES; ++i)
          from_real(tile[(r + i) * tile_stride + c], to + c * column_stride + r + i);
    }
  }
  for (int c = 0; c < columns; ++c)
    for (int i = r; i < rows; ++i)
      from_real(tile[i * tile_stride + c], to + i * row_stride + c * column_stride);
}

}  // namespace fuseport::FUSEPORT_ISA
