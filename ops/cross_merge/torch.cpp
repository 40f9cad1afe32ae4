// The sum of walks for torch: schemas, CPU kernels, autograd.
#include <torch/library.h>

#include "cross_merge/kernel.hpp"
#include "cross_scan/torch.hpp"
#include "native/autograd.hpp"

namespace fuseport::cross_merge {
namespace {

Tensor merged(const Tensor& ys) {
  return cross_scan::merge_cpu(kernels(), "cross_merge", "ys", ys);
}

Tensor merged_backward(const Tensor& dout) {
  return cross_scan::scan_cpu(kernels(), "cross_merge_backward", "dout", dout);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def("cross_merge(Tensor ys) -> Tensor out");
  m.def("cross_merge_backward(Tensor dout) -> Tensor dys");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("cross_merge", merged);
  m.impl("cross_merge_backward", merged_backward);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  differentiated_by(m, "cross_merge", "cross_merge_backward");
}

}  // namespace
}  // namespace fuseport::cross_merge
