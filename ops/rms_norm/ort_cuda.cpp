// The norm as custom ops of ONNX Runtime's CUDA provider.
#include "rms_norm/ort_cuda.hpp"

namespace fuseport::rms_norm {
namespace {

[[maybe_unused]] const bool added =
    add_nodes<PassesOnCuda<cuda::kernels>, false>("rms_norm", "rms_norm_backward");

}  // namespace
}  // namespace fuseport::rms_norm
