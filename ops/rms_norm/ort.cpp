// The norm as custom ops of ONNX Runtime: the nodes that onnx.py writes, on the CPU.
#include "rms_norm/kernel.hpp"
#include "rms_norm/ort.hpp"

namespace fuseport::rms_norm {
namespace {

[[maybe_unused]] const bool added = add_nodes<false, kernels>("rms_norm", "rms_norm_backward");

}  // namespace
}  // namespace fuseport::rms_norm
