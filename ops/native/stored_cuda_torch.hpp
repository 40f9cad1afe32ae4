// Products of many rows with a stored weight, of which torch multiplies decoded tiles: small enough to
// stay in a GPU's L2, and rounded to the dtype of x.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "native/stored_torch.hpp"

namespace fuseport::stored {

constexpr int64_t TILE_BYTES = 1 << 25, WHOLE = 64;  // rows or columns of tiles are multiples

// How many of `count` rows or columns of the weight, each of `size` numbers, are a tile.
inline int64_t tile_of(int64_t count, int64_t size, const Tensor& like) {
  const int64_t fit = TILE_BYTES / std::max<int64_t>(size * like.element_size(), 1);
  return std::min(count, std::max(fit / WHOLE * WHOLE, WHOLE));
}

// out = x·Wᵀ + bias, of matrices. decode(tile, to) starts to decode a part of W.
template <class Decode>
void multiply_tiles(const Sizes& p, const Tensor& x, const Tensor& bias, const Tensor& out,
                    const Decode& decode) {
  const int64_t count = tile_of(p.out, p.in, x);
  const Tensor tile = at::empty({count, p.in}, x.options());
  for (int64_t row = 0; row < p.out; row += count) {
    const int64_t rows = std::min(count, p.out - row);
    decode(Tile{row, rows, 0, p.in}, tile.mutable_data_ptr());
    Tensor part = out.narrow(1, row, rows);
    at::addmm_out(part, bias.narrow(0, row, rows), x, tile.narrow(0, 0, rows).t());
  }
}

// dx = dout·W. Each tile has all rows of some columns, so that a sum is rounded once.
template <class Decode>
void multiply_tiles_back(const Sizes& p, const Tensor& dout, const Tensor& dx,
                         const Decode& decode) {
  const int64_t count = tile_of(p.in, p.out, dout);
  const Tensor tile = at::empty({p.out * count}, dout.options());
  for (int64_t column = 0; column < p.in; column += count) {
    const int64_t columns = std::min(count, p.in - column);
    decode(Tile{0, p.out, column, columns}, tile.mutable_data_ptr());
    Tensor part = dx.narrow(1, column, columns);
    at::mm_out(part, dout, tile.narrow(0, 0, p.out * columns).view({p.out, columns}));
  }
}

}  // namespace fuseport::stored
