// The sum of walks as custom ops of ONNX Runtime: the nodes that onnx.py writes, on the CPU.
#include "cross_merge/kernel.hpp"
#include "cross_scan/ort.hpp"

namespace fuseport::cross_merge {
namespace {

[[maybe_unused]] const bool added = cross_scan::add_nodes<kernels>("cross_merge_backward", "cross_merge");

}  // namespace
}  // namespace fuseport::cross_merge
