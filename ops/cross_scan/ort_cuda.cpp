// Walks over an image as custom ops of ONNX Runtime's CUDA provider.
#include "cross_scan/ort_cuda.hpp"

namespace fuseport::cross_scan {
namespace {

[[maybe_unused]] const bool added =
    add_nodes<PassesOnCuda<cuda::scan, cuda::merge>>("cross_scan", "cross_scan_backward");

}  // namespace
}  // namespace fuseport::cross_scan
