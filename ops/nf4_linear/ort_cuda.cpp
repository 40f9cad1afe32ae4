// The layer as custom ops of ONNX Runtime's CUDA provider.
#include "native/stored_ort_cuda.hpp"
#include "nf4_linear/cuda.hpp"
#include "nf4_linear/ort.hpp"

namespace fuseport::nf4_linear {
namespace {

using Passes = stored::OnCuda<Problem, cuda::forward_scratch, cuda::forward,
                              cuda::backward_scratch, cuda::backward>;

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::nf4_linear
