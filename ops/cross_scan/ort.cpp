// Walks over an image as custom ops of ONNX Runtime: the nodes that onnx.py writes, on the CPU.
#include "cross_scan/kernel.hpp"
#include "cross_scan/ort.hpp"

namespace fuseport::cross_scan {
namespace {

[[maybe_unused]] const bool added = cross_scan::add_nodes<kernels>("cross_scan", "cross_scan_backward");

}  // namespace
}  // namespace fuseport::cross_scan
