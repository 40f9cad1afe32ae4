// The binding of a stored weight's CUDA kernels to torch. What they do not take whole are products of
// torch's with decoded tiles: small enough to stay in a GPU's L2, and rounded to the dtype of x.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <tuple>

#include "native/cuda_torch.hpp"
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

// The kernels of an op for CUDA, as its cuda.hpp has them.
template <class Problem>
struct CudaKernels {
  bool (*takes)(const Problem&, const Forward&);  // rather than that torch multiplies tiles
  bool (*takes_back)(const Problem&, const Backward&);
  int64_t (*forward_scratch)(const Problem&);
  const char* (*forward)(const Problem&, const Forward&, void* scratch, void* stream);
  int64_t (*backward_scratch)(const Problem&);
  const char* (*backward)(const Problem&, const Backward&, void* scratch, void* stream);
  const char* (*decode)(const Problem&, const Tile&, void* to, void* stream);
};

// The layer.
template <class Problem>
Tensor linear(const CudaKernels<Problem>& k, const char* op, const OnDevice& device,
              const Problem& p, const FirstInput& first, const Tensor& x, const Tensor& bias) {
  const Tensor addend = bias.contiguous();
  Tensor out = empty_rows(x, p.out);
  if (out.numel() == 0) return out;
  const Forward f{first.rows, addend.const_data_ptr(), out.mutable_data_ptr()};
  if (k.takes(p, f)) {
    const Tensor scratch = device_scratch(k.forward_scratch(p), x);
    check_cuda(op, k.forward(p, f, scratch.mutable_data_ptr(), device.stream()));
    return out;
  }
  multiply_tiles(p, first.flat, addend, out.view({p.rows, p.out}), [&](const Tile& t, void* to) {
    check_cuda(op, k.decode(p, t, to, device.stream()));
  });
  return out;
}

// Its dx and dbias.
template <class Problem>
std::tuple<Tensor, Tensor> linear_backward(const CudaKernels<Problem>& k, const char* op,
                                           const OnDevice& device, const Problem& p,
                                           const FirstInput& first, const Tensor& dout) {
  Tensor dx = empty_rows(dout, p.in), dbias = at::empty({p.out}, dout.options());
  const Backward b{first.rows, dx.mutable_data_ptr(), dbias.mutable_data_ptr()};
  if (k.takes_back(p, b)) {
    const Tensor scratch = device_scratch(k.backward_scratch(p), dout);
    check_cuda(op, k.backward(p, b, scratch.mutable_data_ptr(), device.stream()));
    return {dx, dbias};
  }
  at::sum_out(dbias, first.flat, 0);
  if (dx.numel() == 0) return {dx, dbias};
  multiply_tiles_back(p, first.flat, dx.view({p.rows, p.in}), [&](const Tile& t, void* to) {
    check_cuda(op, k.decode(p, t, to, device.stream()));
  });
  return {dx, dbias};
}

}  // namespace fuseport::stored
