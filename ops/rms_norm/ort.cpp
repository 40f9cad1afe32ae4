// The norm as custom ops of ONNX Runtime, on the CPU.
#include "rms_norm/kernel.hpp"
#include "rms_norm/ort_cpu.hpp"

namespace fuseport::rms_norm {
namespace {

[[maybe_unused]] const bool added =
    add_nodes<PassesOnCpu<kernels>, false>("rms_norm", "rms_norm_backward");

}  // namespace
}  // namespace fuseport::rms_norm
