// Walks over an image on CUDA: the same schemas as in torch.cpp, another dispatch key.
#include "cross_scan/cuda.hpp"

#include <torch/library.h>

#include "cross_scan/cuda_torch.hpp"

namespace fuseport::cross_scan {
namespace {

Tensor walked(const Tensor& x) { return scan_cuda(cuda::scan, "cross_scan", "x", x); }

Tensor walked_backward(const Tensor& dout) {
  return merge_cuda(cuda::merge, "cross_scan_backward", "dout", dout);
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("cross_scan", walked);
  m.impl("cross_scan_backward", walked_backward);
}

}  // namespace
}  // namespace fuseport::cross_scan
