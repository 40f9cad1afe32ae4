// Walks over an image as custom ops of ONNX Runtime, on the CPU.
#include "cross_scan/kernel.hpp"
#include "cross_scan/ort_cpu.hpp"

namespace fuseport::cross_scan {
namespace {

[[maybe_unused]] const bool added =
    add_nodes<PassesOnCpu<kernels>>("cross_scan", "cross_scan_backward");

}  // namespace
}  // namespace fuseport::cross_scan
