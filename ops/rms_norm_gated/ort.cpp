// The gated norm as custom ops of ONNX Runtime, on the CPU.
#include "rms_norm/ort_cpu.hpp"
#include "rms_norm_gated/kernel.hpp"

namespace fuseport::rms_norm_gated {
namespace {

[[maybe_unused]] const bool added = rms_norm::add_nodes<rms_norm::PassesOnCpu<kernels>, true>(
    "rms_norm_gated", "rms_norm_gated_backward");

}  // namespace
}  // namespace fuseport::rms_norm_gated
