// The gated norm as custom ops of ONNX Runtime: the nodes that onnx.py writes, on the CPU.
#include "rms_norm/ort.hpp"
#include "rms_norm_gated/kernel.hpp"

namespace fuseport::rms_norm_gated {
namespace {

[[maybe_unused]] const bool added =
    rms_norm::add_nodes<true, kernels>("rms_norm_gated", "rms_norm_gated_backward");

}  // namespace
}  // namespace fuseport::rms_norm_gated
