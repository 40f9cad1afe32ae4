// The gated norm as custom ops of ONNX Runtime's CUDA provider.
#include "rms_norm/ort_cuda.hpp"
#include "rms_norm_gated/cuda.hpp"

namespace fuseport::rms_norm_gated {
namespace {

[[maybe_unused]] const bool added =
    rms_norm::add_nodes<rms_norm::PassesOnCuda<cuda::kernels>, true>("rms_norm_gated",
                                                                     "rms_norm_gated_backward");

}  // namespace
}  // namespace fuseport::rms_norm_gated
