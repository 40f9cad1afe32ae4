// Walks over an image for torch: schemas, CPU kernels, autograd.
#include <torch/library.h>

#include "cross_scan/kernel.hpp"
#include "cross_scan/torch.hpp"
#include "native/autograd.hpp"

namespace fuseport::cross_scan {
namespace {

Tensor walked(const Tensor& x) { return scan_cpu(kernels(), "cross_scan", "x", x); }

Tensor walked_backward(const Tensor& dout) {
  return merge_cpu(kernels(), "cross_scan_backward", "dout", dout);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def("cross_scan(Tensor x) -> Tensor out");
  m.def("cross_scan_backward(Tensor dout) -> Tensor dx");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("cross_scan", walked);
  m.impl("cross_scan_backward", walked_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "cross_scan", "cross_scan_backward");
}

}  // namespace
}  // namespace fuseport::cross_scan
