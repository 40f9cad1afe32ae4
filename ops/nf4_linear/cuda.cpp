// The layer on CUDA: the same schemas as in torch.cpp, another dispatch key. Products of more than a
// few rows are torch's own; a tile of the weight is small enough to stay in a GPU's L2.
#include "nf4_linear/cuda.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "native/cuda_torch.hpp"
#include "nf4_linear/checks.hpp"
#include "nf4_linear/torch.hpp"

namespace fuseport::nf4_linear {
namespace {

constexpr int64_t TILE_BYTES = 1 << 25, WHOLE = 64;  // rows or columns of tiles are multiples

// How many of `count` rows or columns of the weight, each of `size` numbers, are a tile.
int64_t tile_of(int64_t count, int64_t size, const Tensor& like) {
  const int64_t fit = TILE_BYTES / std::max<int64_t>(size * like.element_size(), 1);
  return std::min(count, std::max(fit / WHOLE * WHOLE, WHOLE));
}

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& absmax, const Tensor& bias,
              int64_t in_features, int64_t block_size, int64_t quant_type) {
  const char* op = "nf4_linear";
  Check(op, "x", x).inputs(packed, absmax, bias, in_features, block_size, quant_type);
  const OnDevice device(x);
  const Inputs inputs(x, packed, absmax, in_features, bias.size(0), block_size, quant_type);
  const Problem& p = inputs.problem;
  const Tensor addend = bias.contiguous();
  Tensor out = stored::empty_rows(x, p.out);
  if (out.numel() == 0) return out;
  const Forward f{inputs.first.rows, addend.const_data_ptr(), out.mutable_data_ptr()};
  if (p.rows <= cuda::FEW || cuda::decodes_once(p, f)) {
    const Tensor scratch = at::empty({cuda::forward_scratch(p)}, x.options().dtype(at::kByte));
    check_cuda(op, cuda::forward(p, f, scratch.mutable_data_ptr(), device.stream()));
    return out;
  }
  const int64_t count = tile_of(p.out, p.in, x);
  const Tensor tile = at::empty({count, p.in}, x.options()), flat = out.view({p.rows, p.out});
  for (int64_t row = 0; row < p.out; row += count) {
    const int64_t rows = std::min(count, p.out - row);
    check_cuda(op, cuda::decode(p, {row, rows, 0, p.in}, tile.mutable_data_ptr(), device.stream()));
    Tensor part = flat.narrow(1, row, rows);
    at::addmm_out(part, addend.narrow(0, row, rows), inputs.first.flat, tile.narrow(0, 0, rows).t());
  }
  return out;
}

std::tuple<Tensor, Tensor> linear_backward(const Tensor& dout, const Tensor& packed,
                                           const Tensor& absmax, int64_t in_features,
                                           int64_t block_size, int64_t quant_type) {
  const char* op = "nf4_linear_backward";
  Check(op, "dout", dout).cotangent(packed, absmax, in_features, block_size, quant_type);
  const OnDevice device(dout);
  const Inputs inputs(dout, packed, absmax, in_features, dout.size(-1), block_size, quant_type);
  const Problem& p = inputs.problem;
  Tensor dx = stored::empty_rows(dout, p.in), dbias = at::empty({p.out}, dout.options());
  const Backward b{inputs.first.rows, dx.mutable_data_ptr(), dbias.mutable_data_ptr()};
  if (cuda::decodes_once(p, b)) {
    const Tensor scratch = at::empty({cuda::backward_scratch(p)}, dout.options().dtype(at::kByte));
    check_cuda(op, cuda::backward(p, b, scratch.mutable_data_ptr(), device.stream()));
    return {dx, dbias};
  }
  at::sum_out(dbias, inputs.first.flat, 0);
  if (dx.numel() == 0) return {dx, dbias};
  // Each tile has all rows of some columns, so that a sum is rounded once.
  const int64_t count = tile_of(p.in, p.out, dout);
  const Tensor tile = at::empty({p.out * count}, dout.options()), flat = dx.view({p.rows, p.in});
  for (int64_t column = 0; column < p.in; column += count) {
    const int64_t columns = std::min(count, p.in - column);
    check_cuda(op, cuda::decode(p, {0, p.out, column, columns}, tile.mutable_data_ptr(),
                                device.stream()));
    Tensor part = flat.narrow(1, column, columns);
    at::mm_out(part, inputs.first.flat, tile.narrow(0, 0, p.out * columns).view({p.out, columns}));
  }
  return {dx, dbias};
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("nf4_linear", linear);
  m.impl("nf4_linear_backward", linear_backward);
}

}  // namespace
}  // namespace fuseport::nf4_linear
