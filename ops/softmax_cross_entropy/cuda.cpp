// The operators on CUDA: the same schemas as in torch.cpp, another dispatch key.
#include "softmax_cross_entropy/cuda.hpp"

#include <torch/library.h>

#include "native/cuda_torch.hpp"
#include "softmax_cross_entropy/torch.hpp"

namespace fuseport::softmax_cross_entropy {
namespace {

struct OnCuda {
  static void check(const Check&, const Problem&) {}  // that would have to wait for the device
  static void forward(const char* op, const Tensor& logits, const Problem& p, const Forward& f) {
    const OnDevice device(logits);
    check_cuda(op, cuda::forward(p, f, device.stream()));
  }
  static void backward(const char* op, const Tensor& logits, const Problem& p, const Backward& b) {
    const OnDevice device(logits);
    check_cuda(op, cuda::backward(p, b, device.stream()));
  }
};

using Cuda = Operators<OnCuda>;

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("softmax_cross_entropy", Cuda::forward);
  m.impl("softmax_cross_entropy_backward", Cuda::backward);
}

}  // namespace
}  // namespace fuseport::softmax_cross_entropy
