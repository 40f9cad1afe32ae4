// The operators of a decoding step of the causal convolution on CUDA: the same schemas as in torch.cpp,
// another dispatch key. Schemas and autograd are that file's; so are inputs and outputs.
#include <torch/library.h>

#include <optional>

#include "causal_conv1d_update/cuda.hpp"
#include "causal_conv1d_update/torch.hpp"
#include "native/cuda_torch.hpp"

namespace fuseport::causal_conv1d_update {
namespace {

Outputs update_cuda(const char* op, const Tensor& x, const Tensor& conv_state,
                    const std::optional<Tensor>& cache_seqlens, const Tensor& weight,
                    const Tensor& bias, bool silu) {
  const auto start = [&](const char* name, const Problem& p) {
    const OnDevice device(x);
    check_cuda(name, cuda::step(p, device.stream()));
  };
  return update_with(start, op, x, conv_state, cache_seqlens, weight, bias, silu);
}

Outputs update(const Tensor& x, const Tensor& conv_state, const Tensor& weight, const Tensor& bias,
               bool silu) {
  return update_cuda("causal_conv1d_update", x, conv_state, {}, weight, bias, silu);
}

Outputs update_circular(const Tensor& x, const Tensor& conv_state, const Tensor& cache_seqlens,
                        const Tensor& weight, const Tensor& bias, bool silu) {
  return update_cuda("causal_conv1d_update_circular", x, conv_state, cache_seqlens, weight, bias,
                    silu);
}

TORCH_LIBRARY_IMPL(FUSEPORT_CUDA_NAMESPACE, FUSEPORT_CUDA_KEY, m) {
  m.impl("causal_conv1d_update", update);
  m.impl("causal_conv1d_update_circular", update_circular);
}

}  // namespace
}  // namespace fuseport::causal_conv1d_update
