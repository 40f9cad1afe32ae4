// The layer on CUDA: the same schemas as in torch.cpp, another dispatch key. Products of more than a
// few rows are torch's own.
#include "nf4_linear/cuda.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <tuple>

#include "native/cuda_torch.hpp"
#include "native/stored_cuda_torch.hpp"
#include "nf4_linear/checks.hpp"
#include "nf4_linear/torch.hpp"

namespace fuseport::nf4_linear {
namespace {

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
  stored::multiply_tiles(p, inputs.first.flat, addend, out.view({p.rows, p.out}),
                         [&](const cuda::Tile& tile, void* to) {
                           check_cuda(op, cuda::decode(p, tile, to, device.stream()));
                         });
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
  stored::multiply_tiles_back(p, inputs.first.flat, dx.view({p.rows, p.in}),
                              [&](const cuda::Tile& tile, void* to) {
                                check_cuda(op, cuda::decode(p, tile, to, device.stream()));
                              });
  return {dx, dbias};
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("nf4_linear", linear);
  m.impl("nf4_linear_backward", linear_backward);
}

}  // namespace
}  // namespace fuseport::nf4_linear
