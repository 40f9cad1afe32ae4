// The sum of walks as custom ops of ONNX Runtime's CUDA provider.
#include "cross_merge/cuda.hpp"
#include "cross_scan/ort_cuda.hpp"

namespace fuseport::cross_merge {
namespace {

[[maybe_unused]] const bool added =
    cross_scan::add_nodes<cross_scan::PassesOnCuda<cuda::scan, cuda::merge>>(
        "cross_merge_backward", "cross_merge");

}  // namespace
}  // namespace fuseport::cross_merge
