// The layer on CUDA: the same schemas as in torch.cpp, another dispatch key. Products of more than a
// few rows are torch's own.
#include "matmul_nbits/cuda.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <tuple>

#include "matmul_nbits/checks.hpp"
#include "matmul_nbits/torch.hpp"
#include "native/cuda_torch.hpp"
#include "native/stored_cuda_torch.hpp"

namespace fuseport::matmul_nbits {
namespace {

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& scales,
              const Tensor& zero_points, const Tensor& bias, int64_t in_features, int64_t bits,
              int64_t group_size) {
  const char* op = "matmul_nbits";
  Check(op, "x", x).inputs(packed, scales, zero_points, bias, in_features, bits, group_size);
  const OnDevice device(x);
  const Inputs inputs(x, packed, scales, zero_points, in_features, bits, group_size);
  const Problem& p = inputs.problem;
  const Tensor addend = bias.contiguous();
  Tensor out = stored::empty_rows(x, p.out);
  if (out.numel() == 0) return out;
  if (p.rows <= cuda::FEW) {
    const Forward f{inputs.first.rows, addend.const_data_ptr(), out.mutable_data_ptr()};
    check_cuda(op, cuda::forward(p, f, nullptr, device.stream()));
    return out;
  }
  stored::multiply_tiles(p, inputs.first.flat, addend, out.view({p.rows, p.out}),
                         [&](const cuda::Tile& tile, void* to) {
                           check_cuda(op, cuda::decode(p, tile, to, device.stream()));
                         });
  return out;
}

std::tuple<Tensor, Tensor> linear_backward(const Tensor& dout, const Tensor& packed,
                                           const Tensor& scales, const Tensor& zero_points,
                                           int64_t in_features, int64_t bits,
                                           int64_t group_size) {
  const char* op = "matmul_nbits_backward";
  Check(op, "dout", dout)
      .cotangent(packed, scales, zero_points, in_features, bits, group_size);
  const OnDevice device(dout);
  const Inputs inputs(dout, packed, scales, zero_points, in_features, bits, group_size);
  const Problem& p = inputs.problem;
  Tensor dx = stored::empty_rows(dout, p.in), dbias = at::empty({p.out}, dout.options());
  at::sum_out(dbias, inputs.first.flat, 0);
  if (dx.numel() == 0) return {dx, dbias};
  stored::multiply_tiles_back(p, inputs.first.flat, dx.view({p.rows, p.in}),
                              [&](const cuda::Tile& tile, void* to) {
                                check_cuda(op, cuda::decode(p, tile, to, device.stream()));
                              });
  return {dx, dbias};
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("matmul_nbits", linear);
  m.impl("matmul_nbits_backward", linear_backward);
}

}  // namespace
}  // namespace fuseport::matmul_nbits
