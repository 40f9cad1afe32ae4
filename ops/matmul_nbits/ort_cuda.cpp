// The layer as custom ops of ONNX Runtime's CUDA provider.
#include "matmul_nbits/cuda.hpp"
#include "matmul_nbits/ort.hpp"
#include "native/stored_ort_cuda.hpp"

namespace fuseport::matmul_nbits {
namespace {

using Passes = stored::OnCuda<Problem, cuda::forward_scratch, cuda::forward,
                              cuda::backward_scratch, cuda::backward>;

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::matmul_nbits
