// The sum of walks as custom ops of ONNX Runtime, on the CPU.
#include "cross_merge/kernel.hpp"
#include "cross_scan/ort_cpu.hpp"

namespace fuseport::cross_merge {
namespace {

[[maybe_unused]] const bool added =
    cross_scan::add_nodes<cross_scan::PassesOnCpu<kernels>>("cross_merge_backward", "cross_merge");

}  // namespace
}  // namespace fuseport::cross_merge
