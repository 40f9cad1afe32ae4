// A decoding step of the causal convolution as operators of torch: schemas and CPU kernels. No
// Python in here, so that a C++ program can open the library and run artifacts that use them.
#include <torch/library.h>

#include <optional>

#include "causal_conv1d_update/torch.hpp"
#include "native/autograd.hpp"

namespace fuseport::causal_conv1d_update {
namespace {

Outputs update_cpu(const char* op, const Tensor& x, const Tensor& conv_state,
                   const std::optional<Tensor>& cache_seqlens, const Tensor& weight,
                   const Tensor& bias, bool silu) {
  const auto start = [](const char*, const Problem& p) { run(Host{}, p); };
  return update_with(start, op, x, conv_state, cache_seqlens, weight, bias, silu);
}

Outputs update(const Tensor& x, const Tensor& conv_state, const Tensor& weight, const Tensor& bias,
               bool silu) {
  return update_cpu("causal_conv1d_update", x, conv_state, {}, weight, bias, silu);
}

Outputs update_circular(const Tensor& x, const Tensor& conv_state, const Tensor& cache_seqlens,
                        const Tensor& weight, const Tensor& bias, bool silu) {
  return update_cpu("causal_conv1d_update_circular", x, conv_state, cache_seqlens, weight, bias,
                    silu);
}

TORCH_LIBRARY_FRAGMENT(fuseport, m) {
  // Where the fakes come from: torch names this module to whom they are missing.
  m.set_python_module("fuseport.ops.registration");
  m.def(
      "causal_conv1d_update(Tensor x, Tensor conv_state, Tensor weight, Tensor bias, bool silu) "
      "-> (Tensor out, Tensor new_state)");
  m.def(
      "causal_conv1d_update_circular(Tensor x, Tensor conv_state, Tensor cache_seqlens, "
      "Tensor weight, Tensor bias, bool silu) -> (Tensor out, Tensor new_state)");
}

TORCH_LIBRARY_IMPL(fuseport, CPU, m) {
  m.impl("causal_conv1d_update", update);
  m.impl("causal_conv1d_update_circular", update_circular);
}

TORCH_LIBRARY_IMPL(fuseport, Autograd, m) {
  undifferentiated(m, "causal_conv1d_update");
  undifferentiated(m, "causal_conv1d_update_circular");
}

}  // namespace
}  // namespace fuseport::causal_conv1d_update
