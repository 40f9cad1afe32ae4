// The layer as custom ops of ONNX Runtime, on the CPU.
#include "matmul_nbits/ort.hpp"

namespace fuseport::matmul_nbits {
namespace {

[[maybe_unused]] const bool added = add_nodes<stored::OnCpu<Problem, kernels>>();

}  // namespace
}  // namespace fuseport::matmul_nbits
