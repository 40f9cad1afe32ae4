// The layer as custom ops of ONNX Runtime, on the CPU.
#include "nf4_linear/ort.hpp"

namespace fuseport::nf4_linear {
namespace {

[[maybe_unused]] const bool added = add_nodes<stored::OnCpu<Problem, kernels>>();

}  // namespace
}  // namespace fuseport::nf4_linear
