// The sum of walks on CUDA: the same schemas as in torch.cpp, another dispatch key.
#include "cross_merge/cuda.hpp"

#include <torch/library.h>

#include "cross_scan/cuda_torch.hpp"

namespace fuseport::cross_merge {
namespace {

using at::Tensor;

Tensor merged(const Tensor& ys) {
  return cross_scan::merge_cuda(cuda::merge, "cross_merge", "ys", ys);
}

Tensor merged_backward(const Tensor& dout) {
  return cross_scan::scan_cuda(cuda::scan, "cross_merge_backward", "dout", dout);
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("cross_merge", merged);
  m.impl("cross_merge_backward", merged_backward);
}

}  // namespace
}  // namespace fuseport::cross_merge
