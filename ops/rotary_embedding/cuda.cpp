// The operators on CUDA: the same schemas as in torch.cpp, another dispatch key.
#include "rotary_embedding/cuda.hpp"

#include <torch/library.h>

#include "native/cuda_torch.hpp"
#include "rotary_embedding/torch.hpp"

namespace fuseport::rotary_embedding {
namespace {

struct OnCuda {
  static void forward(const char* op, const Tensor& x, const Problem& p, void* out) {
    const OnDevice device(x);
    check_cuda(op, cuda::forward(p, out, device.stream()));
  }
  static void backward(const char* op, const Tensor& x, const Problem& p, const Backward& g) {
    const OnDevice device(x);
    const Tensor scratch = device_scratch(cuda::scratch_bytes(p, g), x);
    check_cuda(op, cuda::backward(p, g, scratch.mutable_data_ptr(), device.stream()));
  }
};

using Cuda = Operators<OnCuda>;

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("rotary_embedding", Cuda::forward);
  m.impl("rotary_embedding_backward", Cuda::backward);
}

}  // namespace
}  // namespace fuseport::rotary_embedding
