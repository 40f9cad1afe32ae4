// The operators on CUDA: the same schemas as in torch.cpp, another dispatch key.
#include "swiglu/cuda.hpp"

#include <torch/library.h>

#include "native/cuda_torch.hpp"
#include "swiglu/torch.hpp"

namespace fuseport::swiglu {
namespace {

struct OnCuda {
  static void forward(const char* op, const Tensor& gate, const Problem& p,
                      const MutableRows& out) {
    const OnDevice device(gate);
    check_cuda(op, cuda::forward(p, out, device.stream()));
  }
  static void backward(const char* op, const Tensor& gate, const Problem& p, const Backward& b) {
    const OnDevice device(gate);
    check_cuda(op, cuda::backward(p, b, device.stream()));
  }
};

using Cuda = Operators<OnCuda>;

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("swiglu", Cuda::swiglu);
  m.impl("swiglu_backward", Cuda::swiglu_backward);
  m.impl("swiglu_packed", Cuda::packed);
  m.impl("swiglu_packed_backward", Cuda::packed_backward);
}

}  // namespace
}  // namespace fuseport::swiglu
